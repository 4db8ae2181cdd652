"""The engine raises an error under all requests, and a request that makes every engine process raise."""

from __future__ import annotations

from collections.abc import Iterator

from tests.faults.kind import Case, Kind, Row
from tests.faults.load import Load, repeated, row_of
from tests.faults.strikes import engine_replaced
from tests.support.waiting import wait_until

ONCE, ALWAYS = 77, 78
"""Numbers of tokens: of a request at whose sixth token the engine raises, and of one that no engine survives."""
FAULTS = [
    {"action": "raise", "at_token": 5, "max_new_tokens": ONCE},
    {"action": "raise", "at_token": 0, "max_new_tokens": ALWAYS},
]


def run(case: Case) -> Iterator[Row]:
    with case.server({"faults": FAULTS}) as server:

        def answered() -> bool:
            status = server.generate(ONCE).status_code
            assert status in (200, 503), status
            return status == 200  # refused: the engine process before has not been replaced yet

        def strike() -> None:
            with engine_replaced(server):
                wait_until(answered, what="an answer to the request that makes it raise")

        name = f"engine raising, {case.times} times in a row"
        yield row_of(name, case.engine, server, case.streams, repeated(case.times, strike))
    with case.server({"faults": FAULTS}, SERVING_RETRY_THRESHOLD="2") as server:

        def poison(load: Load) -> None:
            assert server.generate(ALWAYS).status_code == 424
            server.wait_for_ping()

        row = row_of("a request that kills every engine", case.engine, server, case.streams, poison)
        row.allowed = case.streams  # those that ran with it each time
        row.note = "retry_threshold=2: the model goes on; requests that ran with it three times have ended"
        yield row


KIND = Kind("engine_raising", run, engines=("scripted", "tensorrt_llm"))
