"""The scripted executor as a backend: it loads no engine, so any model directory will do."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from djl_trtllm.backends.base import EngineBackend
from djl_trtllm.backends.effects import Effects
from djl_trtllm.backends.scripted.options import EFFECTS
from djl_trtllm.backends.scripted.plan import ScriptedPlan, plan_scripted
from djl_trtllm.config import Backend, Config
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.model import Layout


class ScriptedBackend(EngineBackend):
    """See `EngineBackend`."""

    effects: Mapping[str, Effects] = MappingProxyType({Backend.SCRIPTED.value: EFFECTS})

    def accept(self, backend: Backend, setting: str, layout: Layout, hardware: Hardware) -> str:
        return f"{setting}; no engine is loaded"

    def plan(
        self, config: Config, layout: Layout, hardware: Hardware, backend: Backend, reason: str, *, compile_only: bool
    ) -> ScriptedPlan:
        return plan_scripted(config, layout, backend, reason)
