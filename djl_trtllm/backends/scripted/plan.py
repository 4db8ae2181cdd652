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
    """`script` is what `option.script` holds; `max_num_tokens` is of use only to a script that bounds it."""

    script: dict[str, Any]
    max_num_tokens: int | None = None

    executor = "djl_trtllm.backends.scripted.executor:ScriptedExecutor"

    def executor_options(self) -> dict[str, Any]:
        bounded = "memory_tokens" in self.script and self.max_num_tokens is not None
        return self.script | {"max_num_tokens": self.max_num_tokens} if bounded else self.script


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
        max_num_tokens=config.options.max_num_tokens,
    )


def _script(config: Config) -> dict[str, Any]:
    try:
        return msgspec.json.decode(config.options.script or "{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError([f"{format_setting(config, 'script')}: expected a JSON object ({error})"]) from None
