"""What a kind of fault is, greedy streams under it, and what their clients, /ping and memory go through."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support import pings
from tests.support.client import Answer, exchange, lmi
from tests.support.hostile import late
from tests.support.models import PROMPT, TINY_STORIES, scripted_model, tensorrt_llm_model
from tests.support.processes import InBackground, wait_until
from tests.support.reference import SHORT, story
from tests.support.server import Reachable, Server

SCRIPT: dict[str, object] = {"steps_per_second": 100}


@dataclass
class Row:
    """One line of the table. `failed` of `requests` got no complete and right answer; at most `allowed` may.

    `refused` were answered with 503 and Retry-After, and sent again.
    `recovered`: seconds, by default the longest time in which no client got anything. `ping`: seconds of the slowest
    answer, `ping_late` the 99.9th percentile of all, and `ping_used` that of the server's processor time meanwhile,
    which does not depend on what else the machine does; of fewer than 1,000 `pings` it is the slowest. `lost_pings` got
    none, or 500. `memory`: peak of the server and all below it, in bytes, and before the fault; `memory_allowed` is a
    bound. `skipped`: this machine cannot run it, the note says why.
    """

    fault: str
    engine: str
    requests: int = 0
    failed: int = 0
    recovered: float = 0.0
    ping: float = 0.0
    ping_late: float = 0.0
    ping_used: float = 0.0
    pings: int = 0
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

    `seconds` is how long what clients and model stores bring goes on. The `short` form of a kind may do less.
    """

    engine: str
    streams: int
    times: int
    folder: Path
    short: bool = False
    seconds: float = 0.0

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
        """A batch for all streams; otherwise the defaults."""
        return {"OPTION_MAX_ROLLING_BATCH_SIZE": str(self.streams), **environ}


@dataclass(frozen=True)
class Kind:
    """`run` yields the rows of a case. Its `engines` are those that the fault can be played on, `short` has some."""

    name: str
    run: Callable[[Case], Iterator[Row]]
    engines: tuple[str, ...]
    short: tuple[str, ...] = ("scripted",)


# -- Greedy streams against a server, and what its clients, /ping and memory go through meanwhile ----------------------

TOKENS = 100
_REFUSED_SECONDS = 0.1
_LOOK_SECONDS = 0.2


class Load:
    """`streams` clients that send one request after the other until `fault` returns; with `once` each sends one.

    A request has failed if its answer is not complete, or not the one of a quiet server. A client that finds nobody
    listening, or is refused with Retry-After, tries again, as clients do.
    """

    def __init__(self, server: Reachable, streams: int, *, tokens: int = TOKENS, once: bool = False) -> None:
        self.server = server
        """What is watched; a kind that starts another one says so here."""
        self.streams = streams
        self.requests = 0
        self.refused = 0
        self.failed: list[str] = []
        self.unanswered = 0
        """Failed requests that got no byte of an answer: the kernel took the connection while the server died."""
        self.parts = 0
        """Pieces of answers that have come."""
        self._once = once
        self._ended = False
        self._last_part = time.monotonic()
        self.longest_silence = 0.0
        self._asked = [
            lmi(prompt, stream=True, max_new_tokens=tokens, ignore_eos=True, details=True)
            for prompt in (*SHORT, *(f"{story(1, number)} {PROMPT}" for number in range(streams)))[:streams]
        ]
        self._expected = [_output(answer) for answer in server.together(self._asked)]

    def run(self, fault: Callable[[Load], None]) -> None:
        """Send, and run `fault` in a thread as soon as every client has something."""
        asyncio.run(self._run(fault))

    async def _run(self, fault: Callable[[Load], None]) -> None:
        clients = [asyncio.ensure_future(self._client(number)) for number in range(len(self._asked))]
        try:
            await asyncio.to_thread(self._cause, fault)
        finally:
            self._ended = True
        await asyncio.gather(*clients)

    def _cause(self, fault: Callable[[Load], None]) -> None:
        self.wait_for_parts(2 * len(self._asked))
        self.longest_silence = 0.0
        fault(self)

    def wait_for_parts(self, count: int) -> None:
        """Wait until this number of further pieces has come. AssertionError: a server that gives nobody anything."""
        wanted = self.parts + count
        wait_until(lambda: self.parts >= wanted, what=f"{count} pieces of answers; {self.refused} were refused")

    async def _client(self, number: int) -> None:
        while not self._ended:
            answer: Answer | None = None
            try:
                answer = await exchange(self.server.port, self._asked[number], on_part=self._part)
            except ConnectionRefusedError:
                await asyncio.sleep(_REFUSED_SECONDS)
                continue
            except OSError as error:
                self.unanswered += 1
                self.failed.append(repr(error))
            if answer is not None and answer.status == 503 and "retry-after" in answer.headers:
                self.refused += 1
                await asyncio.sleep(_REFUSED_SECONDS)
                continue
            self.requests += 1
            if answer is not None:
                self._judge(answer, number)
            if self._once:
                return

    def _judge(self, answer: Answer, number: int) -> None:
        if answer.status != 200 or not answer.complete:
            self.unanswered += answer.status == 0
            self.failed.append(f"{answer.status}: {answer.body[-200:]!r}")
        elif _output(answer) != self._expected[number]:
            self.failed.append(f"another output: {answer.body[-200:]!r}")

    def _part(self) -> None:
        now = time.monotonic()
        self.longest_silence = max(self.longest_silence, now - self._last_part)
        self._last_part = now
        self.parts += 1


