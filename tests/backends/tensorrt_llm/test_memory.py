"""What is chosen for max_num_tokens by the memory of the GPUs, and what is said of options that do not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.backends.planning import fitted_to_memory, plan_engine
from djl_trtllm.backends.tensorrt_llm.plan import TensorRtEnginePlan
from djl_trtllm.config import Config
from djl_trtllm.config.sources.origin import Origin
from djl_trtllm.engines.gpu import Gpu
from djl_trtllm.errors import ConfigError
from djl_trtllm.model import Layout, ModelKind
from djl_trtllm.model.layout import inspect_config
from djl_trtllm.sizing.measured import TABLES, Row
from tests.engines.helpers import CPU_ONLY, configured, gpu_machine, write_checkpoint
from tests.sizing.configs import llama
from tests.sizing.test_measured import CONFIGS

MIB = 1 << 20
A10G = Gpu("NVIDIA A10G", (8, 6), 23028 * MIB)
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 81559 * MIB)
LLAMA_3_70B = {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
GEMMA_7B = {
    "model_type": "gemma",
    "num_hidden_layers": 28,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "vocab_size": 256000,
    "tie_word_embeddings": True,
}


def layout(tmp_path: Path, **changes: Any) -> Layout:
    (tmp_path / "config.json").write_text(json.dumps(llama(**changes)))
    found = inspect_config(tmp_path)
    assert found is not None
    return found


def fitted(layout: Layout, gpu: Gpu = A10G, gpus: int = 1, /, **options: object) -> Config:
    config = configured(**({"tensor_parallel_degree": gpus} | options))
    return fitted_to_memory(config, layout, gpu_machine(gpus=gpus, gpu=gpu))


def test_a_measured_number_is_used_as_it_stands(tmp_path: Path) -> None:
    found = fitted(layout(tmp_path, **GEMMA_7B))
    assert found.options.max_num_tokens == 1190
    assert str(found.origin("max_num_tokens")) == "derived from table LMI 0.28, Gemma 7B on g5.12xl, tp 1"
    assert not found.is_set("max_num_tokens")
    assert found.warnings == ()


@pytest.mark.parametrize("row", TABLES["0.28"], ids=str)
def test_every_row_of_the_table_is_a_default(tmp_path: Path, row: Row) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", **CONFIGS[row.model.name.lower()]}))
    described = inspect_config(tmp_path)
    assert described is not None
    model = row.machine.gpu
    gpu = Gpu(f"NVIDIA {model.nvml}", model.compute_capability, model.memory)
    config = configured(tensor_parallel_degree=row.tensor_parallel)
    found = fitted_to_memory(config, described, gpu_machine(gpus=row.machine.gpus, gpu=gpu))
    if row.max_num_tokens is None:
        assert found.options.max_num_tokens is None and str(row) in found.warnings[0]
    else:
        assert found.options.max_num_tokens == min(row.max_num_tokens, 16384)
        assert str(row) in str(found.origin("max_num_tokens")) and found.warnings == ()


def test_at_most_16384_tokens_are_used_and_nothing_is_widened(tmp_path: Path) -> None:
    found = fitted(layout(tmp_path))
    assert found.options.max_num_tokens == 16384
    origin = str(found.origin("max_num_tokens"))
    assert origin.startswith("derived from table LMI 0.28, LLaMA 3 8B on g5.12xl, tp 1: 24000, at most")
    options = found.options
    assert (options.max_input_len, options.max_output_len, options.max_rolling_batch_size) == (1024, 512, 32)
    assert not options.enable_chunked_prefill


def test_without_a_measurement_it_is_half_of_the_estimate(tmp_path: Path) -> None:
    """Half as many heads are another model, which nobody measured."""
    found = fitted(layout(tmp_path, num_key_value_heads=16))
    tokens = found.options.max_num_tokens
    origin = str(found.origin("max_num_tokens"))
    assert tokens is not None and 1024 <= tokens <= 16384
    assert origin in {
        f"derived from half of the estimate of {2 * tokens + odd} for NVIDIA A10G, tp 1" for odd in (0, 1)
    }


@pytest.mark.parametrize("options", [{"quantize": "fp8"}, {"enable_lora": "true"}, {"max_beam_width": "2"}])
def test_measurements_are_of_plain_models(tmp_path: Path, options: dict[str, str]) -> None:
    assert "estimate" in str(fitted(layout(tmp_path), **options).origin("max_num_tokens"))


def test_it_is_not_more_than_the_batch_can_use(tmp_path: Path) -> None:
    found = fitted(layout(tmp_path), max_rolling_batch_size=4, max_input_len=1000, max_output_len=500)
    assert found.options.max_num_tokens == 6000
    assert str(found.origin("max_num_tokens")).startswith("derived from 4 sequences of 1500 tokens; table LMI 0.28")


def test_every_sequence_of_the_batch_has_a_token(tmp_path: Path) -> None:
    assert fitted(layout(tmp_path, **GEMMA_7B), max_rolling_batch_size=2000).options.max_num_tokens == 2000


def test_prompts_are_split_where_one_is_longer(tmp_path: Path) -> None:
    found = fitted(layout(tmp_path, **GEMMA_7B), max_input_len=3000)
    assert found.options.max_num_tokens == 1190
    assert found.options.enable_chunked_prefill
    assert not found.is_set("enable_chunked_prefill")
    origin = "derived from option.max_num_tokens=1190, which is less than a prompt of 3000 tokens"
    assert str(found.origin("enable_chunked_prefill")) == origin


def test_longer_prompts_than_16384_are_split(tmp_path: Path) -> None:
    roomy = layout(tmp_path, max_position_embeddings=131072)
    found = fitted(roomy, H100, max_input_len=40000)
    assert (found.options.max_num_tokens, found.options.enable_chunked_prefill) == (16384, True)


@pytest.mark.parametrize("option", ["enable_chunked_prefill", "use_paged_context_fmha"])
def test_prompts_that_may_not_be_split_are_held_whole(tmp_path: Path, option: str) -> None:
    found = fitted(layout(tmp_path, **GEMMA_7B), max_input_len=3000, **{option: "false"})
    assert (found.options.max_num_tokens, found.options.enable_chunked_prefill) == (3000, False)
    assert "derived from one prompt of option.max_input_len; table LMI 0.28" in str(found.origin("max_num_tokens"))
    assert "option.max_num_tokens=3000" in found.warnings[0] and "at most 1190 do" in found.warnings[0]


def test_a_prompt_of_more_than_half_of_the_estimate_is_held_whole_where_it_fits(tmp_path: Path) -> None:
    tight = layout(tmp_path, num_key_value_heads=16, max_position_embeddings=131072)
    half = fitted(tight).options.max_num_tokens
    assert half is not None and half < 16384
    found = fitted(tight, max_input_len=half + 10, max_output_len=10)
    assert (found.options.max_num_tokens, found.options.enable_chunked_prefill) == (half + 10, False)


def test_a_number_of_the_user_stays(tmp_path: Path) -> None:
    for tokens in (500, 20000):
        assert fitted(layout(tmp_path), max_num_tokens=tokens).options.max_num_tokens == tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_num_tokens": "30000"},
            "max_num_tokens=30000 (environment variable OPTION_MAX_NUM_TOKENS) does not fit",
        ),
        ({"max_num_tokens": "30000"}, "at most 24000 do (table LMI 0.28, LLaMA 3 8B on g5.12xl, tp 1)"),
        ({"max_num_tokens": "300000", "quantize": "fp8"}, "(estimated for NVIDIA A10G, tp 1)"),
    ],
)
def test_a_number_that_does_not_fit_is_a_warning_with_both_numbers(
    tmp_path: Path, options: dict[str, str], message: str
) -> None:
    assert message in fitted(layout(tmp_path), **options).warnings[-1]


def test_a_cache_that_holds_no_whole_sequence_is_a_warning(tmp_path: Path) -> None:
    long = layout(tmp_path, num_key_value_heads=16, max_position_embeddings=131072)
    warning = fitted(long, max_input_len=100_000, max_output_len=10_000).warnings[-1]
    assert "the KV cache on NVIDIA A10G, tp 1 holds about" in warning
    assert "less than one sequence of 110000" in warning
    assert "lower option.max_input_len" in warning


def test_a_measured_number_that_leaves_no_room_for_longer_sequences_is_a_warning(tmp_path: Path) -> None:
    long = {"max_input_len": 7500, "max_output_len": 512, "max_rolling_batch_size": 256}
    warning = fitted(layout(tmp_path), **long).warnings[-1]
    assert "option.max_num_tokens=16384" in warning and "less than one sequence of 8012" in warning
    assert "table LMI 0.28, LLaMA 3 8B on g5.12xl, tp 1 was measured with prompts of 3,700 tokens" in warning
    smaller = int(warning.partition("set option.max_num_tokens=")[2].partition(",")[0])
    advised = fitted(layout(tmp_path), **long, max_num_tokens=smaller).warnings
    assert not any("KV cache" in text or "does not fit" in text for text in advised)
    assert fitted(layout(tmp_path), max_rolling_batch_size=256).warnings == ()


def test_out_of_memory_is_reported_before_anything_is_built(tmp_path: Path) -> None:
    big = layout(tmp_path, **LLAMA_3_70B)
    found = fitted(big, A10G, 8)
    assert found.options.max_num_tokens is None
    assert "out of memory was measured (table LMI 0.28, LLaMA 3 70B on g5.48xl, tp 8)" in found.warnings[0]
    assert "22.5 GiB" in found.warnings[0]
    assert "option.strict_memory=true refuses it" in found.warnings[0]
    assert "out of memory is expected on NVIDIA A10G, tp 4" in fitted(big, A10G, 4).warnings[0]


def test_strict_memory_refuses_what_does_not_fit(tmp_path: Path) -> None:
    big = layout(tmp_path, **LLAMA_3_70B)
    with pytest.raises(ConfigError, match=r"out of memory was measured .*OPTION_STRICT_MEMORY"):
        fitted(big, A10G, 8, strict_memory="true")
    with pytest.raises(ConfigError, match=r"option\.max_num_tokens=30000 .* at most 24000 do"):
        fitted(layout(tmp_path), max_num_tokens=30000, strict_memory="true")
    assert fitted(layout(tmp_path), strict_memory="true").options.max_num_tokens == 16384


def test_gpus_of_unknown_memory_leave_everything_as_it_is_and_the_log_says_so(tmp_path: Path) -> None:
    found = fitted(layout(tmp_path), Gpu("NVIDIA A10G", (8, 6), None))
    assert found.options.max_num_tokens is None
    assert "the memory of the GPUs is unknown" in found.notes[-1] and "8192" in found.notes[-1]
    assert fitted(layout(tmp_path), Gpu("NVIDIA A10G", (8, 6), None), max_num_tokens=100).notes == ()


def test_a_checkpoint_of_tensorrt_llm_leaves_everything_as_it_is_and_the_log_says_so(tmp_path: Path) -> None:
    found = fitted(replace(layout(tmp_path), kind=ModelKind.TENSORRT_CHECKPOINT))
    assert found.options.max_num_tokens is None
    assert "the weights of a TensorRT-LLM checkpoint are not read" in found.notes[-1]
    config = configured()
    engine = replace(layout(tmp_path), kind=ModelKind.TENSORRT_ENGINE)
    assert fitted_to_memory(config, engine, gpu_machine(gpu=A10G)) is config


def test_a_config_without_sizes_leaves_everything_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    described = inspect_config(tmp_path)
    assert described is not None
    found = fitted(described)
    assert found.options.max_num_tokens is None and "does not have the sizes" in found.notes[-1]


def test_a_degree_that_the_machine_has_not_is_reported_by_the_plan(tmp_path: Path) -> None:
    config = configured(tensor_parallel_degree=4)
    assert fitted_to_memory(config, layout(tmp_path), gpu_machine(gpu=A10G)) is config


def test_a_bundled_engine_keeps_its_own(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    bundled = Layout(**(vars(layout(tmp_path)) | {"bundled_engine": tmp_path / "engine"}))
    assert fitted(bundled).options.max_num_tokens is None


def test_nothing_changes_on_a_cpu(tmp_path: Path) -> None:
    config = configured()
    assert fitted_to_memory(config, layout(tmp_path), CPU_ONLY) is config


def test_engine_and_cache_key_follow_the_number(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    described = inspect_config(model)
    assert described is not None
    plans = []
    for config in (configured(), configured().replace(Origin.derived("table"), max_num_tokens=77)):
        plan = plan_engine(config, described, gpu_machine(gpu=A10G))
        assert isinstance(plan, TensorRtEnginePlan)
        plans.append(plan)
    assert plans[1].building["build_config"]["max_num_tokens"] == 77
    assert plans[0].cache_key != plans[1].cache_key
    assert "77 tokens per iteration (derived from table)" in plans[1].describe()
