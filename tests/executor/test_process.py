"""What a host does with messages and iterations. Both kinds of engine run in a thread here; one is stepped by hand."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest

from djl_trtllm.backends.scripted.executor import FEATURES, ScriptedExecutor
from djl_trtllm.executor import process as host
from djl_trtllm.executor.process import Channel, Disconnected, HeldOutput, StepBuffer, run, run_async
from djl_trtllm.executor.protocol import (
    Cancel,
    Failed,
    FirstRequest,
    FromEngine,
    Ping,
    Pong,
    Ready,
    Shutdown,
    Start,
    Stats,
    Step,
    Submit,
    ToEngine,
    Try,
)
from djl_trtllm.logs import current_request_id
from djl_trtllm.request import FinishReason, Guide, GuideKind
from tests.executor.kit import Server, request
from tests.support import models
from tests.support.steps import Delta, deltas_of, step_of


class PushingExecutor(ScriptedExecutor):
    """The scripted executor, iterating by itself on the host's event loop."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.closed = self.cancelled = False
        self.running = False
        self.first: list[FirstRequest] = []

    def first_requests(self) -> list[FirstRequest]:
        return self.first

    async def run(self, step_buffer: StepBuffer) -> None:
        self.running = True
        try:
            while True:
                await asyncio.sleep(0 if self.busy else 0.001)
                for delta in deltas_of(self.step()) if self.busy else ():
                    step_buffer.step.add(delta.request_id, delta.token_ids, delta.logprobs)
                    if delta.finish is not None:
                        step_buffer.step.end(delta.request_id, delta.finish, delta.error)
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    def submit(self, request: Submit) -> None:
        assert self.running, "submitted before it ran"
        super().submit(request)

    def check(self) -> None:
        pass

    async def close(self) -> None:
        assert not self.cancelled
        self.closed = True


class Running:
    """An executor's run in a thread, and how it ended. The thread is a daemon: what hangs does not hold pytest up."""

    def __init__(self, executor: ScriptedExecutor) -> None:
        ours, theirs = socket.socketpair()
        self.server = Server(ours)
        self.error: BaseException | None = None
        self._theirs = theirs
        self._executor = executor
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._theirs:
            try:
                channel = Channel(self._theirs)
                if isinstance(self._executor, PushingExecutor):
                    run_async(channel, self._executor)
                else:
                    run(channel, self._executor, HeldOutput(1, 0.0))
            except Exception as error:
                self.error = error

    def close(self) -> None:
        """The server goes away."""
        self.server.connection.close()

    def ended(self) -> BaseException | None:
        self._thread.join(60)
        assert not self._thread.is_alive(), "the host does not end"
        return self.error


Begin = Callable[..., Running]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """`begin(executor, *messages)`: run it in a thread, and send it messages once it is ready."""
    made: list[Running] = []

    def begin_one(executor: ScriptedExecutor, *messages: ToEngine) -> Running:
        made.append(running := Running(executor))
        if isinstance(executor, PushingExecutor) and not executor.first:
            assert isinstance(running.server.receive(), Ready)
        running.server.send(*messages)
        return running

    yield begin_one
    for host_ in made:
        host_.close()
    for host_ in made:
        host_.ended()


@pytest.fixture(params=[ScriptedExecutor, PushingExecutor])
def executor(request: pytest.FixtureRequest) -> type[ScriptedExecutor]:
    """An executor of each kind that hosts run."""
    kind: type[ScriptedExecutor] = request.param
    return kind


# -- both kinds --------------------------------------------------------------------------------------------------------


def test_every_request_gets_its_tokens_and_one_terminal_delta(begin: Begin, executor: type[ScriptedExecutor]) -> None:
    host_ = begin(executor(), *(request(number, tokens=1 + number % 4) for number in range(20)))
    deltas = host_.server.deltas(ends=20)
    for number in range(20):
        own = [delta for delta in deltas if delta.request_id == number]
        assert [bool(delta.finish) for delta in own] == [False] * (number % 4) + [True]
        assert [token for delta in own for token in delta.token_ids] == [5, 6, 7, 5][: 1 + number % 4]


