"""The plan of the scripted executor, which has no engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from djl_trtllm.config import Backend, Config
from djl_trtllm.config.format_setting import format_setting
from djl_trtllm.engines.plan import EnginePlan, common_facts, planned_length, planned_sequences
from djl_trtllm.errors import ConfigError
from djl_trtllm.model import Layout


@dataclass(frozen=True, kw_only=True)
class ScriptedPlan(EnginePlan):
    """`script` is what `option.script` holds."""

    script: dict[str, Any]

    executor = "djl_trtllm.backends.scripted.executor:ScriptedExecutor"

    def executor_options(self) -> dict[str, Any]:
        return self.script


def plan_scripted(config: Config, layout: Layout, backend: Backend, reason: str) -> ScriptedPlan:
    """Derive the plan. Raises ConfigError if the script is not a JSON object."""
    notes: list[str] = []
    return ScriptedPlan(
        **common_facts(config, layout),
        backend=backend,
        reason=reason,
        max_sequences=planned_sequences(config),
        max_seq_len=planned_length(config, layout.shape, notes),
        max_input_len=config.options.max_input_len,
        notes=tuple(notes),
        script=_script(config),
    )


def _script(config: Config) -> dict[str, Any]:
    try:
        return msgspec.json.decode(config.options.script or "{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError([f"{format_setting(config, 'script')}: expected a JSON object ({error})"]) from None
