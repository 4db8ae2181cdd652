"""Hugging Face checkpoints that TensorRT-LLM refuses, formats that a GPU lacks, and names for its converters."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from djl_trtllm.backends.tensorrt_llm.arguments import Arguments, PlanInputs, flattened
from djl_trtllm.config import Backend, Config, DType
from djl_trtllm.engines.hardware import Gpu, Hardware
from djl_trtllm.errors import EngineError
from djl_trtllm.model import Layout, ModelKind
from djl_trtllm.model.checkpoint import hugging_face_quantization
from djl_trtllm.model.work_directory import link_with_changes

_LARGEST = 4 * 1024**2
"""The most bytes of a configuration file: tokenizers and indices name no code, and may be large."""
_KEY = "auto_map"


def without_code(checkpoint: Path) -> Path:
    """Return the checkpoint itself if it names no code, else a folder in TMPDIR, which goes with the engine process.

    TensorRT-LLM's PyTorch backend reads a checkpoint with `trust_remote_code=True` for the sake of pictures and sound,
    also where its own argument says False (`create_input_processor` in `inputs/registry.py`, 1.0 to 1.4). So it gets a
    folder of links to the checkpoint's files in which no configuration names code (`auto_map`).
    """
    changed = {path.name: text for path in sorted(checkpoint.glob("*.json")) if (text := _without_code(path))}
    if not changed:
        return checkpoint
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-")) / (checkpoint.resolve().name or "checkpoint")
    link_with_changes(checkpoint, folder, changed)
    print(
        f"the code that {' and '.join(changed)} in {checkpoint} name is not run; if you have read it and the model "
        "needs it, set option.trust_remote_code=true (OPTION_TRUST_REMOTE_CODE=true for a fetched model)",
        flush=True,
    )
    return folder


def _without_code(path: Path) -> str | None:
    """Return the file's text without the key; None if it has none."""
    try:
        if path.stat().st_size > _LARGEST:
            return None
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or _KEY not in content:
        return None
    return json.dumps({key: value for key, value in content.items() if key != _KEY})


_BLOCK = [128, 128]


class _Taken(NamedTuple):
    """Versions that load a format: from `since` on; those between `perhaps` and `since` were not read."""

    perhaps: Version
    since: Version


_ALWAYS = _Taken(Version("1.0.0rc0"), Version("1.0.0rc0"))
_FROM_1_3 = _Taken(Version("1.2.0"), Version("1.3.0rc0"))
_FROM_1_4 = _Taken(Version("1.3.0rc0"), Version("1.4.0rc0"))
_METHODS = {"nvfp4": _FROM_1_4, "mxfp8": _FROM_1_4, "modelopt": _FROM_1_4}


def check_stored_format(layout: Layout, backend: Backend, version: str, notes: list[str]) -> None:
    """Raise EngineError for a checkpoint that TensorRT-LLM cannot load; adds to `notes` where it is not sure.

    Found in TensorRT-LLM's `llmapi/llm_utils.py` (`_update_from_hf_quant_config`: 37,826 characters, about 1.2; 28,262
    characters, about 1.4) and `_torch/model_config.py` (`load_hf_quant_config`: 26,037 and 35,548 characters, about
    1.2; 67,333 characters, about 1.4). ModelOpt's hf_quant_config.json counts before the `quantization_config` of
    config.json. Another `quant_method` than those of `_taken` raises NotImplementedError while the model is loaded or
    compiled, after minutes. `TrtLlmArgs` has no `moe_config`, which `mxfp4` is read with.
    """
    stored = hugging_face_quantization(layout.path, layout.config or {})
    if layout.kind is not ModelKind.HF_CHECKPOINT or not stored:
        return
    taken = _taken(stored, backend)
    what = f"{layout.path / 'config.json'}: the weights are quantised with quantization_config {_shown(stored)}"
    if taken is None or Version(version) < taken.perhaps:
        others = f"fp8 with weight_block_size {_BLOCK}{'' if backend is Backend.TENSORRT else ' and mxfp4'}"
        raise EngineError(
            f"{what}, which TensorRT-LLM {version} does not load with option.backend={backend}; it loads checkpoints "
            f"that ModelOpt quantised (with hf_quant_config.json), and of the others {others}. "
            f"{_advice(stored, backend, taken)}"
        )
    if Version(version) < taken.since:
        notes.append(
            f"{what}: TensorRT-LLM loads it from {taken.since} on; {version} may end with "
            '"Unsupported quantization_config". A checkpoint that ModelOpt quantised is loaded by all versions'
        )


