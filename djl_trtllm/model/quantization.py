"""The algorithm with which a checkpoint's weights are quantised already."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from djl_trtllm.errors import LayoutError
from djl_trtllm.model.json_file import read_object

MODELOPT_FILE = "hf_quant_config.json"
"""Written by NVIDIA's ModelOpt beside the config.json of a Hugging Face checkpoint that it quantised."""

_ALGORITHM_OF = {"mxfp4": "W4A16_MXFP4", "nvfp4": "NVFP4", "awq": "W4A16_AWQ"}


def stored_quantization(directory: Path | None, config: Mapping[str, Any]) -> str | None:
    """The quantisation of a checkpoint or engine with this config.json, as a name of TensorRT-LLM's QuantAlgo.

    Reads `quantization` of TensorRT-LLM's own files, ModelOpt's hf_quant_config.json, or Hugging Face's
    `quantization_config`; a method without a name in TensorRT-LLM keeps the file's name (bitsandbytes). None if nothing
    is quantised. Without `directory` only `config` counts. Raises LayoutError for a damaged hf_quant_config.json.
    """
    algorithm = _named(directory, config, "quant_algo")
    if algorithm is not None:
        return None if algorithm == "NO_QUANT" else algorithm
    return _of_method(_of_hugging_face(config))


def stored_kv_quantization(directory: Path | None, config: Mapping[str, Any]) -> str | None:
    """The quantisation of the KV cache that a checkpoint was made for, by the same files; None if there is none."""
    return _named(directory, config, "kv_cache_quant_algo")


def _named(directory: Path | None, config: Mapping[str, Any], key: str) -> str | None:
    own = _part(_part(config, "pretrained_config") or config, "quantization")
    modelopt = {} if directory is None else _of_modelopt(directory)
    hugging_face = _of_hugging_face(config)
    parts = (own, modelopt, hugging_face, _part(hugging_face, "quantization"))
    return next((value for part in parts if isinstance(value := part.get(key), str) and value), None)


def hugging_face_quantization(directory: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`quantization_config` of a Hugging Face config.json; empty if there is none, or ModelOpt's file counts.

    Raises LayoutError for a damaged hf_quant_config.json.
    """
    return {} if _of_modelopt(directory) else _of_hugging_face(config)


def _of_modelopt(directory: Path) -> Mapping[str, Any]:
    return _part(read_object(directory / MODELOPT_FILE, LayoutError) or {}, "quantization")


def _of_hugging_face(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return _part(config, "quantization_config") or _part(_part(config, "text_config"), "quantization_config")


def _of_method(config: Mapping[str, Any]) -> str | None:
    method = config.get("quant_method")
    if not isinstance(method, str) or not method:
        return None
    if method == "fp8":
        return "FP8" if config.get("weight_block_size") is None else "FP8_BLOCK_SCALES"
    if method == "gptq":
        return f"W{config.get('bits', 4)}A16_GPTQ"
    return _ALGORITHM_OF.get(method, method)


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = config.get(name)
    return part if isinstance(part, dict) else {}
