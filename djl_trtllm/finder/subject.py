"""The subject of a measurement: the model as it would be served here, and the numbers among which the result is."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from djl_trtllm.backends.base import this_machine
from djl_trtllm.config import Backend, Config
from djl_trtllm.config.options import OPTIONS, find
from djl_trtllm.config.options.option import as_text
from djl_trtllm.config.sources import as_arguments
from djl_trtllm.engines.cache import installed_versions
from djl_trtllm.engines.hardware import Hardware, available_memory
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.finder.trial import TrialLoad
from djl_trtllm.model import Layout, ModelKind
from djl_trtllm.model.remote.fetch import is_remote
from djl_trtllm.service.model import open_remote, open_source, plan
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.estimate import Estimate
from djl_trtllm.sizing.recommendation import conditions_of

LOWEST = 64
"""No smaller number is tried: an engine that takes no more tokens at a time is of no use."""

_PLANNED_WITH = 8192
"""Any number from 4,096 on widens the limits to the same values."""

_HOST_SHARE = 0.9
_VERSIONS = ("djl-trtllm", "openvino", "openvino-genai", "tensorrt-llm", "tensorrt", "torch")
_WITHOUT_EFFECT = ("max_num_tokens", "model_id", "engine_cache_dir", "engine_cache_max_gb", "model_name")


@dataclass(frozen=True)
class Subject:
    """A model with the options it is measured with. `highest` is the largest number that can make a difference."""

    model: str
    options: dict[str, Any]
    config: Config
    layout: Layout
    plan: EnginePlan
    hardware: Hardware
    load: TrialLoad
    highest: int

    @property
    def backend(self) -> Backend:
        return self.plan.backend

    @property
    def on_host(self) -> bool:
        """Return whether an engine runs in host memory."""
        return not self.plan.gpus and self.backend is not Backend.SCRIPTED

    @property
    def tensor_parallel(self) -> int:
        """GPUs that share a layer; 1 on the CPU."""
        if not self.plan.gpus:
            return 1
        degree = self.layout.tensor_parallel or self.config.options.tensor_parallel_degree
        return degree if isinstance(degree, int) else self.plan.gpus

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return notes about what the user asked for and does not get."""
        degree = self.config.options.tensor_parallel_degree
        if self.plan.gpus or degree in (1, "1") or not self.config.is_set("tensor_parallel_degree"):
            return ()
        return (
            f"{self.config.format_setting('tensor_parallel_degree')} has no effect with {self.backend}: one process "
            f"runs the whole model on this machine's CPU, so the result is what one process holds, not {degree} GPUs",
        )

    def default_bound(self) -> int | None:
        """The memory bound of the engine process where none is given, so that the kernel need not kill any process."""
        return int(available_memory() * _HOST_SHARE) if self.on_host else None

    def guess(self, memory: int | None) -> int | None:
        """About where the result is: the estimate, or on the CPU a rule of thumb; None if there is none."""
        if self.on_host and memory is not None:
            return self._host_guess(memory)
        gpu = next((gpu.memory for gpu in self.hardware.gpus if gpu.memory), None)
        if not self.plan.gpus or gpu is None or self.layout.kind is not ModelKind.HF_CHECKPOINT:
            return None
        conditions = conditions_of(
            self.config,
            self.layout.shape,
            gpu_memory=gpu,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=max(1, self.plan.gpus // self.tensor_parallel),
            compiled=self.backend is Backend.TENSORRT,
        )
        with suppress(DjlTrtllmError):
            if self.layout.draft is not None:
                conditions = replace(conditions, draft=CheckpointSizes.read(self.layout.draft.path))
            return Estimate(CheckpointSizes.read(self.layout.path), conditions).max_num_tokens or None
        return None

    def _host_guess(self, memory: int) -> int | None:
        """A quarter of the bound is KV cache; the rest is libraries, weights in float32, and float32 activations.

        The rows of a token that are alive at once: those of the MLP four times, hidden ones eight times (measured on
        the bundled model with OpenVINO 2026.4: 18 KB against 19 KB by this rule).
        """
        shape = self.layout.shape
        if not shape.hidden:
            return None
        weights = 2 * sum(path.stat().st_size for path in self.layout.weight_files)
        per_token = 4 * (4 * (shape.intermediate or 4 * shape.hidden) + 8 * shape.hidden)
        left = int(memory * (1 - 0.25)) - weights - (260 << 20)
        return max(LOWEST, left // per_token)

    def conditions(self, memory: int | None, precision: float) -> dict[str, Any]:
        """Everything that affects the result, as JSON; `memory` is the bound that was asked for."""
        options = self.config.options
        chosen = {name: as_text(getattr(options, name)) for name in OPTIONS if self.config.is_set(name)}
        return {
            "model": self.model,
            "files": _files(self.layout),
            "backend": self.backend.value,
            "options": {name: text for name, text in sorted(chosen.items()) if name not in _WITHOUT_EFFECT},
            "gpus": [[gpu.name, gpu.memory] for gpu in self.hardware.gpus] if self.plan.gpus else [],
            "driver": self.hardware.driver if self.plan.gpus else None,
            "tensorrt_llm": self.hardware.tensorrt_llm if self.plan.gpus else None,
            "versions": installed_versions(_VERSIONS),
            "requests": self.load.requests,
            "request_tokens": self.load.tokens,
            "memory": memory,
            "numbers": [LOWEST, self.highest, precision],
        }


def open_subject(model: str, options: Mapping[str, Any], load: TrialLoad, hardware: Hardware | None = None) -> Subject:
    """Plan the model as it is served with `options` (names with or without `option.`); fetches a remote one.

    Raises ConfigError, also for what is no option and for `max_num_tokens`, and DjlTrtllmError.
    """
    given = as_arguments(options, _measured)
    arguments = [*given, f"option.max_num_tokens={_PLANNED_WITH}", "option.strict_memory=false"]
    if is_remote(model):
        source = open_remote(model, os.environ, arguments)
    else:
        source = open_source(Path(model), os.environ, arguments)
    hardware = this_machine() if hardware is None else hardware
    config, layout, engine_plan = plan(source, hardware)
    refuse_built(layout, engine_plan.backend)
    prompt = min(engine_plan.max_input_len, config.options.max_input_len)
    bounded = load.within(prompt, engine_plan.max_seq_len)
    highest = engine_plan.max_sequences * min(prompt, engine_plan.max_seq_len)
    if engine_plan.backend is Backend.OPENVINO:
        # Its memory grows with the tokens that are in a step, and there are never more than the requests have.
        highest = min(highest, bounded.tokens * min(bounded.requests, engine_plan.max_sequences))
    plain = dict(pair.split("=", 1) for pair in given)
    return Subject(model, plain, config, layout, engine_plan, hardware, bounded, max(LOWEST, highest))


def _measured(name: str) -> str | None:
    declared = find(name) or find(f"option.{name}")
    return f"{name} is what is measured: leave it out" if declared is OPTIONS["max_num_tokens"] else None


def refuse_built(layout: Layout, backend: Backend) -> None:
    """Raise DjlTrtllmError for an engine that cannot have another number."""
    if layout.kind.is_engine and backend is Backend.TENSORRT:
        raise DjlTrtllmError(
            f"{layout.path} is a compiled engine, whose max_num_tokens was decided when it was compiled: measure the "
            "checkpoint that it was compiled from"
        )


def _files(layout: Layout) -> list[list[Any]]:
    """The name, size and time of each file of a model."""
    found = [path for path in sorted(layout.path.iterdir()) if path.is_file()] if layout.path.is_dir() else []
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in found]
