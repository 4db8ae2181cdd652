"""The store of the model cannot be reached: while the server runs, and when another one starts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

from tests.faults.kind import Case, Kind, Row
from tests.faults.load import Load, row_of
from tests.faults.strikes import engine_replaced
from tests.support.models import TINY_STORIES
from tests.support.s3_server import Store, s3_server, variables
from tests.support.server import Server

ADDRESS = "s3://models/story"


def run(case: Case) -> Iterator[Row]:
    where = case.folder / "store"
    where.mkdir()
    store = Store(where)
    for path in TINY_STORIES.rglob("*"):
        if path.is_file():
            store.put(f"story/{path.relative_to(TINY_STORIES)}", path)
    with ExitStack() as stack:
        bucket = stack.enter_context(ExitStack())
        environ = case.environ(**variables(bucket.enter_context(s3_server(store))))
        server = stack.enter_context(Server(ADDRESS, environ, case.folder))
        server.wait_for_ping()
        bucket.close()

        def cause(load: Load) -> None:
            with engine_replaced(server):
                server.host().kill()
            load.wait_for_parts(4 * case.streams)

        yield row_of("S3 gone, engine killed", case.engine, server, case.streams, cause)
    began = time.monotonic()
    with Server(ADDRESS, environ, case.folder) as late:
        status = late.wait(600)
        said = next((line for line in reversed(late.log) if "s3" in line.lower()), "")
    seconds = time.monotonic() - began
    note = f"it ends with status {status}: {said.strip()[-120:]}"
    yield Row("S3 gone, server started", case.engine, recovered=seconds, failed=int(status == 0), note=note)


KIND = Kind("s3_gone", run, engines=("openvino",), short=("openvino",))
