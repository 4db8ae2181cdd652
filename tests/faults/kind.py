"""What a kind of fault is, what it is run with, and what comes of it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.models import TINY_STORIES, scripted_model, tensorrt_llm_model
from tests.support.server import Server

SCRIPT: dict[str, object] = {"steps_per_second": 100}


@dataclass
class Row:
    """One line of the table. `failed` of `requests` got no complete and right answer; at most `allowed` may.

    `refused` were answered with 503 and Retry-After, and sent again.
    `recovered`: seconds, by default the longest time in which no client got anything. `ping`: seconds of the slowest
    answer, and `lost_pings` got none. `memory`: peak of the server and all below it, in bytes, and before the fault;
    `memory_allowed` is a bound. `skipped`: this machine cannot run it, the note says why.
    """

    fault: str
    engine: str
    requests: int = 0
    failed: int = 0
    recovered: float = 0.0
    ping: float = 0.0
    memory: int = 0
    allowed: int = 0
    refused: int = 0
    note: str = ""
    memory_before: int = 0
    memory_allowed: int | None = None
    lost_pings: int = 0
    skipped: bool = False

    @property
    def passed(self) -> bool:
        """Whether no more requests failed than may, /ping was answered, and memory stayed in its bounds."""
        in_bounds = self.memory_allowed is None or self.memory <= self.memory_allowed
        return self.failed <= self.allowed and not self.lost_pings and in_bounds


@dataclass(frozen=True)
class Case:
    """What a kind is run with: an engine (openvino, scripted, tensorrt_llm), streams at a time, faults in a row.

    The `short` form of a kind may do less.
    """

    engine: str
    streams: int
    times: int
    folder: Path
    short: bool = False

    def model(self, script: dict[str, object] | None = None) -> tuple[Path, dict[str, str]]:
        """A model directory, and the environment that it needs. OpenVINO runs the bundled model, and no script."""
        where = Path(tempfile.mkdtemp(dir=self.folder)) / "model"
        if self.engine == "openvino":
            return TINY_STORIES, {}
        if self.engine == "scripted":
            return scripted_model(where, SCRIPT | (script or {})), {}
        return tensorrt_llm_model(where, SCRIPT | (script or {}))

    @contextlib.contextmanager
    def server(self, script: dict[str, object] | None = None, /, **environ: str) -> Iterator[Server]:
        """A server on this engine that is ready. It may have ended when the block does."""
        model, needed = self.model(script)
        with Server(model, self.environ(**needed, **environ), self.folder) as server:
            server.wait_for_ping()
            yield server

    def environ(self, **environ: str) -> dict[str, str]:
        """A batch for all streams, and restarts for all faults."""
        return {
            "OPTION_MAX_ROLLING_BATCH_SIZE": str(self.streams),
            "SERVING_RETRY_THRESHOLD": str(self.times + 5),
            **environ,
        }


@dataclass(frozen=True)
class Kind:
    """`run` yields the rows of a case. Its `engines` are those that the fault can be played on."""

    name: str
    run: Callable[[Case], Iterator[Row]]
    engines: tuple[str, ...] = ("openvino", "scripted", "tensorrt_llm")
    short: tuple[str, ...] = field(default=("scripted",))
    """The engines of the short form."""
