"""Which backend runs a model, and why."""

from __future__ import annotations

from packaging.version import Version

from djl_trtllm.config import Backend, Config
from djl_trtllm.config.format_setting import format_setting
from djl_trtllm.engines.hardware import Hardware, release_of
from djl_trtllm.errors import EngineError
from djl_trtllm.model import Kind, Layout

_PYTHON = (Backend.PYTORCH, Backend.AUTODEPLOY)
_NEEDS_TENSORRT_LLM = (Backend.TENSORRT, *_PYTHON)
_TENSORRT_ENGINES = (Kind.TENSORRT_ENGINE, Kind.LMI_REPOSITORY)
_OLDEST = Version("1.0.0rc0")
_REMOVED = "1.3.0rc21 removed the backend that compiles and runs TensorRT engines"


def choose_backend(config: Config, layout: Layout, hardware: Hardware) -> tuple[Backend, str]:
    """The backend and its reason in one line.

    `auto`: an engine or a TensorRT-LLM checkpoint names its own. A Hugging Face checkpoint goes to TensorRT-LLM where
    that is installed and a GPU is there: to its engine backend, or to PyTorch where it has none; else to OpenVINO.
    Raises EngineError where the backend asked for cannot run here, or cannot run these files.
    """
    asked = config.options.backend
    if asked is Backend.SCRIPTED:
        return asked, f"{format_setting(config, 'backend')}; no engine is loaded"
    if layout.kind in (*_TENSORRT_ENGINES, Kind.TENSORRT_CHECKPOINT):
        return _for_tensorrt_files(config, layout, hardware)
    if layout.kind is Kind.OPENVINO_ENGINE:
        if asked in _NEEDS_TENSORRT_LLM:
            raise EngineError(
                f"{format_setting(config, 'backend')}: {layout.path} is a {layout.kind.value}; serve it with "
                f"option.backend=openvino (or auto), or serve the checkpoint with option.backend={asked}"
            )
        return Backend.OPENVINO, f"{layout.path} is a {layout.kind.value}"
    if asked is Backend.OPENVINO:
        return asked, format_setting(config, "backend")
    if asked is not Backend.AUTO:
        _require_tensorrt_llm(format_setting(config, "backend"), hardware)
        if asked is Backend.TENSORRT and not hardware.has_engine_backend:
            raise EngineError(
                f"{format_setting(config, 'backend')} and TensorRT-LLM {hardware.tensorrt_llm} is installed: "
                f"{_REMOVED}. Serve "
                "the checkpoint with option.backend=pytorch (or auto), or use TensorRT-LLM 1.2"
            )
        return asked, format_setting(config, "backend")
    return _for_hugging_face_checkpoint(hardware)


def likely_backend(config: Config, hardware: Hardware) -> Backend:
    """The backend for a checkpoint that is not known yet: the one asked for, or the one `auto` takes here."""
    asked = config.options.backend
    if asked is not Backend.AUTO:
        return asked
    if hardware.tensorrt_llm is None or not hardware.gpus:
        return Backend.OPENVINO
    return Backend.TENSORRT if hardware.has_engine_backend else Backend.PYTORCH


def _for_hugging_face_checkpoint(hardware: Hardware) -> tuple[Backend, str]:
    installed = f"TensorRT-LLM {hardware.tensorrt_llm} is installed"
    if hardware.tensorrt_llm is None:
        return Backend.OPENVINO, "TensorRT-LLM is not installed" + ("" if hardware.gpus else ", and there is no GPU")
    if not hardware.gpus:
        return Backend.OPENVINO, f"{installed}, but there is no GPU"
    _require_tensorrt_llm("there is a GPU", hardware)
    if hardware.has_engine_backend:
        return Backend.TENSORRT, f"{installed} and there is a GPU"
    return Backend.PYTORCH, f"{installed}, which has no engine backend, and there is a GPU"


def _for_tensorrt_files(config: Config, layout: Layout, hardware: Hardware) -> tuple[Backend, str]:
    """An engine or a checkpoint in TensorRT-LLM's own format: the engine backend, and nothing else, reads them."""
    asked = config.options.backend
    what = f"{layout.path} is a {layout.kind.value}"
    if asked is Backend.OPENVINO:
        raise EngineError(
            f"{format_setting(config, 'backend')}: {what}, and OpenVINO cannot load it; "
            "serve the Hugging Face checkpoint it was made from"
        )
    if asked in _PYTHON:
        raise EngineError(
            f"{format_setting(config, 'backend')}: {what}, and TensorRT-LLM's {asked} backend reads Hugging Face "
            f"checkpoints "
            "only; set option.backend=tensorrt (or auto), or serve the Hugging Face checkpoint it was made from"
        )
    _require_tensorrt_llm(what, hardware)
    if not hardware.has_engine_backend:
        raise EngineError(
            f"{what}, and TensorRT-LLM {hardware.tensorrt_llm} is installed: {_REMOVED}. {_reader(layout)}, or serve "
            "the Hugging Face checkpoint it was made from (it may be quantised by ModelOpt) with option.backend=pytorch"
        )
    return Backend.TENSORRT, what


def _reader(layout: Layout) -> str:
    if layout.kind is Kind.TENSORRT_CHECKPOINT:
        return "Compile and serve it with TensorRT-LLM 1.2 or 1.0"
    version = (layout.config or {}).get("version")
    if version is None:
        return "Serve it with the TensorRT-LLM that compiled it, 1.2 or earlier"
    return f"Serve it with TensorRT-LLM {version}, which compiled it: an engine is read by its own release only"


def _require_tensorrt_llm(why: str, hardware: Hardware) -> None:
    missing = []
    if hardware.tensorrt_llm is None:
        missing.append("TensorRT-LLM is not installed (pip install 'djl-trtllm[trtllm]', or use its container)")
    elif (release := release_of(hardware.tensorrt_llm)) is not None and release < _OLDEST:
        missing.append(f"TensorRT-LLM {hardware.tensorrt_llm} is too old (install 1.2, or use its container)")
    if not hardware.gpus:
        missing.append("no NVIDIA GPU is visible (in a container: start it with --gpus all)")
    if missing:
        raise EngineError(
            f"{why}, which needs TensorRT-LLM and a GPU: {'; '.join(missing)}. Or serve a Hugging Face checkpoint "
            "on the CPU with option.backend=openvino"
        )
