"""Reading the body of an object into a buffer: what arrives, what breaks, and which connections are used again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import pytest
from botocore.response import StreamingBody
from urllib3 import HTTPConnectionPool
from urllib3.connection import HTTPConnection

from djl_trtllm.model.remote.s3_body import Body
from tests.support.s3_server import Request, Store

CONTENT = bytes(range(256)) * 2000
BUFFER = 200_000


@pytest.fixture
def pool(s3: tuple[Store, str], store: Store) -> Iterator[HTTPConnectionPool]:
    """Connections to a store with one object."""
    store.put("object", CONTENT)
    address = urlsplit(s3[1])
    with closing(HTTPConnectionPool(str(address.hostname), address.port)) as pool:
        yield pool


def get(pool: HTTPConnectionPool, seconds: float = 30) -> Body:
    answer = pool.request(
        "GET", "/models/object", preload_content=False, decode_content=False, retries=False, timeout=seconds
    )
    return Body(StreamingBody(answer, answer.headers["Content-Length"]))


def read(body: Body) -> list[bytes]:
    buffer = memoryview(bytearray(BUFFER))
    chunks: list[bytes] = []
    while count := body.readinto(buffer):
        chunks.append(bytes(buffer[:count]))
    return chunks


def test_reads_fill_the_buffer_and_the_last_one_has_the_rest(pool: HTTPConnectionPool) -> None:
    with get(pool) as body:
        chunks = read(body)
    assert b"".join(chunks) == CONTENT
    assert [len(chunk) for chunk in chunks] == [BUFFER, BUFFER, len(CONTENT) - 2 * BUFFER]


def test_a_connection_whose_body_was_read_is_used_again(
    pool: HTTPConnectionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected: list[str] = []

    class Connection(HTTPConnection):
        def connect(self) -> None:
            connected.append(self.host)
            super().connect()

    monkeypatch.setattr(pool, "ConnectionCls", Connection)
    for _ in range(3):
        with get(pool) as body:
            read(body)
    assert len(connected) == 1


def test_a_connection_with_a_rest_of_a_body_is_not_used_again(store: Store, pool: HTTPConnectionPool) -> None:
    store.bytes_per_second = 1_000_000
    sent_at_once = memoryview(bytearray(256 * 1024))
    with get(pool) as body:
        assert body.readinto(sent_at_once) == len(sent_at_once)
    with get(pool) as body:
        assert b"".join(read(body)) == CONTENT


def test_a_connection_is_not_lost_where_its_body_is_not_read(s3: tuple[Store, str], pool: HTTPConnectionPool) -> None:
    address = urlsplit(s3[1])
    with closing(HTTPConnectionPool(str(address.hostname), address.port, maxsize=1, block=True)) as one:
        with pytest.raises(ZeroDivisionError), get(one):
            raise ZeroDivisionError
        answer = one.request("GET", "/models/object", pool_timeout=5)
        assert answer.data == CONTENT


def test_a_body_that_is_cut_off_ends_early(store: Store, pool: HTTPConnectionPool) -> None:
    def fault(request: Request) -> int:
        return BUFFER + 1

    store.fault = fault
    with get(pool) as body:
        assert [len(chunk) for chunk in read(body)] == [BUFFER, 1]


def test_a_store_that_falls_silent_is_a_broken_connection(store: Store, pool: HTTPConnectionPool) -> None:
    store.bytes_per_second = 100_000
    with get(pool, seconds=0.5) as body, pytest.raises(ConnectionError, match="timed out"):
        read(body)
