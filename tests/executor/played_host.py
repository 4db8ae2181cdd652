"""An engine process that the test plays: its process, its environment and its end of the socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from typing import Any

from djl_trtllm.executor.protocol import Deframer, FromEngine, Limits, Ready, ToEngine, decode_to_engine, frame
from tests.executor.host_loop import HostLoop
from tests.executor.probe import Probe

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
        self.holds_on = False
        """Whether a process of its own keeps its socket and its output open."""
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
        if not self.holds_on:
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
        self.error: OSError | None = None

    def prepare(self) -> None:
        self.prepared += 1
        if self.error is not None:
            raise self.error

    def clear(self) -> list[int]:
        self.cleared += 1
        return self.left


class PlayedHost:
    """A client under test, and the host that the test plays."""

    def __init__(self, loop: HostLoop, environment: PlayedEnvironment, hang_timeout: float) -> None:
        self.loop = loop
        self.environment = environment
        self.process: PlayedProcess
        self.transport: asyncio.WriteTransport
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
        self.transport = self.client._transport
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

    async def begin(self, timeout: float = 60.0, **options: object) -> asyncio.Task[None]:
        """Begin to start it; returns when nothing more happens by itself."""
        starting = asyncio.ensure_future(self.probe.start(timeout=timeout, **options))
        await settled()
        return starting

    async def start(self, ready: Ready = READY) -> None:
        """Start it and let it be ready."""
        starting = await self.begin()
        self.process.say(ready)
        await starting
        self.process.heard()

    async def start_and_end(self, status: int) -> None:
        """Start it; it is ready, and has ended before anybody looks."""
        starting = await self.begin()
        self.process.say(READY)
        self.process.end(status)
        await starting
