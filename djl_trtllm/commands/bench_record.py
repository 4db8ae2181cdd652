"""`djl-trtllm bench --record`: keep what was measured for `size` and `advise`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from djl_trtllm.commands.console import say, warn
from djl_trtllm.errors import BenchmarkError

if TYPE_CHECKING:
    from djl_trtllm.bench.session import Result

_ENGINES = {"tensorrt": "tensorrt_llm", "pytorch": "tensorrt_llm", "autodeploy": "tensorrt_llm"}
"""Engines by values of option.backend; the others have the same name."""
_KNOWN = ("tensorrt_llm", "vllm", "openvino")


@dataclass(frozen=True)
class Recorder:
    """What a bench against an address cannot see: the model's sizes and options, the engine and the GPUs."""

    folder: Path
    measured: Mapping[str, Any]
    """Fields of the points; see `points_of`."""

    @classmethod
    def of(cls, model: str, engine: str | None, gpu: str | None) -> Recorder:
        """Read the model, before anything is measured. Raises BenchmarkError, SizingError, ModelError, ConfigError."""
        from djl_trtllm.commands.size_report import machines_of, read_request
        from djl_trtllm.sizing.points import fingerprint, precision_of

        request = read_request(model, {})
        backend = request.config.options.backend.value
        name, _, version = (engine or backend).partition("==")
        name = _ENGINES.get(name, name)
        if name not in _KNOWN:
            given = f"--engine {engine}" if engine else f"--record {model}: its options have backend={backend}"
            raise BenchmarkError(f"{given}: expected --engine with the server's engine, one of {', '.join(_KNOWN)}")
        machine = machines_of([] if gpu is None else [gpu], None, [], here=True)[0]
        found = request.on(machine, request.degree_on(machine)).estimate.conditions
        measured = {
            "model": fingerprint(request.sizes),
            "name": request.sizes.source,
            "engine": name,
            "version": version,
            "gpu": machine.gpu if machine.gpu_model is None else machine.gpu_model.name,
            "gpus": machine.gpus if gpu is not None and machine.gpus else found.ranks,
            "precision": precision_of(request.sizes, found.quantization, found.kv_dtype),
        }
        return cls(request.config.engine_cache_dir, measured)

    def write(self, result: Result, command: str = "") -> None:
        """Keep the points, and print where they are. `command` is what measured them. Raises SizingError."""
        from djl_trtllm.bench.points import points_of
        from djl_trtllm.bench.report import server_of
        from djl_trtllm.sizing.points import FILE_NAME, write_point

        command = command or f"djl-trtllm bench {server_of(result.plan)}"
        points = list(points_of(result, {**self.measured, "command": command}))
        for point in points:
            write_point(self.folder, point)
        if points:
            say(Console(stderr=True), f"recorded in {self.folder / FILE_NAME}: {len(points)} loads")
        else:
            warn("nothing to record: a point is of clients (--concurrency) whose requests all succeed")
