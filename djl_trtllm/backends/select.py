"""Selects the backend that runs a model, and says why."""

from __future__ import annotations

from djl_trtllm.backends.registry import backend_named, backends
from djl_trtllm.config import Backend, Config
from djl_trtllm.config.format_setting import format_setting
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.errors import EngineError
from djl_trtllm.model import Layout


def choose_backend(config: Config, layout: Layout, hardware: Hardware) -> tuple[Backend, str]:
    """The backend and its reason in one line.

    With `auto`, the first backend that offers to run these files on this machine. Raises EngineError if the selected
    backend cannot run here or cannot load these files.
    """
    asked = config.options.backend
    if asked is not Backend.AUTO:
        return asked, backend_named(asked).accept(asked, format_setting(config, "backend"), layout, hardware)
    refusals: list[str] = []
    for backend in backends():
        offer = backend.offer(layout, hardware)
        if offer.backend is not None:
            return offer.backend, offer.reason or "; ".join(refusals)
        if offer.reason:
            refusals.append(offer.reason)
    raise EngineError(f"no backend runs {layout.path}: {'; '.join(refusals)}")


def likely_backend(config: Config, hardware: Hardware) -> Backend:
    """The backend for a checkpoint that is not known yet: the one in `option.backend`, or what `auto` selects here."""
    asked = config.options.backend
    if asked is not Backend.AUTO:
        return asked
    usual = (backend.usual(hardware) for backend in backends())
    return next(backend for backend in usual if backend is not None)
