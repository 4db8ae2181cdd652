"""The short form of `python -m tests.faults.fuzz`: no response is a 500, none is missing, and nothing is left."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from djl_trtllm.api.registry import DIALECTS
from tests.faults.fuzz import archives
from tests.faults.fuzz.clients import NOTHING, Client
from tests.faults.fuzz.grammar import Grammar, Made, Way, targets
from tests.faults.fuzz.sending import DEFECTS, fuzz_requests
from tests.support.client import raw_post

REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "100000"))
ARCHIVES = int(os.environ.get("FUZZ_ARCHIVES", "200"))
POST = raw_post(b"{}")


@pytest.mark.slow
def test_hostile_archives_are_extracted_or_refused() -> None:
    assert archives.fuzz_archives(ARCHIVES) == []


@pytest.mark.parametrize(("path", "link", "noticed"), [("x", False, True), ("m/x", True, True), ("m/x", False, False)])
def test_a_file_elsewhere_and_a_link_are_noticed(
    path: str, link: bool, noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trusting(_: Path, into: Path) -> None:
        made = into.parent / path.replace("m/", f"{into.name}/")
        made.parent.mkdir(parents=True, exist_ok=True)
        made.symlink_to("/etc") if link else made.write_text("")

    monkeypatch.setattr(archives, "extract", trusting)
    assert bool(archives.fuzz_archives(1)) == noticed


@pytest.mark.slow
def test_damaged_requests_of_every_dialect_are_answered() -> None:
    outcome = fuzz_requests(REQUESTS)
    print(outcome.statuses, outcome.memory)
    assert outcome.wrong == []
    assert sum(outcome.statuses.values()) == REQUESTS
    assert min(outcome.statuses[status] for status in ("200", "400", "424")) > REQUESTS / 50
    assert min(outcome.statuses[status] for status in ("OK", "INVALID_ARGUMENT", "websocket")) > REQUESTS / 500


def test_every_path_that_takes_a_body_is_a_target() -> None:
    found = {target.path for dialect in targets() for target in dialect}
    assert len(found) == len({path for dialect in DIALECTS for path in (*dialect.paths, *dialect.actions)})
    assert {"/invocations", "/v1/chat/completions", "/generate", "/v2/models/scripted/infer", "/tokenize"} <= found


def test_the_requests_follow_from_the_seed() -> None:
    first, second, other = (Grammar(seed) for seed in (1, 1, 2))
    made = [first.request() for _ in range(300)]
    assert made == [second.request() for _ in range(300)]
    assert made != [other.request() for _ in range(300)]
    assert {request.way for request in made} == set(Way)


@pytest.mark.parametrize(
    ("way", "response", "status"),
    [
        (Way.HTTP, b"HTTP/1.1 500 no\r\nContent-Length: 0\r\n\r\n", "500"),
        (Way.RAW, b"HTTP/1.1 400 no\r\nContent-Length: 0\r\n\r\nHTTP/1.1 500 no\r\n\r\n", "500"),
        (Way.HTTP, b"HTTP/1.1 100 go\r\n\r\nHTTP/1.1 200 ok\r\nContent-Length: 0\r\n\r\n", "200"),
        (Way.RAW, b"", NOTHING),
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
