"""The process that owns an engine: `python -m djl_trtllm.executor.host FD`.

FD is the host's end of a Unix socket pair. The host ends when the other end closes, so it never outlives its server.
"""

from __future__ import annotations

import ctypes
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Protocol

from djl_trtllm.executor.protocol import (
    Cancel,
    Deframer,
    Delta,
    Failed,
    Feature,
    FromHost,
    Limits,
    Ping,
    Pong,
    Ready,
    Start,
    Stats,
    Step,
    Submit,
    ToHost,
    decode_to_host,
    frame,
)

EXECUTORS = {
    "openvino": "djl_trtllm.executor.openvino:OpenVinoExecutor",
    "scripted": "djl_trtllm.executor.scripted:ScriptedExecutor",
}

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_SIGN_OF_LIFE_SECONDS = 1.0
"""A busy host whose iterations bring no token (a long prefill in chunks) sends an empty step this often."""


class Executor(Protocol):
    """An engine with an in-flight batching scheduler. The constructor loads it and takes `Start.options`."""

    limits: Limits
    details: dict[str, Any]
    features: list[Feature]

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""

    def submit(self, request: Submit) -> None:
        """Take in a request; what is wrong with it becomes its terminal delta."""

    def cancel(self, request_id: int) -> None:
        """End a request early; unknown ids are ignored. Its terminal delta comes with a later step."""

    def step(self) -> list[Delta]:
        """Run one iteration. An exception means that the engine is lost."""

    def stats(self) -> Stats:
        """The state after the last iteration."""


class Disconnected(Exception):
    """The server closed its end of the socket."""


class Channel:
    """The host's end of the socket: blocking sends (a slow server slows the engine), messages out of reads."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._deframer = Deframer()

    def send(self, message: FromHost) -> None:
        try:
            self._socket.sendall(frame(message))
        except OSError as error:
            raise Disconnected from error

    def receive(self, *, block: bool) -> Iterator[ToHost]:
        """All messages that have arrived; with `block`, waits for at least some bytes."""
        while select.select([self._socket], [], [], None if block else 0)[0]:
            data = self._socket.recv(1 << 18)
            if not data:
                raise Disconnected
            bodies = self._deframer.feed(data)
            for body in bodies:
                yield decode_to_host(body)
            block = block and not bodies


def create(start: Start) -> Executor:
    """Load the executor that `start` names."""
    module, _, name = EXECUTORS[start.executor].partition(":")
    executor: Executor = getattr(import_module(module), name)(**start.options)
    return executor


def run(channel: Channel, executor: Executor) -> None:
    """Take in messages, run one iteration, send what it brought; block only when there is nothing to run."""
    last_sent = time.monotonic()
    while True:
        for message in channel.receive(block=not executor.busy):
            match message:
                case Submit():
                    executor.submit(message)
                case Cancel():
                    executor.cancel(message.request_id)
                case Ping():
                    channel.send(Pong())
                case _:
                    return
        if executor.busy:
            deltas = executor.step()
            now = time.monotonic()
            if deltas or now - last_sent > _SIGN_OF_LIFE_SECONDS:
                channel.send(Step(deltas, executor.stats()))
                last_sent = now


def _end_with_parent() -> None:
    """A host that hangs does not see its socket close: on Linux the kernel ends it with the server."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    """Run the host until the server is gone (0) or the engine is lost (1)."""
    # Ctrl-C in a terminal reaches the whole process group; when to end is the server's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with_parent()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        start = next(channel.receive(block=True))
        assert isinstance(start, Start), f"expected Start, got {start!r}"
        try:
            executor = create(start)
            channel.send(Ready(executor.limits, executor.details, executor.features))
            run(channel, executor)
        except Disconnected:
            raise
        except Exception as error:
            channel.send(Failed(f"{type(error).__name__}: {error}"))
            raise
    except Disconnected:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
