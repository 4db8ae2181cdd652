"""Clients that send too much, too slowly or not at all, and the others beside them."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.client import raw_post, read_all, read_until
from tests.support.hostile import requests, send
from tests.support.models import PROMPT, scripted_model
from tests.support.processes import PATIENCE, wait_until
from tests.support.server import Server, serving

LIMITS = {
    "max_header_size": 4096,
    "max_header_count": 20,
    "max_url_size": 512,
    "keep_alive_timeout": 4,
    "max_connections": 60,
    "max_body_memory": 2_000_000,
    "max_request_size": 1_000_000,
}
HEAD = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n"
PING = HEAD + b"\r\n"
CHUNKED = b"POST /invocations HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = json.dumps({"inputs": PROMPT, "parameters": {"max_new_tokens": 3}}).encode()


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = scripted_model(tmp_path_factory.mktemp("limited") / "model", {"steps_per_second": 500}, **LIMITS)
    with serving(model) as server:
        yield server


def refused(connection: socket.socket) -> tuple[int, dict[str, Any], bytes]:
    """Status, content and head of the answer, after which the server closes."""
    connection.settimeout(PATIENCE)
    head, _, content = read_all(connection).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(content), head


def test_pipelined_requests_are_answered_in_order_and_take_no_memory(limited: Server) -> None:
    limited.generate(2)
    before = limited.process.memory_info().rss
    count = 5_000
    with limited.connect() as connection:
        connection.settimeout(60)
        connection.setblocking(False)
        waiting, received, largest = (HEAD + b"X: %s\r\n\r\n" % (b"x" * 2000)) * count, 0, 0
        position, tail = 0, b""
        while received < count:
            with contextlib.suppress(BlockingIOError):
                position += connection.send(waiting[position : position + 65536]) if position < len(waiting) else 0
            try:
                data = tail + connection.recv(1 << 20)
                received += data.count(b"HTTP/1.1 200")
                tail = data[-11:]
                largest = max(largest, limited.process.memory_info().rss)
            except BlockingIOError:
                time.sleep(0.001)
    assert largest - before < 20e6


def test_a_mixed_pipeline_is_answered_in_order(limited: Server) -> None:
    chunked = CHUNKED + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    with limited.connect() as connection:
        connection.sendall((PING + raw_post(BODY) + chunked + b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n") * 3)
        received = b""
        while received.count(b"there is nothing at /nowhere") < 3:
            received += connection.recv(65536)
    statuses = [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"200", b"200", b"404"] * 3


def test_an_idle_connection_is_closed(limited: Server) -> None:
    with limited.connect() as unused, limited.connect() as used:
        used.sendall(PING)
        read_until(used, b"Healthy")
        assert read_all(unused) == read_all(used) == b""


def test_beyond_the_limit_health_is_answered_and_the_rest_is_refused(limited: Server) -> None:
    busy = [limited.connect() for _ in range(60)]
    try:
        for connection in busy:
            connection.sendall(raw_post(b"x" * 100_000)[:-1])
        wait_until(lambda: len(psutil.Process(limited.process.pid).net_connections()) >= 60)
        with limited.connect() as connection:
            connection.sendall(raw_post(BODY))
            status, body, head = refused(connection)
        assert status == 503
        assert b"retry-after: 1" in head
        assert "max_connections=60" in body["message"]
        assert httpx.get(limited.url + "/ping", trust_env=False).status_code == 200
    finally:
        for connection in busy:
            connection.close()
    wait_until(lambda: httpx.post(limited.url + "/invocations", content=BODY, trust_env=False).status_code == 200)


def test_bodies_together_are_bounded_and_small_ones_find_a_place(limited: Server) -> None:
    large = raw_post(b"[" + b" " * 900_000 + b"]")
    held = [limited.connect() for _ in range(8)]
    try:
        for connection in held:
            connection.sendall(large[:-1])
        answered, _, _ = select.select(held, [], [], PATIENCE)
        refusals = [read_until(connection, b"}") for connection in answered]
        assert refusals
        assert all(answer.startswith(b"HTTP/1.1 503") for answer in refusals)
        assert all(b"max_body_memory=2000000" in answer and b"retry-after: 1" in answer.lower() for answer in refusals)
        assert limited.generate(2).status_code == 200
    finally:
        for connection in held:
            connection.close()
    wait_until(lambda: limited.http.post("/invocations", content=large[-900_002:]).status_code == 424)


# -- hostile requests get an answer, and leave a server that answers ---------------------------------------------------
#
# `benchmarks/hostile.py` measures what they cost.

_MOST_GROWTH = 200_000_000


@pytest.mark.slow
def test_every_hostile_request_gets_its_status_and_leaves_nothing(tmp_path: Path) -> None:
    with serving(scripted_model(tmp_path / "model"), tmp_path) as server:
        before = server.process.memory_info().rss
        wrong, largest = {}, before
        for request in requests():
            # A reset may overtake the response to a request that is not read to its end.
            statuses = {send(server.port, request.data)[0] for _ in range(2)} - {0}
            if statuses - {request.status}:
                wrong[request.name] = statuses, request.status
            largest = max(largest, server.process.memory_info().rss)
        assert not wrong
        assert largest - before < _MOST_GROWTH
        assert server.ping() == 200