def _taken(stored: Mapping[str, Any], backend: Backend) -> _Taken | None:
    match stored.get("quant_method"):
        case None:
            return _ALWAYS
        case "fp8" if stored.get("weight_block_size"):
            return _ALWAYS if list(stored["weight_block_size"]) == _BLOCK else None
        case "fp8":
            return _FROM_1_3
        case "mxfp4":
            return None if backend is Backend.TENSORRT else _ALWAYS
        case "compressed-tensors":
            return _compressed(stored)
        case method:
            return _METHODS.get(str(method))


def _compressed(stored: Mapping[str, Any]) -> _Taken | None:
    """Return the versions that load a checkpoint of llm-compressor."""
    try:
        group = stored["config_groups"]["group_0"]
        weights, inputs = group["weights"], group["input_activations"]
        bits, strategies = weights["num_bits"], (weights["strategy"], inputs["strategy"])
    except (KeyError, TypeError):
        return None
    if bits != 8:
        return _FROM_1_4 if bits == 4 and weights.get("type") == "float" else None
    if weights.get("type", "float") != "float":
        return None
    block = strategies == ("block", "group") and inputs.get("group_size") == _BLOCK[0]
    return _FROM_1_3 if block or strategies == ("channel", "token") else None


def _advice(stored: Mapping[str, Any], backend: Backend, taken: _Taken | None) -> str:
    ways = ["Serve a checkpoint of this model that ModelOpt quantised, or the one before quantisation"]
    if backend is Backend.TENSORRT:
        method = stored.get("quant_method")
        option = {"awq": "awq", "gptq": "int4", "fp8": "fp8", "compressed-tensors": "fp8"}.get(str(method), "int8")
        ways[0] += f" with option.quantize={option}"
        if method == "mxfp4":
            ways = ["Set option.backend=pytorch, which loads it", "serve the checkpoint before quantisation"]
    if taken is not None:
        ways.append(f"use TensorRT-LLM {taken.since} or later")
    return "; or ".join(ways)


def _shown(stored: Mapping[str, Any]) -> str:
    parts = [f"quant_method={stored.get('quant_method')}"]
    parts += [f"{name}={stored[name]}" for name in ("bits", "weight_block_size", "format") if name in stored]
    return ", ".join(parts)


_AMPERE = (8, 0)
_BLACKWELL = (10, 0)
_RTX_BLACKWELL = (12, 0)
_FP8_ONLY = "take FP8 or NVFP4 (option.quantize=fp8), or option.backend=pytorch"
_INTEGERS = ("W8A16", "W4A16", "W8A8", "FP8_PER_CHANNEL_PER_TOKEN")
"""The beginnings of names of algorithms with integer weights, or with a scale for each channel or token."""


def gpu_problems(config: Config, inputs: PlanInputs, hardware: Hardware, building: Arguments) -> list[str]:
    """Return what cannot run on these GPUs; `building` are the arguments that compile an engine.

    TensorRT-LLM refuses it after it has loaded the checkpoint, in `llmapi/llm_args.py` (`validate_dtype`, 1.2rc and
    1.3rc-mid), `builder.py` of 66,173 characters (`build`, before 1.2) and `plugin/plugin.py` of 29,952 characters
    (`PluginConfig.validate`, 1.2).
    """
    problems = []
    # Unknown GPUs count as if they had bfloat16.
    has_bfloat16 = all((gpu.compute_capability or _AMPERE) >= _AMPERE for gpu in hardware.gpus)
    if config.options.dtype is DType.BF16 and not has_bfloat16:
        problems.append(
            f"{config.format_setting('dtype')}: {_gpu_shown(hardware.gpus[0])} has no bfloat16; set "
            "option.dtype=fp16, or leave it out"
        )
    if inputs.backend is Backend.TENSORRT and hardware.gpus:
        problems += _blackwell(config, inputs, hardware.gpus[0], flattened(building))
    return problems


