"""The server cannot get memory any more (RLIMIT_AS), and clients send it large bodies."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from tests.faults.flooding import flooded
from tests.faults.kind import Case, Kind, Row
from tests.faults.load import Load, row_of
from tests.support.waiting import wait_until

_SPARE = 16 * 2**20
_CLIENTS = 20
"""Their bodies have 5 MB each."""


def run(case: Case) -> Iterator[Row]:
    places = {"OPTION_MAX_ROLLING_BATCH_SIZE": str(case.streams + _CLIENTS)}
    with case.server(None, **places) as server:
        status: list[str] = []

        def cause(load: Load) -> None:
            limit = server.process.memory_info().vms + _SPARE
            resource.prlimit(server.process.pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
            with flooded(server.port, "bodies", _CLIENTS) as count:
                wait_until(lambda: server.says("MemoryError"), what="a server without memory")
                load.wait_for_parts(4 * case.streams)
            # The limit stays: what the large bodies took is free again.
            load.wait_for_parts(4 * case.streams)
            status.append(f"of the large bodies {count['500']} were answered with 500")

        row = row_of("server out of memory", case.engine, server, case.streams, cause)
        row.note = row.note or status[0]
        yield row


KIND = Kind("server_out_of_memory", run)
