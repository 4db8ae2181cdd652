"""The scripted executor as a backend: it loads no engine, so any model directory will do."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from djl_trtllm.backends.base import EngineBackend
from djl_trtllm.backends.effects import Derived, Effects
from djl_trtllm.config import Backend, Config, Task
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.engines.plan import EnginePlan, planned_length, planned_sequences, shared_fields
from djl_trtllm.errors import ConfigError
from djl_trtllm.model import Layout
from djl_trtllm.model.pooling import find_task

_POOLED_TOKENS = 1024

_EFFECTS: Effects = {
    "max_num_tokens": Derived("raises lengths and batch; a script may have a bound for it"),
    "stream_interval": Derived("the engine process sends the output of as many iterations together"),
    "script": Derived("what the executor plays, as JSON"),
}


@dataclass(frozen=True, kw_only=True)
class ScriptedPlan(EnginePlan):
    """The plan of a script. `script` is the value of `option.script`; only some scripts bound `max_num_tokens`."""

    script: dict[str, Any]
    max_num_tokens: int | None = None

    executor = "djl_trtllm.backends.scripted.executor:ScriptedExecutor"

    def executor_options(self) -> dict[str, Any]:
        bounded = "memory_tokens" in self.script and self.max_num_tokens is not None
        return self.script | {"max_num_tokens": self.max_num_tokens} if bounded else self.script


@dataclass(frozen=True, kw_only=True)
class ScriptedPoolingPlan(ScriptedPlan):
    """The plan of a model that embeds or scores."""

    executor = "djl_trtllm.backends.scripted.executor:ScriptedPoolingExecutor"

    def executor_options(self) -> dict[str, Any]:
        return {
            "script": self.script,
            "task": self.task.value,
            "max_sequences": self.max_sequences,
            "max_seq_len": self.max_seq_len,
            "max_num_tokens": self.max_num_tokens or _POOLED_TOKENS,
        }


class ScriptedBackend(EngineBackend):
    """The `EngineBackend` of scripts."""

    tasks = frozenset({Task.GENERATE, Task.EMBED, Task.SCORE})
    has_gpus = False
    effects: Mapping[str, Effects] = MappingProxyType({Backend.SCRIPTED.value: _EFFECTS})

    def accept(self, backend: Backend, setting: str, layout: Layout, hardware: Hardware) -> str:
        return f"{setting}; no engine is loaded"

    def plan(
        self, config: Config, layout: Layout, hardware: Hardware, backend: Backend, reason: str, *, compile_only: bool
    ) -> ScriptedPlan:
        try:
            script = msgspec.json.decode(config.options.script or "{}", type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ConfigError(f"{config.format_setting('script')}: expected a JSON object ({error})") from None
        notes: list[str] = []
        task = find_task(config.options.task, layout)
        generates = task is Task.GENERATE
        shape = layout.shape
        length = planned_length(config, shape, notes)
        if not generates:
            length = shape.max_position_embeddings or length
        return (ScriptedPlan if generates else ScriptedPoolingPlan)(
            **shared_fields(config, layout),
            task=task,
            backend=backend,
            reason=reason,
            max_sequences=planned_sequences(config),
            max_seq_len=length,
            max_input_len=config.options.max_input_len if generates else length,
            notes=tuple(notes),
            script=script,
            max_num_tokens=config.options.max_num_tokens,
        )
