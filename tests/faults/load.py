"""Greedy streams against a server, and what its clients, /ping and memory go through meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil

from tests.faults.kind import Row
from tests.support.background import InBackground
from tests.support.client import Answer, exchange, lmi
from tests.support.models import PROMPT
from tests.support.prompts import SHORT, story
from tests.support.reachable import Reachable
from tests.support.server import Server
from tests.support.waiting import wait_until

TOKENS = 100
_REFUSED_SECONDS = 0.1
_LOOK_SECONDS = 0.02
_MEMORY_EVERY = 10


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
        """Those of the failed that got no byte of an answer: the kernel took the connection while the server died."""
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

    Each /ping has a connection of its own, as those of load balancers do. `lost` are those without a response.
    """

    def __init__(self, load: Load) -> None:
        self.slowest = 0.0
        self.lost = 0
        self.peak = _resident(load.server.process)
        self._load = load
        super().__init__()

    def _run(self) -> None:
        looks = 0
        own = {"Connection": "close"}
        with httpx.Client(base_url=self._load.server.url, timeout=60, trust_env=False, headers=own) as client:
            while not self._end.is_set():
                began = time.monotonic()
                try:
                    client.get("/ping")
                    self.slowest = max(self.slowest, time.monotonic() - began)
                except httpx.TransportError:
                    self.lost += 1
                if looks % _MEMORY_EVERY == 0:
                    self.peak = max(self.peak, _resident(self._load.server.process))
                looks += 1
                self._end.wait(_LOOK_SECONDS)


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
        watch.slowest,
        watch.peak,
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
