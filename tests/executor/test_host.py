from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from djl_trtllm.executor import host
from djl_trtllm.executor.channel import Channel, Disconnected
from djl_trtllm.executor.host import create, run, run_async
from djl_trtllm.executor.outbox import Outbox
from djl_trtllm.executor.protocol import (
    Cancel,
    Deframer,
    Delta,
    Failed,
    Finish,
    FromHost,
    Ping,
    Pong,
    Ready,
    Sampling,
    Shutdown,
    Start,
    Step,
    Submit,
    ToHost,
    decode_from_host,
    frame,
)
from djl_trtllm.executor.scripted import ScriptedExecutor


class Server:
    """The other end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._deframer = Deframer()
        self._messages: list[FromHost] = []
        connection.settimeout(20)

    def send(self, *messages: ToHost) -> None:
        self.connection.sendall(b"".join(frame(message) for message in messages))

    def receive(self) -> FromHost:
        while not self._messages:
            data = self.connection.recv(65536)
            assert data, "the host closed its end"
            self._messages += [decode_from_host(body) for body in self._deframer.feed(data)]
        return self._messages.pop(0)

    def deltas(self, ends: int) -> list[Delta]:
        """Everything up to the `ends`-th terminal delta."""
        deltas: list[Delta] = []
        while ends:
            message = self.receive()
            if isinstance(message, Step):
                deltas += message.deltas
                ends -= sum(bool(delta.finish) for delta in message.deltas)
        return deltas


class PushingExecutor(ScriptedExecutor):
    """The scripted executor, iterating by itself on the host's event loop."""

    async def run(self, outbox: Outbox) -> None:
        while True:
            await asyncio.sleep(0 if self.busy else 0.001)
            for delta in self.step() if self.busy else ():
                pending = outbox.extend(delta.request_id, delta.token_ids, delta.logprobs)
                pending.finish, pending.error = delta.finish, delta.error

    def check(self) -> None:
        pass

    async def close(self) -> None:
        self.closed = True


@pytest.fixture(params=[ScriptedExecutor, PushingExecutor])
def executor(request: pytest.FixtureRequest) -> type[ScriptedExecutor]:
    """An executor of each kind that hosts run."""
    kind: type[ScriptedExecutor] = request.param
    return kind


class Running:
    """An executor's run in a thread, and how it ended."""

    def __init__(self, executor: host.AnyExecutor) -> None:
        ours, theirs = socket.socketpair()
        self.server = Server(ours)
        self.error: BaseException | None = None
        self._theirs = theirs
        self._executor = executor
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._theirs:
            try:
                runner = run_async if isinstance(self._executor, PushingExecutor) else run
                runner(Channel(self._theirs), self._executor)
            except Exception as error:
                self.error = error

    def ended(self) -> BaseException | None:
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.error


@contextmanager
def running(executor: type[ScriptedExecutor], **script: object) -> Iterator[Running]:
    host_ = Running(executor(**script))
    try:
        yield host_
    finally:
        host_.server.connection.close()
        host_.ended()


def request(request_id: int, tokens: int = 3) -> Submit:
    return Submit(request_id, [5, 6, 7], Sampling(tokens))


def test_every_request_gets_its_tokens_and_one_terminal_delta(executor: type[ScriptedExecutor]) -> None:
    with running(executor) as host_:
        host_.server.send(*(request(number, tokens=1 + number % 4) for number in range(20)))
        deltas = host_.server.deltas(ends=20)
        for number in range(20):
            own = [delta for delta in deltas if delta.request_id == number]
            assert [bool(delta.finish) for delta in own] == [False] * (number % 4) + [True]
            assert [token for delta in own for token in delta.token_ids] == [5, 6, 7, 5][: 1 + number % 4]


def test_a_cancel_ends_a_request_late_and_the_others_go_on(executor: type[ScriptedExecutor]) -> None:
    with running(executor, steps_per_second=200) as host_:
        host_.server.send(request(1, tokens=10_000), request(2, tokens=30))
        assert isinstance(host_.server.receive(), Step)
        host_.server.send(Cancel(1))
        ends = {delta.request_id: delta.finish for delta in host_.server.deltas(ends=2) if delta.finish}
        assert ends == {1: Finish.CANCELLED, 2: Finish.LENGTH}


