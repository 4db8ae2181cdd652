"""What is in a directory, and what an engine directory holds (facts §3.1 to §3.3)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .logger import cpp_log
from .settings import VERSION

HF, TLLM_CKPT, TLLM_ENGINE = "HF", "TLLM_CKPT", "TLLM_ENGINE"
_CONTENT = b"FAKE TensorRT engine " + str(VERSION).encode()


def get_model_format(directory: Path) -> str:
    """HF, TLLM_CKPT or TLLM_ENGINE by the keys of config.json."""
    path = directory / "config.json"
    if not path.exists():
        raise ValueError(f"Failed to infer model format because no config.json exists in {directory}")
    found = HF
    try:
        config = json.loads(path.read_text())
        if "pretrained_config" in config and "build_config" in config:
            found = TLLM_ENGINE
            _ = config["version"], config["pretrained_config"]["mapping"]
        elif "architecture" in config and "dtype" in config:
            found = TLLM_CKPT
        elif "model_type" not in config:
            raise ValueError(f"Unrecognized model in {directory}. Should have a `model_type` key in its config.json.")
    except (ValueError, KeyError) as error:
        raise ValueError(f"Inferred model format {found}, but failed to load config.json: {error}") from error
    return found


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a directory."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def write_rank(directory: Path, rank: int) -> None:
    """rank{R}.engine: the version that wrote it is inside."""
    (directory / f"rank{rank}.engine").write_bytes(_CONTENT)


def load_rank(directory: Path, rank: int, max_beam_width: int) -> None:
    """What the runtime does with a rank's file: it has to be there, and of this very version.

    The check of beams is that of cpp/tensorrt_llm/batch_manager/trtGptModel.h (12,829 characters, about 1.0).
    """
    config = read_config(directory)
    version, built = config["version"], config["build_config"].get("max_beam_width") or 1
    cpp_log("INFO", f"Engine version {version} found in the config file, assuming engine(s) built by new builder API.")
    path = directory / f"rank{rank}.engine"
    if not path.exists():
        raise RuntimeError(
            f"[TensorRT-LLM][ERROR] Assertion failed: Error opening engine file: {path} "
            "(/src/tensorrt_llm/cpp/tensorrt_llm/runtime/rawEngine.h)"
        )
    if path.read_bytes() != _CONTENT:
        raise deserialize_error()
    if max_beam_width > built:
        raise RuntimeError(
            f"[TensorRT-LLM][ERROR] Assertion failed: Runtime configured max beam width ({max_beam_width}) must not "
            f"exceed engine max beam width ({built}) (/src/tensorrt_llm/cpp/tensorrt_llm/batch_manager/trtGptModel.h)"
        )
    cpp_log("INFO", f"Loaded engine size: {path.stat().st_size >> 20} MiB")


def deserialize_error() -> RuntimeError:
    """What an engine of another TensorRT-LLM ends in."""
    cpp_log(
        "ERROR",
        "IRuntime::deserializeCudaEngine: Error Code 1: Serialization (Serialization assertion "
        "stdVersionRead == kSERIALIZATION_VERSION failed.Version tag does not match. Note: Current Version: 240, "
        "Serialized Engine Version: 238) in stdArchiveReader",
    )
    return RuntimeError(
        "[TensorRT-LLM][ERROR] Assertion failed: Failed to deserialize cuda engine. "
        "(/src/tensorrt_llm/cpp/tensorrt_llm/runtime/tllmRuntime.cpp:239)"
    )
