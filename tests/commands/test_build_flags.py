from __future__ import annotations

import shlex

import pytest

from djl_trtllm.commands.build_flags import CompileArguments, read_arguments
from djl_trtllm.errors import DjlTrtllmError

WORKFLOW = """
    --checkpoint_dir=/models/trt/llama-trt-ckpt
    --gpt_attention_plugin=float16
    --gemm_plugin=float16
    --remove_input_padding=enable
    --paged_kv_cache=enable
    --tp_size=1
    --max_batch_size=256
    --max_input_len=2048
    --max_output_len=1024
    --max_num_tokens=1024
    --opt_num_tokens=1024
    --output_dir=/models/trt/llama-trt-engine
    --context_fmha=enable --use_paged_context_fmha=enable --context_fmha_fp32_acc=enable --multi_block_mode=enable
"""
"""The flags of the workflow for Llama, its variables replaced."""

SETTINGS = (
    "option.gpt_attention_plugin=float16",
    "option.gemm_plugin=float16",
    "option.remove_input_padding=enable",
    "option.paged_kv_cache=enable",
    "option.tensor_parallel_degree=1",
    "option.max_num_sequences=256",
    "option.max_input_len=2048",
    "option.max_output_len=1024",
    "option.max_num_tokens=1024",
    "option.opt_num_tokens=1024",
    "option.context_fmha=enable",
    "option.use_paged_context_fmha=enable",
    "option.context_fmha_fp32_acc=enable",
    "option.multi_block_mode=enable",
)


def read(line: str) -> CompileArguments:
    return read_arguments(shlex.split(line))


def test_the_workflows_flags_are_options() -> None:
    expected = CompileArguments("/models/trt/llama-trt-ckpt", "/models/trt/llama-trt-engine", SETTINGS, ())
    assert read(WORKFLOW) == expected
    assert read(WORKFLOW.replace("=", " ")) == expected


@pytest.mark.parametrize(
    "line",
    [
        "in out --tp_size 2 --fast_build",
        "--fast_build in --tp-size 2 out",
        "--tp_size=2 --fast_build --checkpoint_dir in out",
        "in --output_dir out --fast_build enable --tp_size 2",
    ],
)
def test_checkpoint_and_output_are_places_or_flags(line: str) -> None:
    arguments = read(line)
    assert (arguments.checkpoint, arguments.out) == ("in", "out")
    assert {setting.replace("enable", "true") for setting in arguments.settings} == {
        "option.tensor_parallel_degree=2",
        "option.fast_build=true",
    }


def test_nothing_is_nothing() -> None:
    assert read("") == CompileArguments(None, None, (), ())
    assert read("in") == CompileArguments("in", None, (), ())
    assert read("--output_dir=out") == CompileArguments(None, "out", (), ())


def test_flags_without_effect_are_reported() -> None:
    notes = read("in out --workers=4 --log_level=verbose").notes
    assert [note.partition(":")[0] for note in notes] == ["--workers", "--log_level"]
    assert all("no effect" in note for note in notes)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("in out other", "other: expected one CHECKPOINT and one OUT"),
        ("--checkpoint_dir in --output_dir out other", "other: expected one CHECKPOINT"),
        ("in out --max_beam_widht=2", r"--max_beam_widht=2: no option has this name, did you mean --max_beam_width\?"),
        ("in out --mamba_conv1d_plugin=auto", "--mamba_conv1d_plugin=auto: no option has this name"),
        ("in out --install_requirements=true", "no option has this name"),
        ("in out --tp_size", "--tp_size needs a value: --tp_size=VALUE"),
        ("in out --tp_size --fast_build", "--tp_size needs a value"),
    ],
)
def test_what_is_wrong_is_named(line: str, message: str) -> None:
    with pytest.raises(DjlTrtllmError, match=message):
        read(line)
