"""The engine process stops (SIGSTOP) and is replaced after option.executor_hang_timeout."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from tests.faults.kind import Case, Kind, Row
from tests.faults.load import repeated, row_of
from tests.faults.strikes import engine_replaced

HANG_SECONDS = 2


def run(case: Case) -> Iterator[Row]:
    with case.server(OPTION_EXECUTOR_HANG_TIMEOUT=str(HANG_SECONDS)) as server:

        def strike() -> None:
            with engine_replaced(server):
                server.host().send_signal(signal.SIGSTOP)

        row = row_of("engine stopped", case.engine, server, case.streams, repeated(min(case.times, 3), strike))
        row.note = row.note or f"option.executor_hang_timeout={HANG_SECONDS}"
        yield row


KIND = Kind("engine_stopped", run)
