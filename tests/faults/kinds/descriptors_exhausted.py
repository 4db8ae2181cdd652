"""A server that may open 1,024 files, more idle clients than that, and the engine process is killed."""

from __future__ import annotations

from collections.abc import Iterator

from tests.faults.flooding import flooded
from tests.faults.kind import Case, Kind, Row
from tests.faults.load import Load, repeated, row_of
from tests.faults.strikes import engine_replaced
from tests.support.server import Server

FILES, CLIENTS = 1024, 1100
_PROGRAM = (
    "-c",
    f"from resource import *; from djl_trtllm.cli import main; setrlimit(RLIMIT_NOFILE, ({FILES}, {FILES})); main()",
)


def run(case: Case) -> Iterator[Row]:
    model, needed = case.model()
    with Server(model, case.environ(**needed), case.folder, _PROGRAM) as server:
        server.wait_for_ping()

        def strike() -> None:
            with engine_replaced(server):
                server.host().kill()

        def cause(load: Load) -> None:
            with flooded(server.port, "idle connections", CLIENTS):
                repeated(min(case.times, 3), strike)(load)

        name = "descriptors exhausted, engine killed"
        yield row_of(name, case.engine, server, case.streams, cause)


KIND = Kind("descriptors_exhausted", run)
