"""Clients of engine processes: of one that the test plays, in virtual time, and of real ones."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

import psutil
import pytest
import uvloop
from typing_extensions import TypeVarTuple, Unpack

from djl_trtllm.errors import ExecutorDiedError
from djl_trtllm.executor import client as client_module
from djl_trtllm.executor.client import ExecutorClient
from djl_trtllm.executor.protocol import (
    Deframer,
    FromEngine,
    Limits,
    Ready,
    Start,
    Stats,
    Step,
    Submit,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
    frame,
)
from djl_trtllm.request import FinishReason, Sampling
from tests.support import models
from tests.support.processes import PATIENCE
from tests.support.steps import Delta, deltas_of
from tests.support.virtual_time import VirtualLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_FOR_EVER = 1_000_000.0


class HostLoop(VirtualLoop):
    """What is handed to an executor runs at once, and takes `executor_seconds()` of virtual time."""

    def __init__(self) -> None:
        self.executor_seconds: Callable[[], float] = lambda: 0.0
        self.transports: list[asyncio.BaseTransport] = []
        super().__init__()

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: Unpack[Ts]
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        self.call_later(self.executor_seconds(), self._complete, future, func(*args))
        return future

    @staticmethod
    def _complete(future: asyncio.Future[T], result: T) -> None:
        if not future.done():
            future.set_result(result)

    async def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        transport, protocol = await super().create_connection(*args, **kwargs)
        self.transports.append(transport)
        return transport, protocol


def played(
    test: Callable[..., Awaitable[None]], hang_timeout: float = 60.0, *, start: bool = False
) -> Callable[..., None]:
    """A test whose first argument is a `PlayedHost`. It may leave no process, task, or exception that nobody has seen.

    A parameter `hang_timeout` of the test is the client's. With `start` the host is ready when the test begins.
    """

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        gc.freeze()  # so that looking for loose ends is quick
        loop = HostLoop()
        problems: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: problems.append(context))

        async def whole() -> None:
            environment = PlayedEnvironment()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(client_module, "ProcessEnvironment", lambda: environment)
                host = PlayedHost(loop, environment, arguments.get("hang_timeout", hang_timeout))
                patch.setattr(asyncio, "create_subprocess_exec", host.spawn)
                try:
                    if start:
                        await host.start()
                    await asyncio.wait_for(test(host, **arguments), _FOR_EVER)
                    if not loop.transports[-1].is_closing():
                        await host.client.kill()
                    assert loop.transports[-1].is_closing()
                    assert environment.cleared
                finally:
                    host.end()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, left

        try:
            loop.run_until_complete(whole())
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()
            gc.collect()
            gc.unfreeze()
        assert problems == []

    parameters = list(inspect.signature(test).parameters.values())
    run.__signature__ = inspect.Signature(parameters[1:])  # type: ignore[attr-defined]  # as pytest reads it
    return run


started = functools.partial(played, start=True)
started_8_seconds = functools.partial(started, hang_timeout=8.0)
"""With a client that kills its process after 8 seconds of silence."""


class Probe:
    """A client, and everything that it was called back with."""

    def __init__(self, hang_timeout: float = 60.0) -> None:
        self.deltas: list[Delta] = []
        self.stats: list[Stats] = []
        self.steps: list[list[Step]] = []
        """As they were handed on."""
        self.error: Exception | None = None
        """What handing on raises."""
        self.deaths: list[ExecutorDiedError] = []
        self.busy = False
        self._told = asyncio.Event()
        self.client = ExecutorClient(
            on_steps=self._on_steps, on_death=self._on_death, busy=lambda: self.busy, hang_timeout=hang_timeout
        )
        self.client.clock = asyncio.get_running_loop().time  # however busy the machine is

    def _on_steps(self, steps: list[Step]) -> None:
        if self.error is not None:
            raise self.error
        self.steps.append(steps)
        self.deltas += [delta for step in steps for delta in deltas_of(step)]
        self.stats += [step.stats for step in steps]
        self._told.set()

    def _on_death(self, error: ExecutorDiedError) -> None:
        self.deaths.append(error)
        self._told.set()

    async def start(
        self, executor: str = models.SCRIPTED, /, timeout: float = 60.0, reasons: str = "", **options: object
    ) -> None:
        await self.client.start(Start(executor, options, reasons=reasons), timeout)

    def submit(self, request_id: int, tokens: int, prompt: tuple[int, ...] = (5, 6, 7), **fields: Any) -> None:
        """`fields` are those of Sampling and of Submit."""
        sampling = {name: fields.pop(name) for name in Sampling.__struct_fields__ if name in fields}
        self.client.submit(Submit(request_id, list(prompt), Sampling(tokens, **sampling), **fields))

    def of(self, request_id: int) -> list[Delta]:
        """The deltas of a request."""
        return [delta for delta in self.deltas if delta.request_id == request_id]

    def tokens(self, request_id: int) -> list[int]:
        """What a request generated."""
        return [token for delta in self.of(request_id) for token in delta.token_ids]

    def finish(self, request_id: int) -> FinishReason | None:
        """Why a request ended, exactly once and with nothing after; None while it runs."""
        own = self.of(request_id)
        ends = [FinishReason(delta.finish) for delta in own if delta.finish]
        assert len(ends) <= 1
        assert not ends or own[-1].finish
        return ends[0] if ends else None

    async def until(self, condition: Callable[[], bool], timeout: float = PATIENCE) -> None:
        async def wait() -> None:
            while not condition():
                self._told.clear()
                await self._told.wait()

        await asyncio.wait_for(wait(), timeout)

    async def end_of(self, *request_ids: int, timeout: float = PATIENCE) -> list[FinishReason | None]:
        """Wait until the requests have ended."""
        await self.until(lambda: all(self.finish(request_id) for request_id in request_ids), timeout)
        return [self.finish(request_id) for request_id in request_ids]

    async def death(self, timeout: float = PATIENCE) -> str:
        await self.until(lambda: bool(self.deaths), timeout)
        await asyncio.sleep(0.05)
        (error,) = self.deaths
        return str(error)


def has_ended(process: psutil.Process, seconds: float = 60) -> bool:
    """Whether a process ends in time. Nobody may be there to collect it: then it stays as a zombie."""
    for _ in range(round(seconds / 0.01)):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
                continue
        return True
    return False


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def run_checked(body: Callable[[], Awaitable[None]], loop_name: str = "uvloop") -> None:
    """Run a test on the server's event loop, or asyncio's own.

    Afterwards no process, no file descriptor and no task may be left.
    """

    async def checked() -> None:
        loop = asyncio.get_running_loop()
        problems: list[object] = []
        loop.set_exception_handler(lambda _, context: problems.append(context))
        # The loop's own descriptors (signals, wake-ups, /dev/null) come with the first process.
        null, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec("true", stdin=null, stdout=pipe, stderr=null)
        await process.communicate()
        descriptors, tasks, others = psutil.Process().num_fds(), asyncio.all_tasks(), children()
        await body()
        for _ in range(50):
            if psutil.Process().num_fds() <= descriptors and asyncio.all_tasks() == tasks:
                break
            await asyncio.sleep(0.02)
        assert asyncio.all_tasks() == tasks
        assert psutil.Process().num_fds() <= descriptors
        assert children() <= others
        assert problems == []

    if loop_name == "uvloop":
        loop = uvloop.new_event_loop()
        try:
            loop.run_until_complete(asyncio.wait_for(checked(), 240))
        finally:
            loop.close()
    else:
        asyncio.run(asyncio.wait_for(checked(), 240))


PID = 4242
READY = Ready(Limits(7, 0, 32, 100), {"engine": "played"}, frozenset())


async def settled() -> None:
    """Wait until nothing happens any more by itself: only then does virtual time go on."""
    await asyncio.sleep(0.001)


class PlayedProcess:
    """The host's process, as asyncio shows it. It ends when it is killed, unless it is `immortal`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.stdout = asyncio.StreamReader()
        self.pid = PID
        self.returncode: int | None = None
        self.kills = 0
        self.killed_at = 0.0
        self.immortal = False
        self._ended = asyncio.get_running_loop().create_future()
        self._deframer = Deframer()

    async def wait(self) -> int:
        await asyncio.shield(self._ended)
        assert self.returncode is not None
        return self.returncode

    async def communicate(self) -> tuple[bytes, None]:
        output = await self.stdout.read()
        await self.wait()
        return output, None

    def kill(self) -> None:
        self.kills += 1
        self.killed_at = asyncio.get_running_loop().time()
        if not self.immortal:
            self.end(-9)

    def end(self, status: int) -> None:
        """End with a status."""
        if self.returncode is None:
            self.returncode = status
            self._ended.set_result(None)
        self.connection.close()
        self.stdout.feed_eof()

    def say(self, *messages: FromEngine) -> None:
        """Send messages to the client, in one piece."""
        self.connection.sendall(b"".join(map(frame, messages)))

    def print(self, text: str | bytes) -> None:
        """Output of the process."""
        self.stdout.feed_data(text if isinstance(text, bytes) else text.encode())

    def heard(self) -> list[ToEngine]:
        """What the client has sent since the last call."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            while new := self.connection.recv(1 << 16):
                data += new
        return [decode_to_engine(body) for body in self._deframer.feed(data)]


class PlayedEnvironment:
    """Instead of a ProcessEnvironment. `left` are the processes that it finds at the end."""

    def __init__(self) -> None:
        self.variables = {"MARK": "of this host"}
        self.prepared = 0
        self.cleared = 0
        self.left: list[int] = []

    def prepare(self) -> None:
        self.prepared += 1

    def clear(self) -> list[int]:
        self.cleared += 1
        return self.left


class PlayedHost:
    """A client under test, and the host that the test plays."""

    def __init__(self, loop: HostLoop, environment: PlayedEnvironment, hang_timeout: float) -> None:
        self.loop = loop
        self.environment = environment
        self.process: PlayedProcess
        self.command: Sequence[str] = ()
        self.options: dict[str, Any] = {}
        self.first_output = b""
        """What the process has printed before anybody can look."""
        self.spawn_error: OSError | None = None
        self.spawned = asyncio.Event()
        self.spawned.set()
        self.probe = Probe(hang_timeout)
        self.client = self.probe.client

    async def spawn(self, *command: str, **options: Any) -> PlayedProcess:
        """Instead of asyncio.create_subprocess_exec."""
        self.command, self.options = command, options
        (descriptor,) = options["pass_fds"]
        connection = socket.socket(fileno=os.dup(descriptor))
        await self.spawned.wait()
        if self.spawn_error is not None:
            connection.close()
            raise self.spawn_error
        self.process = PlayedProcess(connection)
        self.process.print(self.first_output)
        return self.process

    def end(self) -> None:
        """Close what is open, also where a test has failed."""
        if hasattr(self, "process"):
            self.process.connection.close()

    async def begin(self, timeout: float = 60.0, reasons: str = "", **options: object) -> asyncio.Task[None]:
        """Begin to start it; returns when nothing more happens by itself."""
        starting = asyncio.ensure_future(self.probe.start(timeout=timeout, reasons=reasons, **options))
        await settled()
        return starting

    async def start(self, ready: Ready = READY) -> None:
        """Start it and let it be ready."""
        starting = await self.begin()
        self.process.say(ready)
        await starting
        self.process.heard()


class Server:
    """The other end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._deframer = Deframer()
        self._messages: list[FromEngine] = []
        connection.settimeout(60)

    def send(self, *messages: ToEngine) -> None:
        if messages:  # a host that has nothing to read may have ended
            self.connection.sendall(b"".join(frame(message) for message in messages))

    def receive(self) -> FromEngine:
        while not self._messages:
            data = self.connection.recv(65536)
            assert data, "the host closed its end"
            self._messages += [decode_from_engine(body) for body in self._deframer.feed(data)]
        return self._messages.pop(0)

    def rest(self) -> list[FromEngine]:
        """All that was sent before the host closed its end."""
        while data := self.connection.recv(65536):
            self._messages += [decode_from_engine(body) for body in self._deframer.feed(data)]
        messages, self._messages = self._messages, []
        return messages

    def deltas(self, ends: int) -> list[Delta]:
        """Everything up to the `ends`-th terminal delta."""
        deltas: list[Delta] = []
        while ends:
            message = self.receive()
            if isinstance(message, Step):
                deltas += deltas_of(message)
                ends -= len(message.ends)
        return deltas


def request(request_id: int, tokens: int = 3, origin: str = "") -> Submit:
    return Submit(request_id, [5, 6, 7], Sampling(tokens), origin=origin)
