"""The effects of options, for each registered backend."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from djl_trtllm.backends import effects
from djl_trtllm.backends.effects import Effects
from djl_trtllm.backends.registry import backend_named, backends
from djl_trtllm.config import Backend, Config
from djl_trtllm.config.options.registry import DeclaredOption
from djl_trtllm.config.rules.running import check_running
from djl_trtllm.engines.plan import EnginePlan


def option_maps() -> dict[Backend, Effects]:
    """The option map of each value of `option.backend`."""
    return {Backend(name): effects for backend in backends() for name, effects in backend.effects.items()}


def automatic_backends() -> tuple[Backend, ...]:
    """The backends that `option.backend=auto` selects from."""
    return tuple(Backend(name) for backend in backends() for name in backend.automatic)


def describe(declared: DeclaredOption, backend: Backend, *, under_djl: bool = False) -> str:
    """What an option does on a backend, for readers; AUTO names all that it selects from.

    `under_djl`: where DJL Serving runs the model and reads options of its own.
    """
    if under_djl and declared.option.under_djl:
        return declared.option.under_djl
    if everywhere := declared.option.effect_everywhere:
        return everywhere
    if backend is Backend.AUTO:
        return "; ".join(f"{one}: {describe(declared, one)}" for one in automatic_backends())
    return effects.describe(declared, _effects_on(backend), backend)


def deviations(
    config: Config, backend: Backend, plan: EnginePlan | None = None, *, under_djl: bool = False
) -> tuple[str, ...]:
    """One line for each option that the user set and that does nothing on the backend, something else, or less."""
    return effects.deviations(config, _effects_on(backend), backend, plan, under_djl=under_djl)


def with_effects(
    config: Config, backend: Backend, plan: EnginePlan | None = None, *, under_djl: bool = False
) -> Config:
    """The configuration with what there is to say of it on a backend: `deviations`, and rules about running engines."""
    checked = check_running(config, partial(effects.effective_value, config, _effects_on(backend)))
    return replace(checked, notes=(*deviations(config, backend, plan, under_djl=under_djl), *checked.notes))


def _effects_on(backend: Backend) -> Effects:
    return backend_named(backend).effects[backend.value]
