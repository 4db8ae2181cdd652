"""Which backend runs a model, and why."""

from __future__ import annotations

from djl_trtllm.config import Backend, Config
from djl_trtllm.engine.citing import cited
from djl_trtllm.engine.hardware import Hardware
from djl_trtllm.errors import EngineError
from djl_trtllm.model import Kind, Layout

_NEEDS_TENSORRT_LLM = (Backend.TENSORRT, Backend.PYTORCH, Backend.AUTODEPLOY)
_TENSORRT_LAYOUTS = (Kind.TENSORRT_ENGINE, Kind.TENSORRT_CHECKPOINT, Kind.LMI_REPOSITORY)


def choose_backend(config: Config, layout: Layout, hardware: Hardware) -> tuple[Backend, str]:
    """The backend and its reason in one line.

    `auto`: an engine directory names its own; otherwise TensorRT-LLM where it is installed and a GPU is there;
    otherwise OpenVINO. Raises EngineError where the backend asked for cannot run here, or cannot run these files.
    """
    asked = config.options.backend
    if asked is Backend.SCRIPTED:
        return asked, f"{cited(config, 'backend')}; no engine is loaded"
    if layout.kind in _TENSORRT_LAYOUTS:
        if asked is Backend.OPENVINO:
            raise EngineError(
                f"{cited(config, 'backend')}: {layout.path} is a {layout.kind.value}, and OpenVINO cannot load it; "
                "serve the Hugging Face checkpoint it was made from"
            )
        chosen = Backend.TENSORRT if asked is Backend.AUTO else asked
        _require_tensorrt_llm(f"{layout.path} is a {layout.kind.value}", hardware)
        return chosen, f"{layout.path} is a {layout.kind.value}"
    if layout.kind is Kind.OPENVINO_ENGINE:
        if asked in _NEEDS_TENSORRT_LLM:
            raise EngineError(
                f"{cited(config, 'backend')}: {layout.path} is a {layout.kind.value}; serve it with "
                f"option.backend=openvino (or auto), or serve the checkpoint with option.backend={asked}"
            )
        return Backend.OPENVINO, f"{layout.path} is a {layout.kind.value}"
    if asked in _NEEDS_TENSORRT_LLM:
        _require_tensorrt_llm(cited(config, "backend"), hardware)
        return asked, cited(config, "backend")
    if asked is Backend.OPENVINO:
        return asked, cited(config, "backend")
    if likely_backend(config, hardware) is Backend.TENSORRT:
        return Backend.TENSORRT, f"TensorRT-LLM {hardware.tensorrt_llm} is installed and there is a GPU"
    if hardware.tensorrt_llm is not None:
        return Backend.OPENVINO, f"TensorRT-LLM {hardware.tensorrt_llm} is installed, but there is no GPU"
    return Backend.OPENVINO, "TensorRT-LLM is not installed" + ("" if hardware.gpus else ", and there is no GPU")


def likely_backend(config: Config, hardware: Hardware) -> Backend:
    """The backend for a checkpoint that is not known yet: the one asked for, or the one `auto` takes here."""
    asked = config.options.backend
    if asked is not Backend.AUTO:
        return asked
    return Backend.TENSORRT if hardware.tensorrt_llm is not None and hardware.gpus else Backend.OPENVINO


def _require_tensorrt_llm(why: str, hardware: Hardware) -> None:
    missing = []
    if hardware.tensorrt_llm is None:
        missing.append("TensorRT-LLM is not installed (pip install 'djl-trtllm[trtllm]', or use its container)")
    if not hardware.gpus:
        missing.append("no NVIDIA GPU is visible (in a container: start it with --gpus all)")
    if missing:
        raise EngineError(
            f"{why}, which needs TensorRT-LLM and a GPU: {'; '.join(missing)}. Or serve a Hugging Face checkpoint "
            "on the CPU with option.backend=openvino"
        )
