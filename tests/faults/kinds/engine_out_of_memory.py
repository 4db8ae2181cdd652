"""The engine process cannot get memory any more (RLIMIT_AS), and long prompts want some."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

import psutil

from tests.faults.kind import Case, Kind, Row
from tests.faults.load import Load, row_of
from tests.faults.strikes import engine_replaced
from tests.support.prompts import story
from tests.support.server import Server

_SPARE = 4 * 2**20
_TRIES = 20


def run(case: Case) -> Iterator[Row]:
    with case.server() as server:
        ends: list[str] = []

        def cause(load: Load) -> None:
            with engine_replaced(server):
                host = server.host()
                limit = host.memory_info().vms + _SPARE
                resource.prlimit(host.pid, resource.RLIMIT_AS, (limit, limit))
                ends.append(_end_by_memory(server, host))
            load.wait_for_parts(4 * case.streams)

        row = row_of("engine out of memory", case.engine, server, case.streams, cause)
        row.note = row.note or ends[0]
        yield row


def _end_by_memory(server: Server, host: psutil.Process) -> str:
    """Send long prompts until the process has ended; where none ends it, kill it as the kernel would. Which it was."""
    for number in range(_TRIES):
        server.post(story(30, number), max_new_tokens=1)
        if not host.is_running() or host.status() == psutil.STATUS_ZOMBIE:
            said = next((line for line in server.log if f"(pid {host.pid}) is gone" in line), "")
            return f"its own end: {said.partition('is gone: ')[2][:150]}"
        time.sleep(0.05)
    host.kill()
    return "no prompt ended it, so it was killed"


KIND = Kind("engine_out_of_memory", run, engines=("openvino", "scripted"))
