"""`djl-trtllm bench --record`: keep what was measured for `size` and `advise`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from djl_trtllm.commands.console import say, warn
from djl_trtllm.errors import BenchmarkError

if TYPE_CHECKING:
    from djl_trtllm.bench.points import Measured
    from djl_trtllm.bench.session import Result

_ENGINES = {"tensorrt": "tensorrt_llm", "pytorch": "tensorrt_llm", "autodeploy": "tensorrt_llm"}
"""Engines by values of option.backend; the others have the same name."""
_KNOWN = ("tensorrt_llm", "vllm", "openvino")


@dataclass(frozen=True)
class Recorder:
    """What a bench against an address cannot see: the model's sizes and options, the engine and the GPUs."""

    folder: Path
    measured: Measured

    @classmethod
    def of(cls, model: str, engine: str | None, gpu: str | None) -> Recorder:
        """Read the model, before anything is measured. Raises BenchmarkError, SizingError, ModelError, ConfigError."""
        from djl_trtllm.bench.points import Measured
        from djl_trtllm.commands.size_report import machines_of, read_request
        from djl_trtllm.sizing.points import fingerprint, precision_of

        request = read_request(model, {})
        options = request.config.options
        backend = options.backend.value
        name, _, version = (engine or backend).partition("==")
        name = _ENGINES.get(name, name)
        if name not in _KNOWN:
            raise BenchmarkError(f"--engine {name}: expected the server's engine, one of {', '.join(_KNOWN)}")
        machine = machines_of([] if gpu is None else [gpu], None, [], here=True)[0]
        found = request.on(machine, request.degree_on(machine)).estimate.conditions
        return cls(
            request.config.engine_cache_dir,
            Measured(
                model=fingerprint(request.sizes),
                name=request.sizes.source,
                engine=name,
                version=version,
                gpu=machine.gpu if machine.gpu_model is None else machine.gpu_model.name,
                gpus=machine.gpus if gpu is not None and machine.gpus else found.ranks,
                precision=precision_of(request.sizes, found.quantization, found.kv_dtype),
                command="",
            ),
        )

    def write(self, result: Result, command: str = "") -> None:
        """Keep the points, and print where they are. `command` is what measured them. Raises SizingError."""
        from dataclasses import replace

        from djl_trtllm.bench.points import points_of
        from djl_trtllm.bench.report import server_of
        from djl_trtllm.sizing.points import write_point

        measured = replace(self.measured, command=command or f"djl-trtllm bench {server_of(result.plan)}")
        points = list(points_of(result, measured))
        if not points:
            warn("nothing to record: a point is of clients (--concurrency) whose requests all succeed")
            return
        for point in points:
            path = write_point(self.folder, point)
        say(Console(stderr=True), f"recorded {len(points)} points in {path}")