def _blackwell(config: Config, inputs: PlanInputs, gpu: Gpu, building: Arguments) -> list[str]:
    if gpu.compute_capability is None or not _BLACKWELL <= gpu.compute_capability < _RTX_BLACKWELL:
        return []
    where = f"TensorRT-LLM compiles no such engine for {_gpu_shown(gpu)}"
    problems = []
    algorithm = str(building.get("quant_config.quant_algo") or inputs.stored_quantization or "")
    if algorithm.startswith(_INTEGERS):
        what = _named(config, "quant_algo", "quantize") or "the checkpoint"
        problems.append(f"{what}: the weights are quantised with {algorithm}, and {where}; {_FP8_ONLY}")
    if building.get("quant_config.kv_cache_quant_algo") == "INT8":
        what = _named(config, "kv_cache_quant_algo", "kv_cache_dtype")
        problems.append(f"{what}: {where} with a cache in int8; set option.kv_cache_dtype=fp8")
    if building.get("build_config.plugin_config.gemm_swiglu_plugin") and gpu.compute_capability == _BLACKWELL:
        problems.append(f"{config.format_setting('gemm_swiglu_plugin')}: {where} with this plugin; leave it out")
    return problems


def _named(config: Config, *names: str) -> str:
    return next((config.format_setting(name) for name in names if config.is_set(name)), "")


def _gpu_shown(gpu: Gpu) -> str:
    return f"{gpu.name or 'this GPU'} ({gpu.architecture})"


_GLM = ("glm4", "chatglm3", "chatglm2", "chatglm", "glm")
_GPT = ("starcoder", "santacoder")
_LARGE_VOCABULARY = 100_000
"""The vocabulary above which a ChatGLM checkpoint is GLM-4: it has 151,552 tokens, ChatGLM 2 and 3 have 65,024."""


def converter_alias(checkpoint: Path, raw: Mapping[str, Any], config: Config) -> str | None:
    """The name for a link to the checkpoint, whose config.json is `raw`; None for families that need none.

    TensorRT-LLM's converters recognise ChatGLM's versions and the variants of GPT-2 by the path of the checkpoint only
    (`tensorrt_llm/models/{chatglm,gpt}/config.py`, 1.2), and SageMaker's path is always `/opt/ml/model`. So the
    compiler reads these checkpoints through a link that has the name. `option.chatglm_model_version` and
    `option.gpt_model_version` come first, then the path, then config.json.
    """
    path = str(checkpoint).replace("glm_4", "glm4").replace("glm-4", "glm4")
    model_type = str(raw.get("model_type"))
    if model_type.startswith("chatglm"):
        if config.is_set("chatglm_model_version"):
            return config.options.chatglm_model_version
        return next((version for version in _GLM if version in path), None) or _glm(raw)
    if model_type in ("gpt2", "gpt_bigcode"):
        if config.is_set("gpt_model_version"):
            return config.options.gpt_model_version
        return next((version for version in _GPT if version in path), None) or _gpt(model_type, raw)
    return None


def _glm(raw: Mapping[str, Any]) -> str:
    if "inner_hidden_size" in raw:
        return "chatglm"
    if int(raw.get("padded_vocab_size") or 0) > _LARGE_VOCABULARY:
        return "glm4"
    # Versions 2 and 3 are built alike, but for how they stretch over long contexts.
    return "chatglm3"


def _gpt(model_type: str, raw: Mapping[str, Any]) -> str:
    if "GPT2LMHeadCustomModel" in (raw.get("architectures") or ()):
        return "santacoder"
    return "starcoder" if model_type == "gpt_bigcode" else "gpt2"