def _output(answer: Answer) -> Any:
    """Tokens and texts. (Log-probabilities differ in the last digits by the batch they ran in.)"""
    if answer.status != 200 or not answer.complete:
        return None
    lines = answer.lines
    return [(line["token"]["id"], line["token"]["text"]) for line in lines], lines[-1].get("generated_text")


class Watch(InBackground):
    """Asks for /ping, and looks at the memory of the server and all below it, during the block.

    A process of its own asks (`tests.support.pings`), with a connection for each, as load balancers do. `lost` are
    those without a response, or with 500, which says that the model has failed.
    """

    def __init__(self, load: Load) -> None:
        self.lost = 0
        self.peak = _resident(load.server.process)
        self._load = load
        self._found: dict[str, Any] = {}
        super().__init__()

    def figures(self) -> dict[str, Any]:
        """The fields of a row, after the block."""
        passed, used = self._found["passed"], self._found["used"]
        times = {"ping": max(passed, default=0.0), "ping_late": late(passed), "ping_used": late(used)}
        return {**times, "pings": len(passed), "memory": self.peak}

    def _run(self) -> None:
        command = [sys.executable, "-I", pings.__file__, str(self._load.server.port)]
        told: psutil.Popen | None = None
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asking:
            while not self._end.is_set():
                process = self._load.server.process
                if process is not told:
                    print(process.pid, file=asking.stdin, flush=True)
                    told = process
                self.peak = max(self.peak, _resident(process))
                self._end.wait(_LOOK_SECONDS)
            self._found = json.loads(asking.communicate()[0])
        self.lost = self._found["lost"]


def _resident(process: psutil.Popen) -> int:
    total = 0
    with contextlib.suppress(psutil.Error):
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += int(one.memory_info().rss)
    return total


def row_of(
    fault: str,
    engine: str,
    server: Server,
    streams: int,
    cause: Callable[[Load], None],
    *,
    tokens: int = TOKENS,
    once: bool = False,
) -> Row:
    """The row of a fault that `cause` brings about under streams.

    AssertionError: the server is not ready again, or not as it was before. With `once` the fault is its end.
    """
    server.note_rest()
    load = Load(server, streams, tokens=tokens, once=once)
    with Watch(load) as watch:
        before = watch.peak
        load.run(cause)
    if not once:
        again = load.server
        assert isinstance(again, Server)
        again.wait_for_ping()
        again.check_leaks()
    note = "" if not load.failed else load.failed[0][:300]
    return Row(
        fault,
        engine,
        load.requests,
        len(load.failed),
        load.longest_silence,
        **watch.figures(),
        refused=load.refused,
        note=note,
        memory_before=before,
        lost_pings=watch.lost,
    )


def repeated(times: int, strike: Callable[[], None]) -> Callable[[Load], None]:
    """Strike again each time that every stream has gone on."""

    def cause(load: Load) -> None:
        for _ in range(times):
            strike()
            load.wait_for_parts(4 * load.streams)

    return cause


# -- what several kinds do to a server ---------------------------------------------------------------------------------


@contextlib.contextmanager
def engine_replaced(server: Server) -> Iterator[None]:
    """The block ends the engine process; afterwards there is another one."""
    restarts = server.metric("executor_restarts_total")
    yield
    wait_until(lambda: server.metric("executor_restarts_total") > restarts, what="a new engine process")
