"""The engine process is killed, as the kernel does when memory runs out."""

from __future__ import annotations

from collections.abc import Iterator

from tests.faults.kind import Case, Kind, Row
from tests.faults.load import repeated, row_of
from tests.faults.strikes import engine_replaced


def run(case: Case) -> Iterator[Row]:
    with case.server() as server:

        def strike() -> None:
            with engine_replaced(server):
                server.host().kill()

        name = f"engine killed, {case.times} times in a row"
        yield row_of(name, case.engine, server, case.streams, repeated(case.times, strike))


KIND = Kind("engine_killed", run, short=("scripted", "openvino"))
