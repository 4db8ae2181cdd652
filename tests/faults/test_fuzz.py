"""The short form of `python -m tests.faults.fuzz`: no response is a 500, none is missing, and nothing is left."""

from __future__ import annotations

import asyncio
import os

import pytest

from tests.faults.fuzz import DEFECTS, NOTHING, Client, Grammar, Made, Way, fuzz_requests, paths
from tests.support.client import raw_post

REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "5000"))
POST = raw_post(b"{}")


@pytest.mark.slow
def test_damaged_requests_of_every_dialect_are_answered() -> None:
    outcome = fuzz_requests(REQUESTS)
    print(outcome.statuses, outcome.memory)
    assert outcome.wrong == []
    assert sum(outcome.statuses.values()) == REQUESTS
    assert min(outcome.statuses[status] for status in ("200", "400", "424")) > REQUESTS / 50
    assert min(outcome.statuses[status] for status in ("OK", "INVALID_ARGUMENT", "websocket")) > REQUESTS / 500


def test_every_path_that_takes_a_body_is_a_target() -> None:
    grammar = Grammar(0)
    made = [grammar.request() for _ in range(5_000)]
    assert {*paths()} <= {request.target for request in made} and {request.way for request in made} == set(Way)


@pytest.mark.parametrize(
    ("way", "response", "status"),
    [
        (Way.HTTP, b"HTTP/1.1 500 no\r\nContent-Length: 0\r\n\r\n", "500"),
        (Way.RAW, b"HTTP/1.1 400 no\r\nContent-Length: 0\r\n\r\nHTTP/1.1 500 no\r\n\r\n", "500"),
        (Way.HTTP, b"HTTP/1.1 100 go\r\n\r\nHTTP/1.1 200 ok\r\nContent-Length: 0\r\n\r\n", "200"),
        (Way.RAW, b"", NOTHING),
        (Way.PAIR, b"HTTP/1.1 400 no\r\n\r\n", "0"),
        (Way.PAIR, b'HTTP/1.1 200 ok\r\n\r\n{"generated_text"', "200"),
        (Way.HTTP, b"", None),
        (Way.HTTP, b"what?\r\n\r\n", None),
    ],
)
def test_a_500_and_a_missing_response_are_noticed(way: Way, response: bytes, status: str | None) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(response)
        writer.close()

    async def ask() -> str:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server, Client(server.sockets[0].getsockname()[1], 0) as client:
            return (await client.send(Made(way, "/invocations", POST)))[0]

    assert "500" in DEFECTS
    if status is None:
        with pytest.raises((OSError, ValueError)):
            asyncio.run(ask())
    else:
        assert asyncio.run(ask()) == status
