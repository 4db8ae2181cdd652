"""`djl-trtllm bench --record` and `versus --record`: keep what was measured for `size` and `advise`."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from djl_trtllm.commands.console import say, warn
from djl_trtllm.commands.size_report import machines_of, read_request
from djl_trtllm.errors import BenchmarkError
from djl_trtllm.sizing.points import ENGINES, FILE_NAME, Point, fingerprint, precision_of, read_points, write_point

if TYPE_CHECKING:
    from djl_trtllm.bench.session import Result


@dataclass(frozen=True)
class Recorder:
    """What a bench against an address cannot see: the model's sizes and options, the engine and the GPUs."""

    folder: Path
    measured: Mapping[str, Any]
    """Fields of the points: `model`, `name`, `engine`, `version`, `gpu`, `gpus` and `precision`."""

    @classmethod
    def of(cls, model: str, engine: str | None, gpu: str | None) -> Recorder:
        """Read the model, before anything is measured. Raises BenchmarkError, SizingError, ModelError, ConfigError."""
        request = read_request(model, {})
        backend = request.config.options.backend.value
        name, _, version = (engine or backend).partition("==")
        name = ENGINES.get(name, name)
        if name not in ENGINES.values():
            given = f"--engine {engine}" if engine else f"--record {model}: its options have backend={backend}"
            known = ", ".join(dict.fromkeys(ENGINES.values()))
            raise BenchmarkError(f"{given}: expected --engine with the server's engine, one of {known}")
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
        folder = request.config.engine_cache_dir
        read_points(folder)  # a file that cannot be read is an error now, and not after the loads
        return cls(folder, measured)

    def write(self, result: Result, command: str) -> None:
        """Keep the points, and print where they are. `command` is what measured them. Raises SizingError."""
        points = list(self._points(result, command))
        for point in points:
            write_point(self.folder, point)
        if points:
            say(Console(stderr=True), f"recorded in {self.folder / FILE_NAME}: {len(points)} loads")
        else:
            warn("nothing to record: a point is of clients (--concurrency) whose requests all succeed")

    def _points(self, result: Result, command: str) -> Iterator[Point]:
        """A point for each load of clients that send one request after another, if every request succeeded."""
        for figures in result.figures:
            if figures.concurrency is None or not figures.complete or not figures.succeeded or figures.failed:
                continue
            counted, ttft = figures.prompts_counted, figures.ttft.as_json()
            yield Point(
                **self.measured,
                isl=max(1, round(figures.prompt_tokens / counted) if counted else result.plan.prompt_tokens),
                osl=max(1, round(figures.output_tokens / figures.succeeded)),
                clients=figures.concurrency or 1,
                tokens_per_second=figures.tokens_per_second,
                ttft_p50=ttft.get("p50"),
                ttft_p99=ttft.get("p99"),
                itl=figures.itl.as_json().get("p50"),
                command=command,
                date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            )
