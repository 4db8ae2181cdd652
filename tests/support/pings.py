"""Asks for /ping in a process of its own: one that sends floods or reads streams would ask, and see the answer, late.

    python tests/support/pings.py PORT

A line of standard input is the id of the process that is the server from then on; the end of it ends this process,
which prints `passed` and `used`, the times of the answers (`tests.support.hostile.Times`), and how many were `lost`.
It imports nothing that takes long.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import time

_PAUSE_SECONDS = 0.02
_PATIENCE = 60.0
_REQUEST = b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, in nanoseconds' resolution (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


def _used(pid: int) -> float:
    """The processor time of a process; 0 of one that has ended."""
    with contextlib.suppress(OSError):
        return cpu_seconds(pid)
    return 0.0


def _answered(port: int) -> bool:
    """Whether the answer is another one than 500, which says that the model has failed. Raises OSError for none."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE) as connection:
        connection.sendall(_REQUEST)
        while more := connection.recv(65536):
            answer += more
    if b"\r\n\r\n" not in answer:
        raise ConnectionError(f"no response: {answer!r}")
    return answer.split()[1] != b"500"


def main() -> None:
    """Ask until the end of standard input."""
    port, pid, lost = int(sys.argv[1]), 0, 0
    passed: list[float] = []
    used: list[float] = []
    while True:
        if pid == 0 or select.select([0], [], [], _PAUSE_SECONDS)[0]:
            if not (lines := os.read(0, 4096).split()):
                break
            pid = int(lines[-1])
        began, before = time.monotonic(), _used(pid)
        try:
            lost += not _answered(port)
        except OSError:
            lost += 1
        else:
            passed.append(time.monotonic() - began)
            used.append(_used(pid) - before)
    print(json.dumps({"passed": passed, "used": used, "lost": lost}))


if __name__ == "__main__":
    main()
