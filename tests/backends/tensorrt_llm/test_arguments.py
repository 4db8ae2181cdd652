"""The exact arguments that reach TensorRT-LLM, or the exact message."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.backends.effects import Passed, has_effect
from djl_trtllm.backends.tensorrt_llm.arguments import LLM_OWNERS
from djl_trtllm.backends.tensorrt_llm.names import KNOWN_VERSIONS, members
from djl_trtllm.backends.tensorrt_llm.options import ENGINE, PYTORCH
from djl_trtllm.config import Backend
from djl_trtllm.config.options.registry import OPTIONS, find
from djl_trtllm.errors import EngineError
from tests.backends.tensorrt_llm.cases import CASES
from tests.backends.tensorrt_llm.plans import building, changed, engine_planned, flat, planned, problems, running

DEFAULTS = {"LLM.gather_generation_logits"}
"""Of those that a case names and that are passed anyway."""
TOGETHER = {
    # The path of the checkpoint: test_telling_names.py.
    "chatglm_model_version",
    "gpt_model_version",
    # Adapters: test_tensorrt_llm_derivations.py.
    "enable_lora",
    "max_lora_rank",
    "lora_dir",
    "lora_ckpt_source",
    "lora_target_modules",
    "lora_cache_optimal_adapter_size",
    "lora_cache_max_adapter_size",
    "lora_cache_gpu_memory_fraction",
    "lora_cache_host_memory_bytes",
    # test_tensorrt_llm_quantization.py
    "smoothquant_per_token",
    "smoothquant_per_channel",
}
"""Options that mean something with others only, and have tests of their own."""


# -- what is passed when nothing is set ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.0.0", "1.2.1"])
def test_an_engine_is_built_for_the_documents_limits(roomy: Path, version: str) -> None:
    assert building(roomy, version) == {
        "BuildConfig.max_batch_size": 32,
        "BuildConfig.max_input_len": 1024,
        "BuildConfig.max_num_tokens": 8192,
        "BuildConfig.max_seq_len": 1536,
        "PluginConfig.tokens_per_block": 64,
    }


def test_an_engine_is_run_with_the_documents_defaults(roomy: Path) -> None:
    expected = {
        "KvCacheConfig.enable_block_reuse": False,
        "KvCacheConfig.free_gpu_memory_fraction": 0.95,
        "KvCacheConfig.tokens_per_block": 64,
        "LLM.guided_decoding_backend": "xgrammar",
        "LLM.max_batch_size": 32,
        "LLM.max_num_tokens": 8192,
        "SchedulerConfig.capacity_scheduler_policy": "CapacitySchedulerPolicy.MAX_UTILIZATION",
    }
    assert running(roomy) == expected
    # There the size of a block is known to the engine only.
    assert running(roomy, "1.0.0") == {k: v for k, v in expected.items() if k != "KvCacheConfig.tokens_per_block"}


def test_a_checkpoint_is_run_with_the_documents_defaults(roomy: Path) -> None:
    expected = {
        "KvCacheConfig.enable_block_reuse": False,
        "KvCacheConfig.free_gpu_memory_fraction": 0.95,
        "KvCacheConfig.tokens_per_block": 64,
        "LLM.enable_iter_perf_stats": True,
        "LLM.guided_decoding_backend": "xgrammar",
        "LLM.max_batch_size": 32,
        "LLM.max_input_len": 1024,
        "LLM.max_num_tokens": 8192,
        "LLM.max_seq_len": 1536,
        "SchedulerConfig.capacity_scheduler_policy": "CapacitySchedulerPolicy.MAX_UTILIZATION",
    }
    assert running(roomy, backend="pytorch") == expected
    # From 1.3 on 1024 is the default of max_input_len itself.
    without_length = {name: value for name, value in expected.items() if name != "LLM.max_input_len"}
    assert running(roomy, "1.3.0", backend="pytorch") == without_length
    # Neither guides beside the overlap scheduler nor blocks of another size.
    assert running(roomy, "1.0.0", backend="pytorch") == {
        name: value
        for name, value in expected.items()
        if name not in ("KvCacheConfig.tokens_per_block", "LLM.guided_decoding_backend")
    }


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
@pytest.mark.parametrize("backend", ["pytorch", "autodeploy"])
def test_what_is_passed_by_default_every_version_has(roomy: Path, version: str, backend: str) -> None:
    if members(LLM_OWNERS[Backend(backend)], version):
        planned(roomy, version, backend=backend)
    else:
        with pytest.raises(EngineError, match=f"TensorRT-LLM {version} has no such backend"):
            planned(roomy, version, backend=backend)


# -- every option ----------------------------------------------------------------------------------------------------


def passed(model: Path, backend: str, **options: object) -> dict[str, dict[str, Any]]:
    """All arguments of a backend, as a case has them."""
    if backend == "pytorch":
        return {"pytorch": running(model, backend="pytorch", **options)}
    plan = engine_planned(model, **options)
    return {"building": flat(plan.building), "running": flat(plan.running)}


@pytest.mark.parametrize("backend", ["tensorrt", "pytorch"])
def test_an_option_becomes_exactly_these_arguments(roomy: Path, backend: str) -> None:
    before, wrong = passed(roomy, backend), []
    for case in CASES:
        if (case.option, backend) == ("quantize", "pytorch"):
            continue  # refused: test_tensorrt_llm_quantization.py
        for phase, arguments in passed(roomy, backend, **{case.option: case.value}).items():
            found, expected = changed(before[phase], arguments), getattr(case, phase)
            if found != expected:
                wrong.append((case.option, phase, found, expected))
    assert wrong == []


def test_every_option_with_an_effect_has_a_case() -> None:
    cases = {declared.name for case in CASES if (declared := find(f"option.{case.option}")) is not None}
    assert len(cases) == len(CASES)
    effective = {
        declared.name
        for declared in OPTIONS.values()
        for effects in (ENGINE, PYTORCH)
        if declared.name in effects and has_effect(declared, effects)
    }
    assert effective - cases - TOGETHER == set()
    assert effective >= TOGETHER


def test_an_effect_that_is_arguments_only_says_the_truth() -> None:
    untrue = []
    for case in CASES:
        declared = find(f"option.{case.option}")
        assert declared is not None
        for effects, passed in ((ENGINE, case.building | case.running), (PYTORCH, case.pytorch)):
            effect = effects.get(declared.name)
            named = (
                {f"{target.owner}.{target.name}" for target in effect.targets} if isinstance(effect, Passed) else set()
            )
            if not named <= passed.keys() | DEFAULTS:
                untrue.append((case.option, effect))
    assert untrue == []


def test_max_batch_size_is_the_batch_of_engine_and_server(roomy: Path) -> None:
    assert building(roomy, max_batch_size=64)["BuildConfig.max_batch_size"] == 64
    assert running(roomy, max_batch_size=64)["LLM.max_batch_size"] == 64
    assert running(roomy, backend="pytorch", max_batch_size=64)["LLM.max_batch_size"] == 64


# -- versions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "backend", "option", "value", "missing"),
    [
        ("1.0.0", "tensorrt", "orchestrator_type", "rpc", "LLM(orchestrator_type)"),
        ("1.0.0", "tensorrt", "enable_lm_head_tp_in_adp", "true", "LLM(enable_lm_head_tp_in_adp)"),
        ("1.0.0", "tensorrt", "quant_algo", "W4A16_MXFP4", "QuantAlgo.W4A16_MXFP4"),
        ("1.0.0", "pytorch", "tokens_per_block", "64", "KvCacheConfig.tokens_per_block"),
        ("1.1.0", "pytorch", "max_stats_len", "500", "LLM(max_stats_len)"),
    ],
)
def test_an_argument_the_installed_version_lacks_is_named_with_the_versions_that_have_it(
    roomy: Path, version: str, backend: str, option: str, value: str, missing: str
) -> None:
    (problem,) = problems(roomy, version, backend=backend, **{option: value})
    head, since = problem.split(" (it has it from ")
    assert head == (
        f"option.{option}={value} (environment variable OPTION_{option.upper()}): TensorRT-LLM {version} has no "
        f"{missing}"
    )
    assert re.fullmatch(r"1\.[12]\.0\w* on\); leave the option out", since)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("gemm_swiglu_plugin", "auto", "takes fp8 as PluginConfig.gemm_swiglu_plugin"),
        (
            "gpt_attention_plugin",
            "fp8",
            "takes auto, float16, float32, bfloat16 or int32 as PluginConfig.gpt_attention_plugin",
        ),
    ],
)
def test_a_word_that_tensorrt_llm_refuses_is_refused_when_planning(
    roomy: Path, option: str, value: str, words: str
) -> None:
    (problem,) = problems(roomy, backend="tensorrt", **{option: value})
    assert (
        problem == f"option.{option}={value} (environment variable OPTION_{option.upper()}): TensorRT-LLM 1.2.1 {words}"
    )
    assert building(roomy, **{option: "disable"}).get(f"PluginConfig.{option}") is None


def test_of_two_arguments_a_version_may_have_one(roomy: Path) -> None:
    assert building(roomy, "1.0.0", tokens_per_block=128)["PluginConfig.tokens_per_block"] == 128
    assert "KvCacheConfig.tokens_per_block" not in running(roomy, "1.0.0", tokens_per_block=128)
