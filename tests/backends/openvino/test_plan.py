from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from djl_trtllm.backends.openvino import plan
from djl_trtllm.backends.openvino.plan import OpenVinoPlan
from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.errors import ConfigError, EngineError
from djl_trtllm.model import inspect
from tests.engines.helpers import CONTEXT, CPU_ONLY, configured


def planned(checkpoint: Path, **options: object) -> OpenVinoPlan:
    plan = plan_engine(configured(**options), inspect(checkpoint), CPU_ONLY)
    assert isinstance(plan, OpenVinoPlan)
    return plan


def with_config(checkpoint: Path, to: Path, **changes: object) -> Path:
    shutil.copytree(checkpoint, to)
    config = json.loads((to / "config.json").read_text()) | changes
    (to / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return to


def test_the_executors_options_are_complete(checkpoint: Path, tmp_path: Path) -> None:
    plan = planned(checkpoint, inference_num_threads=2, enable_kv_cache_reuse="true")
    assert plan.at(tmp_path).executor_options() == {
        "engine_dir": str(tmp_path),
        "max_num_batched_tokens": 256,
        "num_kv_blocks": 32 * 9,
        "enable_prefix_caching": True,
        "kv_cache_precision": "f16",
        "inference_precision": "f32",
        "num_threads": 2,
        "max_sequences": 32,
        "max_seq_len": CONTEXT,
    }
    with pytest.raises(ValueError, match="no engine yet"):
        plan.executor_options()


def test_output_is_sent_every_4_milliseconds_or_after_the_iterations_that_are_asked_for(checkpoint: Path) -> None:
    plans = planned(checkpoint), planned(checkpoint, stream_interval=1), planned(checkpoint, stream_interval=3)
    assert [(each.stream_interval, each.send_interval) for each in plans] == [(1, 0.004), (1, 0.0), (3, 0.0)]


def test_what_is_not_installed_is_named_with_how_to_install_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the image for GPUs; planning for another machine goes on."""
    monkeypatch.setattr(plan, "find_spec", lambda name: None)
    made = planned(checkpoint, backend="openvino").at(tmp_path)
    with pytest.raises(
        EngineError, match=r"OpenVINO GenAI is not installed.*pip install 'djl-trtllm\[cpu\]'"
    ) as caught:
        made.executor_options()
    assert str(caught.value).startswith("backend openvino (option.backend=openvino")


@pytest.mark.parametrize(("name", "expected"), [("float16", "fp16"), ("bfloat16", "bf16"), ("float32", "fp32")])
def test_auto_keeps_the_checkpoints_number_format(checkpoint: Path, tmp_path: Path, name: str, expected: str) -> None:
    assert planned(with_config(checkpoint, tmp_path / "m", dtype=name)).dtype == expected


def test_a_checkpoint_that_does_not_tell_its_format_is_read_for_it(checkpoint: Path, tmp_path: Path) -> None:
    assert planned(with_config(checkpoint, tmp_path / "m", dtype=None)).dtype == "fp16"


def test_dtype_beats_the_checkpoints_format(checkpoint: Path) -> None:
    plan = planned(checkpoint, dtype="fp32")
    assert (plan.dtype, plan.asked) == ("fp32", {"dtype": "fp32"})


@pytest.mark.parametrize("quantize", ["int8", "int4", "awq"])
def test_weight_quantization_is_a_build_option(checkpoint: Path, quantize: str) -> None:
    plan = planned(checkpoint, quantize=quantize)
    assert plan.build_options["quantize"] == quantize
    assert plan.asked == {"quantize": quantize}
    assert plan.cache_key != planned(checkpoint).cache_key


def test_only_what_the_user_set_is_asked(checkpoint: Path) -> None:
    assert planned(checkpoint).asked == {}
    assert planned(checkpoint, quantize="none").asked == {"quantize": "none"}


@pytest.mark.parametrize(("quantize", "replacement"), [("smoothquant", "int8"), ("fp8", "int8"), ("w4a8_awq", "awq")])
def test_quantization_without_a_counterpart_is_refused_by_name_with_what_replaces_it(
    checkpoint: Path, quantize: str, replacement: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(checkpoint, quantize=quantize)
    (problem,) = caught.value.problems
    assert problem.startswith(
        f"option.quantize={quantize} (environment variable OPTION_QUANTIZE) is not available with OpenVINO: "
    )
    assert f"option.quantize={replacement}" in problem


def test_an_8_bit_floating_point_cache_is_refused_with_what_replaces_it(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"option\.kv_cache_dtype=fp8 .*option\.kv_cache_dtype=int8"):
        planned(checkpoint, kv_cache_dtype="fp8")


def test_all_problems_are_reported_at_once(checkpoint: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(checkpoint, quantize="fp8", max_tokens_in_paged_kv_cache=1)
    assert len(caught.value.problems) == 2


def test_the_models_context_bounds_the_sequence_and_is_reported_where_the_user_asked_for_more(checkpoint: Path) -> None:
    assert planned(checkpoint).max_seq_len == CONTEXT
    assert planned(checkpoint).notes == ()
    plan = planned(checkpoint, max_seq_len=4096)
    assert plan.max_seq_len == CONTEXT
    assert "option.max_seq_len=4096 (environment variable OPTION_MAX_SEQ_LEN)" in plan.notes[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_seq_len": 100}, 100),
        ({"max_input_len": 60, "max_output_len": 50}, 110),
        ({"max_input_len": 60, "max_output_len": 50, "max_seq_len": 200}, 200),
    ],
)
def test_the_users_lengths_bound_the_sequence(checkpoint: Path, options: dict[str, object], expected: int) -> None:
    assert planned(checkpoint, **options).max_seq_len == expected


def test_a_small_kv_cache_bounds_the_sequence_and_says_so(checkpoint: Path) -> None:
    plan = planned(checkpoint, max_tokens_in_paged_kv_cache=128)
    assert plan.max_seq_len == 96
    assert "the longest sequence is 96 tokens and not 256" in plan.notes[0]


@pytest.mark.parametrize(
    ("options", "tokens", "sequences"),
    [
        ({}, 256, 32),
        ({"max_rolling_batch_size": 256}, 256, 256),
        ({"max_rolling_batch_size": 300}, 512, 300),
        ({"max_rolling_batch_size": 600}, 600, 600),
        ({"max_num_tokens": 4096}, 4096, 256),
        ({"max_rolling_batch_size": 64, "max_num_sequences": 16}, 256, 16),
    ],
)
def test_a_decoding_step_fits_in_the_tokens_of_a_step(
    checkpoint: Path, options: dict[str, object], tokens: int, sequences: int
) -> None:
    plan = planned(checkpoint, **options)
    assert (plan.max_num_batched_tokens, plan.max_sequences) == (tokens, sequences)


def test_few_tokens_per_step_lower_the_sequences_and_say_so(checkpoint: Path) -> None:
    plan = planned(checkpoint, max_num_tokens=64)
    assert (plan.max_num_batched_tokens, plan.max_sequences) == (64, 64)
    assert any(note.startswith("64 sequences run at once and not 256: option.max_num_tokens=64") for note in plan.notes)


def test_a_plan_for_compiling_does_not_need_this_machines_memory(checkpoint: Path) -> None:
    plan = plan_engine(configured(max_tokens_in_paged_kv_cache=10**9), inspect(checkpoint), CPU_ONLY, compile_only=True)
    assert isinstance(plan, OpenVinoPlan)
    assert plan.kv_cache is None


def test_the_plan_in_one_line_has_the_backend_its_reason_and_the_sizes(checkpoint: Path) -> None:
    assert planned(checkpoint).describe() == (
        "backend openvino: TensorRT-LLM is not installed, and there is no GPU; KV cache 288 blocks of 32 tokens "
        "in f16, 2.4 MB (32 sequences of 256 tokens); up to 32 sequences of 256 tokens, 256 tokens per step"
    )


@pytest.mark.parametrize("compile_only", [False, True])
def test_a_model_without_attention_is_refused_before_it_is_compiled(
    checkpoint: Path, tmp_path: Path, compile_only: bool
) -> None:
    model = with_config(checkpoint, tmp_path / "model", model_type="mamba")
    with pytest.raises(EngineError, match=r"model is a mamba model, which has no attention: .* TensorRT-LLM on a GPU"):
        plan_engine(configured(), inspect(model), CPU_ONLY, compile_only=compile_only)


def test_a_scaling_that_the_export_does_not_have_is_reported(checkpoint: Path) -> None:
    for kind, told in (("dynamic", True), ("linear", False)):
        notes = planned(checkpoint, rotary_scaling_type=kind, rotary_scaling_factor=2).notes
        assert any(f"option.rotary_scaling_type={kind}" in note for note in notes) is told
