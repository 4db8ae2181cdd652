"""SIGTERM in each state of the model: what runs is finished, and the server ends with status 0."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tests.faults.kind import Case, Kind, Row
from tests.faults.load import Load, row_of
from tests.support.server import Server
from tests.support.waiting import wait_until

SHUTDOWN = {"SERVING_SHUTDOWN_TIMEOUT": "60"}


def run(case: Case) -> Iterator[Row]:
    yield _loading(case)
    yield _idle(case)
    for state in ("under streams", "recovering", "draining"):
        with case.server(**SHUTDOWN) as server:
            sent: list[float] = []

            def cause(load: Load, state: str = state, server: Server = server, sent: list[float] = sent) -> None:
                if state == "recovering":
                    server.host().kill()
                    wait_until(lambda: server.ping() == 503, what="a server that recovers")
                sent.append(time.monotonic())
                server.terminate()
                if state == "draining":
                    wait_until(lambda: server.ping() != 200, what="a server that drains")
                    server.terminate()

            row = row_of(f"SIGTERM {state}", case.engine, server, case.streams, cause, once=True)
            yield _ended(row, server, sent[0])


def _loading(case: Case) -> Row:
    model, needed = case.model({"start_seconds": 60} if case.engine != "openvino" else None)
    with Server(model, case.environ(**needed, **SHUTDOWN), case.folder) as server:
        wait_until(lambda: server.ping() == 503, what="a server that loads")
        began = time.monotonic()
        server.terminate()
        return _ended(Row("SIGTERM loading", case.engine), server, began)


def _idle(case: Case) -> Row:
    with case.server(**SHUTDOWN) as server:
        began = time.monotonic()
        server.terminate()
        return _ended(Row("SIGTERM idle", case.engine), server, began)


def _ended(row: Row, server: Server, began: float) -> Row:
    status = server.wait()
    row.recovered = time.monotonic() - began
    row.failed += int(status != 0)
    row.lost_pings = 0  # it has ended
    row.note = row.note or f"seconds to its end, with status {status}"
    return row


KIND = Kind("sigterm", run)