def test_cancels_of_unknown_and_finished_requests_do_nothing(executor: type[ScriptedExecutor]) -> None:
    with running(executor) as host_:
        host_.server.send(Cancel(9), request(1, tokens=1))
        host_.server.deltas(ends=1)
        host_.server.send(Cancel(1), Cancel(1), request(2, tokens=1))
        assert [delta.request_id for delta in host_.server.deltas(ends=1)] == [2]


def test_a_ping_is_answered_when_idle_and_between_steps(executor: type[ScriptedExecutor]) -> None:
    with running(executor, steps_per_second=200) as host_:
        host_.server.send(Ping())
        assert host_.server.receive() == Pong()
        host_.server.send(request(1, tokens=10_000))
        assert isinstance(host_.server.receive(), Step)
        host_.server.send(Ping())
        for _ in range(50):
            if host_.server.receive() == Pong():
                return
        raise AssertionError("no pong within 50 steps")


class Prefilling(ScriptedExecutor):
    """Busy for some iterations that bring nothing."""

    silent = 3

    def step(self) -> list[Delta]:
        if self.silent:
            self.silent -= 1
            return []
        return super().step()


def test_iterations_without_news_send_a_sign_of_life_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_SIGN_OF_LIFE_SECONDS", -1.0)
    host_ = Running(Prefilling())
    host_.server.send(request(1, tokens=1))
    steps = [host_.server.receive() for _ in range(4)]
    assert [len(step.deltas) for step in steps if isinstance(step, Step)] == [0, 0, 0, 1]
    host_.server.connection.close()
    host_.ended()


@pytest.mark.parametrize("busy", [False, True])
def test_it_ends_when_the_server_closes_its_end(executor: type[ScriptedExecutor], busy: bool) -> None:
    host_ = Running(executor())
    if busy:
        host_.server.send(request(1, tokens=1 << 30))
        host_.server.receive()
    host_.server.connection.close()
    assert isinstance(host_.ended(), Disconnected)


def test_it_ends_when_the_server_dies_while_a_send_blocks(executor: type[ScriptedExecutor]) -> None:
    host_ = Running(executor())
    host_.server.send(request(1, tokens=1 << 30))
    host_.server.connection.shutdown(socket.SHUT_WR)
    host_.server.connection.close()
    assert isinstance(host_.ended(), Disconnected)


def test_shutdown_ends_it_with_requests_unfinished(executor: type[ScriptedExecutor]) -> None:
    host_ = Running(executor(steps_per_second=100))
    host_.server.send(request(1, tokens=1 << 30))
    host_.server.receive()
    host_.server.send(Shutdown())
    assert host_.ended() is None
    host_.server.connection.close()


def test_a_lost_engine_ends_it_with_the_engines_error(executor: type[ScriptedExecutor]) -> None:
    host_ = Running(executor(faults=[{"action": "raise", "at_token": 0}]))
    host_.server.send(request(1))
    assert isinstance(host_.ended(), RuntimeError)
    host_.server.connection.close()


def test_a_slow_server_slows_the_engine(executor: type[ScriptedExecutor]) -> None:
    with running(executor) as host_:
        host_.server.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host_.server.send(request(1, tokens=5_000))
        deltas = host_.server.deltas(ends=1)
        assert sum(len(delta.token_ids) for delta in deltas) == 5_000


def test_a_start_names_its_executor_and_options() -> None:
    executor = create(Start("scripted", {"max_sequences": 3}))
    assert executor.limits.max_sequences == 3


def test_an_engine_that_is_lost_while_the_event_loop_waits_for_it_is_told_all_the_same() -> None:
    ours, theirs = socket.socketpair()
    program = Path(__file__).with_name("blocked_host.py")
    process = subprocess.Popen([sys.executable, str(program), str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    server = Server(ours)
    try:
        server.send(Start("blocked", {}))
        assert isinstance(server.receive(), Ready)
        server.send(request(1))
        assert server.receive() == Failed("RuntimeError: the other end is gone")
        assert process.wait(10) == 1
    finally:
        process.kill()
        process.wait()
        ours.close()
