"""Clients that send what is refused, or hardly anything, as fast as they can, beside those that behave."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

from tests.faults.flooding import GRPC, KINDS, flooded
from tests.faults.kind import Case, Kind, Row
from tests.faults.load import Load, row_of
from tests.support.server import Server, free_port

_MORE_MEMORY = 300e6
_CLIENTS = {"idle connections": 1000, "slow senders": 100, "gRPC calls": 10, "gRPC readers": 10}
_MOST_CLIENTS = 20
TOKENS = 40
SECONDS, SHORT_SECONDS = 5.0, 0.3
"""How long a flood goes on; those of the short form share a server."""


def run(case: Case) -> Iterator[Row]:
    grpc_port = free_port()
    environ = {
        "OPTION_MAX_ROLLING_BATCH_SIZE": str(case.streams + _MOST_CLIENTS),
        "SERVING_TRITON_GRPC_PORT": str(grpc_port),
    }
    with ExitStack() as stack:
        for kind in KINDS:
            if not case.short or kind == KINDS[0]:
                stack.close()
                server = stack.enter_context(case.server(None, **environ))
            yield _row(case, server, kind, grpc_port if kind in GRPC else server.port)


def _row(case: Case, server: Server, kind: str, port: int) -> Row:
    seen: list[str] = []

    def cause(load: Load) -> None:
        with flooded(port, kind, _CLIENTS.get(kind, _MOST_CLIENTS)) as count:
            time.sleep(SHORT_SECONDS if case.short else SECONDS)
            load.wait_for_parts(2 * case.streams)
        load.wait_for_parts(2 * case.streams)
        seen.append(", ".join(f"{what}: {number}" for what, number in count.most_common(3)))
        # A flood that nobody answers floods nothing.
        assert count.total() >= 5, count

    row = row_of(f"flood: {kind}", case.engine, server, case.streams, cause, tokens=TOKENS)
    row.memory_allowed = int(row.memory_before + _MORE_MEMORY)
    row.note = row.note or f"{seen[0]}; {(row.memory - row.memory_before) / 1e6:.0f} MB more"
    return row


KIND = Kind("floods", run)
