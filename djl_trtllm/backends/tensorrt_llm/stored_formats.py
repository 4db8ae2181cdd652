"""Which quantised Hugging Face checkpoints TensorRT-LLM takes.

Found in TensorRT-LLM's `llmapi/llm_utils.py` (`_update_from_hf_quant_config`: 37,826 characters, about 1.2; 28,262
characters, about 1.4) and `_torch/model_config.py` (`load_hf_quant_config`: 26,037 and 35,548 characters, about 1.2;
67,333 characters, about 1.4). ModelOpt's hf_quant_config.json counts before the `quantization_config` of config.json.
Another `quant_method` than those below raises NotImplementedError while the model is loaded or compiled, after
minutes. `TrtLlmArgs` has no `moe_config`, which `mxfp4` is read with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from packaging.version import Version

from djl_trtllm.config import Backend
from djl_trtllm.errors import EngineError
from djl_trtllm.model import Layout, ModelKind
from djl_trtllm.model.quantization import hugging_face_quantization

_BLOCK = [128, 128]


class _Taken(NamedTuple):
    """Versions that take a format: all from `since` on; those between `perhaps` and `since` were not read."""

    perhaps: Version
    since: Version


_ALWAYS = _Taken(Version("1.0.0rc0"), Version("1.0.0rc0"))
_FROM_1_3 = _Taken(Version("1.2.0"), Version("1.3.0rc0"))
_FROM_1_4 = _Taken(Version("1.3.0rc0"), Version("1.4.0rc0"))
_METHODS = {"nvfp4": _FROM_1_4, "mxfp8": _FROM_1_4, "modelopt": _FROM_1_4}


def check_stored_format(layout: Layout, backend: Backend, version: str, notes: list[str]) -> None:
    """Raise EngineError for a checkpoint that TensorRT-LLM cannot load; adds to `notes` where it is not sure."""
    stored = hugging_face_quantization(layout.path, layout.config or {})
    if layout.kind is not ModelKind.HF_CHECKPOINT or not stored:
        return
    taken = _taken(stored, backend)
    what = f"{layout.path / 'config.json'}: the weights are quantised with quantization_config {_shown(stored)}"
    if taken is None or Version(version) < taken.perhaps:
        raise EngineError(
            f"{what}, which TensorRT-LLM {version} does not load with option.backend={backend}; it loads checkpoints "
            f"that ModelOpt quantised (with hf_quant_config.json){_also(backend)}. {_advice(stored, backend, taken)}"
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
    """What llm-compressor wrote."""
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


def _also(backend: Backend) -> str:
    rest = "" if backend is Backend.TENSORRT else " and mxfp4"
    return f", and of the others fp8 with weight_block_size {_BLOCK}{rest}"


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
