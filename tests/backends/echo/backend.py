"""The backend: which files it runs, and its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from djl_trtllm.backends.base import EngineBackend
from djl_trtllm.backends.effects import Effects
from djl_trtllm.config import Backend, Config
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.engines.plan import EnginePlan, planned_length, planned_sequences, shared_fields
from djl_trtllm.model import Layout


@dataclass(frozen=True, kw_only=True)
class EchoPlan(EnginePlan):
    """Nothing is compiled."""

    executor = "tests.backends.echo.executor:EchoExecutor"

    def executor_options(self) -> dict[str, Any]:
        return {"max_sequences": self.max_sequences, "max_seq_len": self.max_seq_len}


class EchoBackend(EngineBackend):
    """Runs any model directory that has a tokenizer."""

    effects: Mapping[str, Effects] = MappingProxyType({"echo": {}})

    def accept(self, backend: Backend, setting: str, layout: Layout, hardware: Hardware) -> str:
        return setting

    def plan(
        self, config: Config, layout: Layout, hardware: Hardware, backend: Backend, reason: str, *, compile_only: bool
    ) -> EchoPlan:
        return EchoPlan(
            **shared_fields(config, layout),
            backend=backend,
            reason=reason,
            max_sequences=planned_sequences(config),
            max_seq_len=planned_length(config, layout.shape, []),
            max_input_len=config.options.max_input_len,
        )
