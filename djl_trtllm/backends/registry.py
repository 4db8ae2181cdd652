"""The backends there are. Another one is its folder and a line here."""

from __future__ import annotations

from djl_trtllm.backends.base import EngineBackend
from djl_trtllm.backends.openvino.backend import OpenVinoBackend
from djl_trtllm.backends.scripted.backend import ScriptedBackend
from djl_trtllm.backends.tensorrt_llm.backend import TensorRtLlmBackend
from djl_trtllm.config import Backend
from djl_trtllm.engines.hardware import Hardware

_BACKENDS: list[EngineBackend] = []


def register(backend: EngineBackend) -> None:
    """Make a backend available under its names. `auto` asks backends in the order of registration."""
    for name in backend.effects:
        Backend.add(name)
    _BACKENDS.append(backend)


def backends() -> tuple[EngineBackend, ...]:
    """All backends, in the order in which `auto` asks them."""
    return tuple(_BACKENDS)


def backend_named(name: Backend) -> EngineBackend:
    """The backend that a value of `option.backend` selects; not for `auto`."""
    return next(backend for backend in _BACKENDS if name.value in backend.effects)


def this_machine() -> Hardware:
    """The hardware of this machine now, and which engines are installed."""
    hardware = Hardware.probe()
    for backend in _BACKENDS:
        hardware = backend.inspect(hardware)
    return hardware


for _backend in (
    TensorRtLlmBackend(),
    OpenVinoBackend(),
    ScriptedBackend(),
):
    register(_backend)