def test_a_cancel_ends_a_request_late_and_the_others_go_on(begin: Begin, executor: type[ScriptedExecutor]) -> None:
    host_ = begin(executor(steps_per_second=200), request(1, tokens=1 << 30), request(2, tokens=30))
    assert isinstance(host_.server.receive(), Step)
    host_.server.send(Cancel(1))
    ends = {delta.request_id: delta.finish for delta in host_.server.deltas(ends=2) if delta.finish}
    assert ends == {1: FinishReason.CANCELLED, 2: FinishReason.LENGTH}


def test_a_ping_is_answered_when_idle_and_between_steps(begin: Begin, executor: type[ScriptedExecutor]) -> None:
    host_ = begin(executor(steps_per_second=200), Ping())
    assert host_.server.receive() == Pong()
    host_.server.send(request(1, tokens=1 << 30))
    assert isinstance(host_.server.receive(), Step)
    host_.server.send(Ping())
    while host_.server.receive() != Pong():
        pass


@pytest.mark.parametrize("busy", [False, True])
def test_it_ends_when_the_server_closes_its_end(begin: Begin, executor: type[ScriptedExecutor], busy: bool) -> None:
    host_ = begin(executor())
    if busy:
        host_.server.send(request(1, tokens=1 << 30))
        host_.server.receive()
    host_.close()
    assert isinstance(host_.ended(), Disconnected)


def test_shutdown_ends_it_with_requests_unfinished(begin: Begin, executor: type[ScriptedExecutor]) -> None:
    host_ = begin(executor(steps_per_second=100), request(1, tokens=1 << 30))
    host_.server.receive()
    host_.server.send(Shutdown())
    assert host_.ended() is None


def test_a_lost_engine_ends_it_with_the_engines_error(begin: Begin, executor: type[ScriptedExecutor]) -> None:
    engine = executor(faults=[{"action": "raise", "at_token": 0}])
    assert isinstance(begin(engine, request(1)).ended(), RuntimeError)
    assert not getattr(engine, "closed", False), "there is nothing to close"


# -- an engine that iterates by itself ---------------------------------------------------------------------------------


def test_the_engine_runs_before_the_first_request_and_is_closed_and_then_cancelled(begin: Begin) -> None:
    engine = PushingExecutor()
    host_ = begin(engine, request(1, tokens=1), request(2, tokens=1), Cancel(9), Ping())
    while host_.server.receive() != Pong():
        pass
    host_.server.send(Shutdown())
    assert host_.ended() is None
    assert engine.closed and engine.cancelled


def test_the_engine_is_checked_from_a_thread_that_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_CHECK_SECONDS", 0.001)
    threads: list[threading.Thread] = []

    class Lost(PushingExecutor):
        def check(self) -> None:
            threads.append(threading.current_thread())
            if len(threads) == 3:
                raise RuntimeError("a worker is gone")

    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(RuntimeError, match="a worker is gone"):
        run_async(Channel(theirs), Lost())
    assert {(thread.name, thread.daemon) for thread in threads} == {("engine-watch", True)}


