"""The server is killed, and its supervisor starts another one on the same port."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from tests.faults.kind import Case, Kind, Row
from tests.faults.load import Load, row_of
from tests.support.server import Server
from tests.support.waiting import survivors


def run(case: Case) -> Iterator[Row]:
    lost = 0
    with ExitStack() as stack:
        model, needed = case.model()
        server = stack.enter_context(Server(model, case.environ(**needed), case.folder))
        server.wait_for_ping()

        def cause(load: Load) -> None:
            nonlocal lost
            below = server.descendants()
            server.process.kill()
            server.process.wait()
            assert survivors(below) == [], "an engine process outlived its server"
            second = Server(model, case.environ(**needed), case.folder, port=server.port)
            stack.enter_context(second).wait_for_ping()
            load.server = second
            lost = min(len(load.failed), case.streams + load.unanswered)
            load.wait_for_parts(4 * case.streams)

        row = row_of("server killed", case.engine, server, case.streams, cause)
        row.allowed = lost  # what the first was answering, or had accepted: none once there is a second
        row.lost_pings = 0  # in between there is nobody
        yield row


KIND = Kind("server_killed", run)
