"""What TensorRT-LLM refuses on some GPUs is refused when planning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.backends.tensorrt_llm.plan import TensorRtLlmPlan
from djl_trtllm.engines.gpu import Gpu
from djl_trtllm.errors import ConfigError
from djl_trtllm.model import inspect
from tests.engines.helpers import configured, gpu_machine

T4 = Gpu("Tesla T4", (7, 5), 16 * 10**9)
A10 = Gpu("NVIDIA A10G", (8, 6), 24 * 10**9)
B200 = Gpu("NVIDIA B200", (10, 0), 180 * 10**9)
B300 = Gpu("NVIDIA B300", (10, 3), 280 * 10**9)
RTX = Gpu("NVIDIA RTX PRO 6000", (12, 0), 96 * 10**9)
UNKNOWN = Gpu()


def planned(model: Path, gpu: Gpu, **options: object) -> TensorRtLlmPlan:
    plan = plan_engine(configured(**options), inspect(model), gpu_machine(gpu=gpu))
    assert isinstance(plan, TensorRtLlmPlan)
    return plan


def problems(model: Path, gpu: Gpu, **options: object) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        planned(model, gpu, **options)
    return caught.value.problems


@pytest.mark.parametrize("backend", ["tensorrt", "pytorch"])
def test_bfloat16_needs_ampere(roomy: Path, backend: str) -> None:
    (problem,) = problems(roomy, T4, backend=backend, dtype="bf16")
    assert problem == (
        "option.dtype=bf16 (environment variable OPTION_DTYPE): Tesla T4 (sm_75) has no bfloat16; set "
        "option.dtype=fp16, or leave it out"
    )
    for gpu in (A10, UNKNOWN):
        assert planned(roomy, gpu, backend=backend, dtype="bf16").inputs.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("stored", "gpu", "backend", "dtype"),
    [
        ("bfloat16", A10, "tensorrt", "bfloat16"),
        ("bfloat16", T4, "tensorrt", "float16"),
        ("bfloat16", T4, "pytorch", "float16"),
        ("float32", A10, "tensorrt", "float16"),
        ("float32", A10, "pytorch", "float32"),
    ],
)
def test_auto_is_what_tensorrt_llm_makes_of_it_when_it_loads(
    roomy: Path, tmp_path: Path, stored: str, gpu: Gpu, backend: str, dtype: str
) -> None:
    path = Path(shutil.copytree(roomy, tmp_path / "m"))
    config = json.loads((path / "config.json").read_text()) | {"dtype": stored}
    (path / "config.json").write_text(json.dumps(config))
    plan = planned(path, gpu, backend=backend)
    assert plan.inputs.dtype == dtype
    assert "dtype" not in plan.running


@pytest.mark.parametrize("gpu", [B200, B300])
@pytest.mark.parametrize(
    ("option", "value", "algorithm"),
    [
        ("quantize", "int8", "W8A16"),
        ("quantize", "awq", "W4A16_AWQ"),
        ("quantize", "smoothquant", "W8A8_SQ_PER_CHANNEL"),
        ("quant_algo", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PER_CHANNEL_PER_TOKEN"),
    ],
)
def test_blackwell_has_no_engines_with_integers(roomy: Path, gpu: Gpu, option: str, value: str, algorithm: str) -> None:
    (problem,) = problems(roomy, gpu, **{option: value})
    assert problem == (
        f"option.{option}={value} (environment variable OPTION_{option.upper()}): the weights are quantised with "
        f"{algorithm}, and TensorRT-LLM compiles no such engine for {gpu.name} ({gpu.architecture}); take FP8 or NVFP4 "
        "(option.quantize=fp8), or option.backend=pytorch"
    )
    for other in (A10, RTX, UNKNOWN):
        planned(roomy, other, **{option: value})
    planned(roomy, gpu, quantize="fp8", kv_cache_dtype="fp8")


def test_a_checkpoint_that_is_quantised_so_is_named_itself(roomy: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(roomy, tmp_path / "m"))
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A16_AWQ"}}))
    (problem,) = problems(path, B200)
    assert problem.startswith("the checkpoint: the weights are quantised with W4A16_AWQ, and TensorRT-LLM compiles no")
    planned(path, B200, backend="pytorch")


def test_blackwell_has_no_cache_in_int8(roomy: Path) -> None:
    (problem,) = problems(roomy, B200, kv_cache_dtype="int8")
    assert problem == (
        "option.kv_cache_dtype=int8 (environment variable OPTION_KV_CACHE_DTYPE): TensorRT-LLM compiles no such engine "
        "for NVIDIA B200 (sm_100) with a cache in int8; set option.kv_cache_dtype=fp8"
    )


def test_a_plugin_of_hopper_is_refused_on_blackwell(roomy: Path) -> None:
    (problem,) = problems(roomy, B200, gemm_swiglu_plugin="fp8")
    assert problem.endswith("compiles no such engine for NVIDIA B200 (sm_100) with this plugin; leave it out")
    planned(roomy, B300, gemm_swiglu_plugin="fp8")
