"""What TensorRT-LLM refuses on some GPUs, after it has loaded the checkpoint.

Found in `llmapi/llm_args.py` (`validate_dtype`, 1.2rc and 1.3rc-mid), `builder.py` of 66,173 characters (`build`,
before 1.2) and `plugin/plugin.py` of 29,952 characters (`PluginConfig.validate`, 1.2).
"""

from __future__ import annotations

from djl_trtllm.backends.tensorrt_llm.arguments import Arguments, PlanInputs, flattened
from djl_trtllm.config import Backend, Config, DType
from djl_trtllm.config.format_setting import format_setting
from djl_trtllm.engines.gpu import Gpu
from djl_trtllm.engines.hardware import Hardware

_AMPERE = (8, 0)
_BLACKWELL = (10, 0)
_RTX_BLACKWELL = (12, 0)
_FP8_ONLY = "take FP8 or NVFP4 (option.quantize=fp8), or option.backend=pytorch"
_INTEGERS = ("W8A16", "W4A16", "W8A8", "FP8_PER_CHANNEL_PER_TOKEN")
"""How the algorithms begin that have integer weights, or a scale for each channel or token."""


def has_bfloat16(hardware: Hardware) -> bool:
    """Whether all GPUs have it; a GPU of which nothing is known does."""
    return all((gpu.compute_capability or _AMPERE) >= _AMPERE for gpu in hardware.gpus)


def gpu_problems(config: Config, inputs: PlanInputs, hardware: Hardware, building: Arguments) -> list[str]:
    """What cannot run on these GPUs; `building` are the arguments that compile an engine."""
    problems = []
    if config.options.dtype is DType.BF16 and not has_bfloat16(hardware):
        problems.append(
            f"{format_setting(config, 'dtype')}: {_shown(hardware.gpus[0])} has no bfloat16; set option.dtype=fp16, or "
            "leave it out"
        )
    if inputs.backend is Backend.TENSORRT and hardware.gpus:
        problems += _blackwell(config, inputs, hardware.gpus[0], flattened(building))
    return problems


def _blackwell(config: Config, inputs: PlanInputs, gpu: Gpu, building: Arguments) -> list[str]:
    if gpu.compute_capability is None or not _BLACKWELL <= gpu.compute_capability < _RTX_BLACKWELL:
        return []
    where = f"TensorRT-LLM compiles no such engine for {_shown(gpu)}"
    problems = []
    algorithm = str(building.get("quant_config.quant_algo") or inputs.stored_quantization or "")
    if algorithm.startswith(_INTEGERS):
        what = _named(config, "quant_algo", "quantize") or "the checkpoint"
        problems.append(f"{what}: the weights are quantised with {algorithm}, and {where}; {_FP8_ONLY}")
    if building.get("quant_config.kv_cache_quant_algo") == "INT8":
        what = _named(config, "kv_cache_quant_algo", "kv_cache_dtype")
        problems.append(f"{what}: {where} with a cache in int8; set option.kv_cache_dtype=fp8")
    if building.get("build_config.plugin_config.gemm_swiglu_plugin") and gpu.compute_capability == _BLACKWELL:
        problems.append(f"{format_setting(config, 'gemm_swiglu_plugin')}: {where} with this plugin; leave it out")
    return problems


def _named(config: Config, *names: str) -> str:
    return next((format_setting(config, name) for name in names if config.is_set(name)), "")


def _shown(gpu: Gpu) -> str:
    return f"{gpu.name or 'this GPU'} ({gpu.architecture})"
