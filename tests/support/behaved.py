"""A client that behaves, and what it sees: the time of /ping and of the first token, and the server's memory."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import dataclass, field

from tests.support.client import raw_post
from tests.support.crowd import PING
from tests.support.server import Server

STREAM = raw_post(
    json.dumps({"inputs": "the wolf", "parameters": {"max_new_tokens": 4}, "stream": True}).encode(),
    "Connection: close",
)


class Times:
    """Seconds until each answer: those that passed, and CPU time that the server used meanwhile.

    The second is what passes where the server has a core of its own, and does not depend on who else uses the machine.
    """

    def __init__(self) -> None:
        self.passed: list[float] = []
        self.used: list[float] = []


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, in nanoseconds' resolution (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


@dataclass
class Seen:
    """Times of each /ping, with its connection, and of the first token of each stream; largest RSS in bytes."""

    pings: Times = field(default_factory=Times)
    first_tokens: Times = field(default_factory=Times)
    failures: list[bytes] = field(default_factory=list)
    rss: int = 0


def observe(server: Server, seconds: float) -> Seen:
    """Ask for /ping and for short streams, one after the other, for this time."""
    seen = Seen()
    end = time.monotonic() + seconds

    def ping() -> None:
        while time.monotonic() < end:
            _ask(server, PING, b"Healthy", seen.pings, seen.failures)
            time.sleep(0.02)

    def stream() -> None:
        while time.monotonic() < end:
            _ask(server, STREAM, b'"token"', seen.first_tokens, seen.failures)
            time.sleep(0.02)

    threads = [threading.Thread(target=work) for work in (ping, stream)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen.rss = max(seen.rss, server.process.memory_info().rss)
        time.sleep(0.05)
    return seen


def _ask(server: Server, request: bytes, mark: bytes, times: Times, failures: list[bytes]) -> None:
    started, before = time.monotonic(), cpu_seconds(server.process.pid)
    received = b""
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(request)
            while mark not in received and (data := connection.recv(65536)):
                received += data
            if mark in received:
                times.passed.append(time.monotonic() - started)
                times.used.append(cpu_seconds(server.process.pid) - before)
                while request is STREAM and connection.recv(65536):
                    pass
            else:
                failures.append(received[:400])
    except OSError as error:
        failures.append(repr(error).encode())
