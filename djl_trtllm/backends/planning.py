"""Selects the backend of a model and derives its plan, for an engine with its own limits."""

from __future__ import annotations

from dataclasses import replace

from djl_trtllm.backends.as_built import apply
from djl_trtllm.backends.registry import backend_named, backends, this_machine
from djl_trtllm.backends.select import choose_backend
from djl_trtllm.config import Config
from djl_trtllm.engines.gpu import Gpu
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.model import Layout


def served_as_built(config: Config, layout: Layout) -> Config:
    """The configuration with the limits of a compiled engine as defaults; unchanged for a checkpoint.

    Raises EngineMismatchError for an engine whose description is damaged.
    """
    if not layout.kind.is_engine:
        return config
    found = (backend.built(config, layout) for backend in backends())
    built = next((built for built in found if built is not None), None)
    return config if built is None else apply(config, built)


def fitted_to_memory(config: Config, layout: Layout, hardware: Hardware) -> Config:
    """The configuration with limits that fit the machine's memory, where the user set none.

    What does not fit is a warning, or a ConfigError with option.strict_memory. An engine keeps what it was compiled
    with. Raises EngineError if the backend cannot run here.
    """
    if layout.kind.is_engine:
        return config
    backend, _ = choose_backend(config, layout, hardware)
    return backend_named(backend).fitted_to_memory(config, layout, hardware, backend)


def plan_fitted(
    config: Config, layout: Layout, hardware: Hardware | None = None, *, compile_only: bool = False
) -> tuple[Config, EnginePlan]:
    """`fitted_to_memory`, and the plan of what it returns. Raises what both raise."""
    hardware = this_machine() if hardware is None else hardware
    config = fitted_to_memory(config, layout, hardware)
    return config, plan_engine(config, layout, hardware, compile_only=compile_only)


def plan_engine(
    config: Config, layout: Layout, hardware: Hardware | None = None, *, compile_only: bool = False
) -> EnginePlan:
    """Derive the plan; reads headers of weight files, never weights. `hardware` defaults to this machine.

    `compile_only` leaves out everything that depends on the machine that will run the engine. Raises EngineError if the
    backend cannot run here, EngineMismatchError for an engine that does not fit, ConfigError (all problems at once) for
    options that the backend cannot honour, and LayoutError for damaged weight files.
    """
    hardware = this_machine() if hardware is None else hardware
    backend, reason = choose_backend(config, layout, hardware)
    return backend_named(backend).plan(config, layout, hardware, backend, reason, compile_only=compile_only)


def suppose_machine(hardware: Hardware, gpus: tuple[Gpu, ...]) -> Hardware:
    """A machine with these GPUs on which every engine is installed, as far as this one does not say otherwise."""
    for backend in backends():
        hardware = backend.suppose(hardware)
    return replace(hardware, gpus=gpus)
