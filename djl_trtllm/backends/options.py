"""What options do, by backend."""

from __future__ import annotations

from collections.abc import Mapping

from djl_trtllm.backends import effects
from djl_trtllm.backends.effects import Effects
from djl_trtllm.backends.openvino.options import EFFECTS as OPENVINO
from djl_trtllm.backends.scripted.options import EFFECTS as SCRIPTED
from djl_trtllm.backends.tensorrt_llm.options import ENGINE, PYTORCH
from djl_trtllm.config import Backend, Config
from djl_trtllm.config.options.registry import DeclaredOption

EFFECTS: Mapping[Backend, Effects] = {
    Backend.TENSORRT: ENGINE,
    Backend.PYTORCH: PYTORCH,
    Backend.AUTODEPLOY: PYTORCH,
    Backend.OPENVINO: OPENVINO,
    Backend.SCRIPTED: SCRIPTED,
}
AUTOMATIC = (Backend.TENSORRT, Backend.PYTORCH, Backend.OPENVINO)
"""The backends that `option.backend=auto` chooses from."""


def describe(declared: DeclaredOption, backend: Backend) -> str:
    """What an option does on a backend, for readers; AUTO names all that it chooses from."""
    everywhere = declared.option.effect_everywhere
    if backend is not Backend.AUTO:
        return everywhere or effects.describe(declared, EFFECTS[backend], backend)
    return everywhere or "; ".join(f"{one}: {effects.describe(declared, EFFECTS[one], one)}" for one in AUTOMATIC)


def without_effect(config: Config, backend: Backend) -> tuple[str, ...]:
    """One line for each option that the user set and that has no effect on the backend, with the reason."""
    return effects.without_effect(config, EFFECTS[backend], backend)
