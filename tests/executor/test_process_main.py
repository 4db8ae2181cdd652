"""How a host begins and ends its process. What it asks of the system is written down here and not done."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from djl_trtllm.backends.scripted.executor import FEATURES
from djl_trtllm.executor import process as host
from djl_trtllm.executor.channel import Channel
from djl_trtllm.executor.protocol import Failed, FromEngine, Ping, Pong, Ready, Shutdown, Start, Step, ToEngine
from djl_trtllm.request import FinishReason
from tests.executor.host_server import Server, request
from tests.support import executors


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
        monkeypatch.setattr(
            host,
            "gc",
            SimpleNamespace(
                collect=self._note("collect"), freeze=self._note("freeze"), set_threshold=self._note("threshold")
            ),
        )
        monkeypatch.setattr(host, "mark_output", self._note("mark"))
        monkeypatch.setattr(os, "_exit", self._end)
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


SCRIPTED = Start(executors.SCRIPTED, {"max_sequences": 3})


def test_an_engine_process_says_what_it_holds_and_runs_until_it_is_asked_to_end(system: System) -> None:
    ready, pong = system.main(SCRIPTED, Ping(), Shutdown())
    assert isinstance(ready, Ready)
    assert ready.limits.max_sequences == 3
    assert (ready.details, ready.features) == ({}, FEATURES)
    assert pong == Pong()
    assert system.asked[-1] == ("exit", 0)


def test_an_engine_process_waits_for_its_first_message(system: System) -> None:
    late = threading.Timer(0.05, system.server.send, [SCRIPTED, Shutdown()])
    late.start()
    (ready,) = system.main(stays=True)
    late.join()
    assert isinstance(ready, Ready)


def test_an_engine_process_whose_server_is_gone_ends_in_peace(
    system: System, capfd: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(system.main(SCRIPTED)[0], Ready)
    assert system.asked[-1] == ("exit", 0)
    assert capfd.readouterr() == ("", "")


def test_before_anything_else_signals_are_left_to_the_server_and_the_end_is_tied_to_its(system: System) -> None:
    system.main()
    assert system.asked == [
        ("signal", signal.SIGINT, signal.SIG_IGN),
        ("signal", signal.SIGTERM, signal.SIG_IGN),
        ("prctl", 1, signal.SIGKILL),
        ("mark",),
        ("exit", 0),
    ]


def test_elsewhere_than_on_linux_the_end_is_not_tied(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    system.main()
    assert "prctl" not in {name for name, *_ in system.asked}


def test_what_was_loaded_is_not_looked_at_again_by_the_garbage_collector(system: System) -> None:
    system.main(SCRIPTED)
    assert system.asked[4:-1] == [("threshold", 50_000, 20, 50), ("collect",), ("freeze",)]


def test_an_engine_that_cannot_be_loaded_is_reported(system: System, capfd: pytest.CaptureFixture[str]) -> None:
    (failed,) = system.main(Start(executors.SCRIPTED, {"start_error": "no such engine"}))
    assert failed == Failed("RuntimeError: no such engine")
    assert system.asked[-1] == ("exit", 1)
    assert "Traceback (most recent call last):" in capfd.readouterr().err


def test_an_engine_that_is_lost_is_reported_after_what_it_brought(system: System) -> None:
    lost = Start(executors.SCRIPTED, {"faults": [{"action": "raise", "at_token": 2}]})
    _, *steps, failed = system.main(lost, request(1, tokens=2), request(2, tokens=9), stays=True)
    deltas = [delta for step in steps if isinstance(step, Step) for delta in step.deltas]
    assert [(delta.request_id, delta.token_ids, delta.finish) for delta in deltas] == [
        (1, [5], None),
        (2, [5], None),
        (1, [6], FinishReason.LENGTH),
        (2, [6], None),
    ]
    assert failed == Failed("RuntimeError: scripted engine failure")
    assert system.asked[-1] == ("exit", 1)


def test_a_first_message_that_is_no_start_is_an_error(system: System) -> None:
    (failed,) = system.main(Ping())
    assert isinstance(failed, Failed)
    assert "expected Start, got Ping()" in failed.message


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


def test_nothing_that_was_printed_is_lost_at_the_end(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, SimpleNamespace(flush=lambda name=name: flushed.append(name)))
    system.main(SCRIPTED)
    assert sorted(flushed) == ["stderr", "stdout"]


# -- the watch over an engine that iterates by itself ------------------------------------------------------------------


class Watched:
    """An engine that is checked, and the event loop that it may hold up."""

    def __init__(self, *checks: Exception | None) -> None:
        self.checks = list(checks)
        self.called: list[tuple[Any, ...]] = []
        self.loop_is_closed = False

    def check(self) -> None:
        error = self.checks.pop(0)
        if error is not None:
            raise error

    def call_soon_threadsafe(self, *call: Any) -> None:
        if self.loop_is_closed:
            raise RuntimeError("Event loop is closed")
        self.called.append(call)


class Over:
    """The event that ends the watch: when it was waited for, and whether it had come."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)
        self.waits: list[float] = []

    def wait(self, timeout: float) -> bool:
        self.waits.append(timeout)
        return self.answers.pop(0)


def end(error: Exception | None) -> None:
    raise AssertionError


def watch(watched: Watched, over: Over) -> list[BaseException]:
    """Watch to the end; the errors for which the process was ended from the outside."""
    failed: list[BaseException] = []

    def fail(channel: Channel, error: Exception) -> None:
        failed.append(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "_fail", fail)
        host._watch(
            cast(Channel, None),
            cast(host.AsyncExecutor, watched),
            cast(asyncio.AbstractEventLoop, watched),
            end,
            cast(threading.Event, over),
        )
    return failed


def test_the_engine_is_checked_twice_a_second_until_it_is_over() -> None:
    watched, over = Watched(None, None), Over(False, False, True)
    assert watch(watched, over) == []
    assert (watched.checks, watched.called, over.waits) == ([], [], [0.5, 0.5, 0.5])


def test_a_lost_engine_is_reported_to_the_event_loop_which_has_a_second_to_end() -> None:
    error = RuntimeError("lost")
    watched, over = Watched(error), Over(False, True)
    assert watch(watched, over) == []
    assert (watched.called, over.waits) == ([(end, error)], [0.5, 1.0])


@pytest.mark.parametrize("closed", [False, True])
def test_an_event_loop_that_does_not_react_is_left_where_it_hangs(closed: bool) -> None:
    error = RuntimeError("lost")
    watched, over = Watched(error), Over(False, False)
    watched.loop_is_closed = closed
    assert watch(watched, over) == [error]


def test_output_waits_as_the_start_says(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    intervals: list[tuple[int, float]] = []
    monkeypatch.setattr(host, "run", lambda channel, executor, held: None)
    monkeypatch.setattr(host, "HeldOutput", lambda *given: intervals.append(given))
    system.main(Start(executors.SCRIPTED, {}, stream_interval=4, send_interval=0.5))
    assert intervals == [(4, 0.5)]