def test_an_engine_that_is_lost_while_the_event_loop_waits_for_it_is_reported_all_the_same(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TensorRT-LLM's queues do when their other end is gone."""
    over = threading.Event()
    failed: list[str] = []
    monkeypatch.setattr(host, "_CHECK_SECONDS", 0.001)
    monkeypatch.setattr(host, "_UNWINDING_SECONDS", 0.001)

    class Blocked(PushingExecutor):
        blocked = False

        def submit(self, request: Submit) -> None:
            self.blocked = True
            over.wait(60)

        def check(self) -> None:
            if self.blocked:
                raise RuntimeError("the other end is gone")

    def fail(channel: Channel, error: BaseException) -> None:
        failed.append(str(error))
        over.set()

    monkeypatch.setattr(host, "_fail", fail)
    assert isinstance(begin(Blocked(), request(1)).ended(), RuntimeError)
    assert failed == ["the other end is gone"]


# -- before it is ready ------------------------------------------------------------------------------------------------


def first(kind: str, tokens: int, *features: str) -> FirstRequest:
    return FirstRequest(kind, request(0, tokens), frozenset(features))


@pytest.fixture
def unkind() -> PushingExecutor:
    """An engine that fails requests for 7 tokens."""
    return PushingExecutor(faults=[{"action": "error", "max_new_tokens": 7}])


def test_requests_of_its_own_come_first_and_the_server_sees_none_of_them(
    begin: Begin, unkind: PushingExecutor, capfd: pytest.CaptureFixture[str]
) -> None:
    unkind.first = [first("a plain one", 3), first("a sampled one", 7, "top_p", "top_k"), first("a last one", 1)]
    host_ = begin(unkind)
    ready = host_.server.receive()
    assert isinstance(ready, Ready)
    assert ready.features == FEATURES - {"top_p", "top_k"}
    host_.server.send(request(0, tokens=2))
    assert [token for delta in host_.server.deltas(ends=1) for token in delta.token_ids] == [5, 6]
    plain, sampled, last = capfd.readouterr().out.splitlines()
    assert (plain.partition(" took ")[0], last.partition(" took ")[0]) == tuple(
        f"warming up: {kind}" for kind in ("a plain one", "a last one")
    )
    assert "a sampled one" in sampled and "does without top_k, top_p" in sampled


def test_an_engine_that_fails_a_plain_request_is_not_ready(begin: Begin, unkind: PushingExecutor) -> None:
    unkind.first = [first("a plain one", 7)]
    error = begin(unkind).ended()
    assert "a plain one" in str(error) and "has failed" in str(error)


def test_a_first_request_that_takes_long_is_said_with_what_it_waits_for(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "_WARM_UP_LINE_SECONDS", 0.01)
    compilers = iter([None, "nvcc (process 7)"])
    monkeypatch.setattr(host, "compiler_below", lambda: next(compilers, None))

    class Slow(PushingExecutor):
        def submit(self, request: Submit) -> None:
            asyncio.get_running_loop().call_later(0.2, super().submit, request)

    engine = Slow()
    engine.first = [first("a plain one", 1)]
    assert isinstance(begin(engine).server.receive(), Ready)
    lines = [line.partition(" so far, ")[2] for line in capfd.readouterr().out.splitlines()]
    assert lines[:2] == ["it has no answer yet", "nvcc (process 7) compiles kernels for it"]


@pytest.mark.parametrize("kept", [True, False])
def test_kernels_are_kept_in_the_folder_of_the_start(
    system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    monkeypatch.setattr(os, "environ", {})
    system.main(Start(models.SCRIPTED, {}, kernels=str(tmp_path) if kept else ""))
    assert os.environ.get("TRITON_CACHE_DIR", "").startswith(str(tmp_path)) == bool(os.environ) == kept


# -- iterations --------------------------------------------------------------------------------------------------------


class Script:
    """A channel: each call of `receive` brings what stands next, and the server goes away at the end."""

    def __init__(self, *arrivals: list[ToEngine]) -> None:
        self.sent: list[FromEngine] = []
        self.blocked: list[bool] = []
        self.rest: list[bool] = []
        self._arrivals = list(arrivals)

    def receive(self, *, block: bool, rest: bool = False) -> list[ToEngine]:
        self.blocked.append(block)
        self.rest.append(rest)
        if not self._arrivals:
            raise Disconnected
        return self._arrivals.pop(0)

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)


def follow(script: Script, executor: ScriptedExecutor, stream_interval: int = 1) -> None:
    """Run an executor to the end of a script."""
    with pytest.raises(Disconnected):
        run(script, executor, HeldOutput(stream_interval, 0.0))  # type: ignore[arg-type]


def test_an_idle_engine_process_waits_for_messages_and_a_busy_one_does_not() -> None:
    script = Script([request(1, tokens=2)], [], [], [Ping()])
    follow(script, ScriptedExecutor())
    assert script.blocked == [True, False, True, True, True]
    assert all(script.rest)


def test_a_guide_is_tried_in_the_name_of_its_request() -> None:
    class Trying(ScriptedExecutor):
        def try_guide(self, trial: Try) -> None:
            tried.append((trial.request_id, current_request_id()))

    tried: list[tuple[int, str | None]] = []
    follow(Script([Try(7, Guide(GuideKind.REGEX, "a"), "story-1")]), Trying())
    assert tried == [(7, "story-1")]


def test_iterations_are_sent_with_the_state_after_them() -> None:
    script = Script([request(1, tokens=1), request(2, tokens=2)], [])
    follow(script, ScriptedExecutor(max_sequences=4))
    first = [Delta(1, [5], None, FinishReason.LENGTH), Delta(2, [5])]
    assert script.sent == [
        step_of(first, Stats(running=1, kv_usage=0.25)),
        step_of([Delta(2, [6], None, FinishReason.LENGTH)], Stats(kv_usage=0.0)),
    ]


@pytest.mark.parametrize(
    ("stream_interval", "seconds", "news", "sent"),
    [
        # When, and which tokens; of an iteration that brings none, or whose output is held back, a sign of life.
        (1, 0.25, 0, [(1.25, []), (2.5, [])]),
        (1, 0.75, 1, [(0.75, [5]), (2.25, []), (3.75, [])]),
        (3, 0.0, 9, [(0.0, [5]), (0.0, [6, 7]), (0.0, [5, 6, 7]), (0.0, [5, 6, 7])]),
        (9, 0.75, 9, [(0.75, [5]), (2.25, [6, 7]), (3.75, [5, 6]), (5.25, [7, 5]), (6.75, [6, 7])]),
    ],
)
def test_a_busy_engine_process_sends_something_every_second(
    monkeypatch: pytest.MonkeyPatch,
    stream_interval: int,
    seconds: float,
    news: int,
    sent: list[tuple[float, list[int]]],
) -> None:
    now = [100.0]
    monkeypatch.setattr(host, "time", SimpleNamespace(monotonic=lambda: now[0]))
    found: list[tuple[float, list[int]]] = []
    iterations = 0

    class Timed(ScriptedExecutor):
        def step(self) -> Step:
            nonlocal iterations
            now[0] += seconds
            iterations += 1
            return super().step() if iterations <= news else Step()

    class Noted(Script):
        def send(self, message: FromEngine) -> None:
            assert isinstance(message, Step)
            found.append((now[0] - 100, message.tokens))

    arrivals: list[list[ToEngine]] = [[request(1, tokens=10)], *([] for _ in range(round(9 / (seconds or 1))))]
    follow(Noted(*arrivals[:10]), Timed(), stream_interval)
    assert found[: len(sent)] == sent


def test_nothing_held_back_waits_for_an_iteration_that_reads_a_prompt() -> None:
    script = Script([request(1, tokens=9)], [], [Ping()], [request(2, tokens=9)])
    follow(script, ScriptedExecutor(max_sequences=4), stream_interval=9)
    sent = [deltas_of(message) for message in script.sent if isinstance(message, Step)]
    assert sent == [[Delta(1, [5])], [Delta(1, [6, 7])], [Delta(2, [5])]]


# -- the beginning and the end of the process: what it asks of the system is noted and not done ------------------------


class Ended(BaseException):
    """Instead of the end of the process."""


class System:
    """What a host asks of the system, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[Any, ...]] = []
        ours, self.theirs = socket.socketpair()
        self.server = Server(ours)
        libc = SimpleNamespace(prctl=self._note("prctl"))
        monkeypatch.setattr(signal, "signal", self._note("signal"))
        monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
        monkeypatch.setattr(host, "gc", Mock())
        monkeypatch.setattr(os, "_exit", self._end)
        monkeypatch.setattr(os, "register_at_fork", lambda **hooks: None)  # it would keep the connection
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, getattr(sys, name))  # what the host puts in their place goes again
        # By no other place is it known which socket is the server's.
        monkeypatch.setattr(sys, "argv", ["host", str(os.dup(self.theirs.fileno()))])
        self.theirs.close()

    def _note(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.asked.append((name, *arguments))

    def _end(self, status: int) -> NoReturn:
        self.asked.append(("exit", status))
        raise Ended

    def main(self, *messages: ToEngine, stays: bool = False) -> list[FromEngine]:
        """Run the host on messages that are there already; what it sent. The server goes away then, or stays."""
        self.server.send(*messages)
        if not stays:
            self.server.connection.shutdown(socket.SHUT_WR)
        with pytest.raises(Ended):
            host.main()
        return self.server.rest()


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Iterator[System]:
    made = System(monkeypatch)
    yield made
    made.server.connection.close()


SCRIPTED = Start(models.SCRIPTED, {"max_sequences": 3})


def test_an_engine_process_says_what_it_holds_and_runs_until_it_is_asked_to_end(system: System) -> None:
    ready, pong = system.main(SCRIPTED, Ping(), Shutdown())
    assert isinstance(ready, Ready)
    assert ready.limits.max_sequences == 3
    assert (ready.details, ready.features) == ({}, FEATURES)
    assert pong == Pong()
    assert system.asked[-1] == ("exit", 0)


def test_before_anything_else_signals_are_left_to_the_server_and_the_end_is_tied_to_its(system: System) -> None:
    system.main()
    assert system.asked == [
        ("signal", signal.SIGINT, signal.SIG_IGN),
        ("signal", signal.SIGTERM, signal.SIG_IGN),
        ("prctl", 1, signal.SIGKILL),
        ("exit", 0),
    ]


def test_an_engine_that_cannot_be_loaded_is_reported(system: System, capfd: pytest.CaptureFixture[str]) -> None:
    (failed,) = system.main(Start(models.SCRIPTED, {"start_error": "no such engine"}))
    assert failed == Failed("RuntimeError: no such engine")
    assert system.asked[-1] == ("exit", 1)
    assert "Traceback (most recent call last):" in capfd.readouterr().err


def test_an_engine_that_is_lost_is_reported_after_what_it_brought(system: System) -> None:
    lost = Start(models.SCRIPTED, {"faults": [{"action": "raise", "at_token": 2}]})
    _, *steps, failed = system.main(lost, request(1, tokens=2), request(2, tokens=9), stays=True)
    deltas = [delta for step in steps if isinstance(step, Step) for delta in deltas_of(step)]
    assert [(delta.request_id, delta.token_ids, delta.finish) for delta in deltas] == [
        (1, [5], None),
        (2, [5], None),
        (1, [6], FinishReason.LENGTH),
        (2, [6], None),
    ]
    assert failed == Failed("RuntimeError: scripted engine failure")
    assert system.asked[-1] == ("exit", 1)


def test_an_error_is_reported_with_what_caused_it(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(start: Start) -> NoReturn:
        try:
            try:
                raise OSError("no disk")
            except OSError as error:
                raise ValueError("no weights") from error
        except ValueError as error:
            raise RuntimeError("no engine") from error

    monkeypatch.setattr(host, "create", create)
    (failed,) = system.main(SCRIPTED)
    assert failed == Failed("RuntimeError: no engine (caused by ValueError: no weights (caused by OSError: no disk))")


def test_output_waits_as_the_start_says(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    intervals: list[tuple[int, float]] = []
    monkeypatch.setattr(host, "run", lambda channel, executor, held: None)
    monkeypatch.setattr(host, "HeldOutput", lambda *given: intervals.append(given))
    system.main(Start(models.SCRIPTED, {}, stream_interval=4, send_interval=0.5))
    assert intervals == [(4, 0.5)]
