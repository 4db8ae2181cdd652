"""What a host does with messages and iterations. Both kinds of engine run in a thread here; one is stepped by hand."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from djl_trtllm.backends.scripted.executor import ScriptedExecutor
from djl_trtllm.executor import process as host
from djl_trtllm.executor.channel import Channel, Disconnected
from djl_trtllm.executor.held_output import HeldOutput
from djl_trtllm.executor.process import create, run, run_async
from djl_trtllm.executor.protocol import (
    Cancel,
    Ping,
    Pong,
    Shutdown,
    Start,
    Step,
    Submit,
    ToEngine,
    frame,
)
from djl_trtllm.executor.step_buffer import StepBuffer
from djl_trtllm.request import FinishReason
from tests.executor.host_server import Server, request
from tests.support import executors


class PushingExecutor(ScriptedExecutor):
    """The scripted executor, iterating by itself on the host's event loop."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.closed = self.cancelled = False
        self.running = False

    async def run(self, step_buffer: StepBuffer) -> None:
        self.running = True
        try:
            while True:
                await asyncio.sleep(0 if self.busy else 0.001)
                for delta in self.step() if self.busy else ():
                    pending = step_buffer.extend(delta.request_id, delta.token_ids, delta.logprobs)
                    pending.finish, pending.error = delta.finish, delta.error
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

    def __init__(self, executor: ScriptedExecutor, *messages: ToEngine) -> None:
        ours, theirs = socket.socketpair()
        self.server = Server(ours)
        self.server.send(*messages)
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
    """`begin(executor, *messages)`: run it in a thread, with messages that have arrived before."""
    made: list[Running] = []

    def begin_one(executor: ScriptedExecutor, *messages: ToEngine) -> Running:
        made.append(Running(executor, *messages))
        return made[-1]

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


def test_cancels_of_unknown_and_finished_requests_do_nothing(begin: Begin, executor: type[ScriptedExecutor]) -> None:
    host_ = begin(executor(), Cancel(9), request(1, tokens=1))
    host_.server.deltas(ends=1)
    host_.server.send(Cancel(1), Cancel(1), request(2, tokens=1))
    assert [delta.request_id for delta in host_.server.deltas(ends=1)] == [2]


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


def test_it_ends_when_the_server_dies_while_a_send_blocks(begin: Begin, executor: type[ScriptedExecutor]) -> None:
    host_ = begin(executor(), request(1, tokens=1 << 30))
    host_.server.connection.shutdown(socket.SHUT_WR)
    host_.close()
    assert isinstance(host_.ended(), Disconnected)


def test_it_ends_when_the_server_reads_no_more(begin: Begin, executor: type[ScriptedExecutor]) -> None:
    host_ = begin(executor())
    host_.server.connection.shutdown(socket.SHUT_RD)
    host_.server.send(request(1, tokens=1 << 30))
    assert isinstance(host_.ended(), Disconnected)


def test_shutdown_ends_it_with_requests_unfinished(begin: Begin, executor: type[ScriptedExecutor]) -> None:
    host_ = begin(executor(steps_per_second=100), request(1, tokens=1 << 30))
    host_.server.receive()
    host_.server.send(Shutdown())
    assert host_.ended() is None


def test_a_lost_engine_ends_it_with_the_engines_error(begin: Begin, executor: type[ScriptedExecutor]) -> None:
    host_ = begin(executor(faults=[{"action": "raise", "at_token": 0}]), request(1))
    assert isinstance(host_.ended(), RuntimeError)


def test_a_slow_server_slows_the_engine(begin: Begin, executor: type[ScriptedExecutor]) -> None:
    host_ = begin(executor())
    host_.server.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host_.server.send(request(1, tokens=5_000))
    deltas = host_.server.deltas(ends=1)
    assert sum(len(delta.token_ids) for delta in deltas) == 5_000


# -- an engine that iterates by itself ---------------------------------------------------------------------------------


def test_the_engine_runs_before_the_first_request_and_is_closed_and_then_cancelled(begin: Begin) -> None:
    engine = PushingExecutor()
    host_ = begin(engine, request(1, tokens=1), request(2, tokens=1), Cancel(9), Ping())
    while host_.server.receive() != Pong():
        pass
    host_.server.send(Shutdown())
    assert host_.ended() is None
    assert engine.closed and engine.cancelled


def test_a_message_that_has_arrived_in_part_holds_nothing_up(begin: Begin) -> None:
    host_ = begin(PushingExecutor(steps_per_second=200), request(1, tokens=1 << 30))
    host_.server.receive()
    ping = frame(Ping())
    host_.server.connection.sendall(ping[:5])
    for _ in range(20):
        assert isinstance(host_.server.receive(), Step)
    host_.server.connection.sendall(ping[5:])
    while host_.server.receive() != Pong():
        pass


def test_an_engine_that_is_lost_is_not_closed(begin: Begin) -> None:
    engine = PushingExecutor(faults=[{"action": "raise", "at_token": 0}])
    host_ = begin(engine, request(1))
    host_.ended()
    assert not engine.closed


def test_what_a_message_raises_ends_the_engine_process(begin: Begin) -> None:
    class Broken(PushingExecutor):
        def submit(self, request: Submit) -> None:
            raise ZeroDivisionError("in submit")

    host_ = begin(Broken(), request(1))
    assert isinstance(host_.ended(), ZeroDivisionError)


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


def test_an_engine_that_is_being_closed_is_checked_no_more(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_CHECK_SECONDS", 0.001)
    failed: list[BaseException] = []
    monkeypatch.setattr(host, "_UNWINDING_SECONDS", 0.0)
    monkeypatch.setattr(host, "_fail", lambda channel, error: failed.append(error))

    class Closing(PushingExecutor):
        closing = False

        def check(self) -> None:
            if self.closing:
                raise RuntimeError("its workers are gone")

        async def close(self) -> None:
            self.closing = True
            await asyncio.sleep(0.1)

    host_ = begin(Closing(), Shutdown())
    assert host_.ended() is None
    assert failed == []


# -- which executor ----------------------------------------------------------------------------------------------------


def test_a_start_names_its_executor_and_options() -> None:
    executor = create(Start(executors.SCRIPTED, {"max_sequences": 3}))
    assert executor.limits.max_sequences == 3


def test_an_executor_that_does_not_exist_is_named() -> None:
    with pytest.raises(ModuleNotFoundError, match="nonesuch"):
        create(Start("djl_trtllm.nonesuch:Nonesuch", {}))
