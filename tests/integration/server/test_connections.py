"""Clients that send too much, too slowly or not at all, and the others beside them."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.client import raw_post, read_all, read_until
from tests.support.models import PROMPT, scripted_model
from tests.support.pinging import Pinging
from tests.support.server import Server, running, serving
from tests.support.waiting import wait_until

LIMITS = {
    "max_header_size": 4096,
    "max_header_count": 20,
    "max_url_size": 512,
    "header_read_timeout": 3,
    "body_read_timeout": 3,
    "keep_alive_timeout": 4,
    "max_connections": 60,
    "max_body_memory": 2_000_000,
    "max_request_size": 1_000_000,
}
HEAD = b"GET /ping HTTP/1.1\r\nHost: test\r\n"
PING = HEAD + b"\r\n"
CHUNKED = b"POST /invocations HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = json.dumps({"inputs": PROMPT, "parameters": {"max_new_tokens": 3}}).encode()


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = scripted_model(tmp_path_factory.mktemp("limited") / "model", {"steps_per_second": 500}, **LIMITS)
    with serving(model) as server:
        yield server


def refused(connection: socket.socket) -> tuple[int, dict[str, Any], bytes]:
    """Status, content and head of the answer, after which the server closes."""
    connection.settimeout(20)
    head, _, content = read_all(connection).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(content), head


@pytest.mark.parametrize(
    ("sent", "status", "option"),
    [
        (b"GET /" + b"a" * 600 + b" HTTP/1.1\r\nHost: test\r\n\r\n", 414, "max_url_size=512"),
        (b"GET /" + b"a" * 300_000, 414, "max_url_size=512"),
        (HEAD + b"X: " + b"a" * 6000 + b"\r\n\r\n", 431, "max_header_size=4096"),
        (HEAD + b"X: " + b"a" * 300_000, 431, "max_header_size=4096"),
        (HEAD + b"X" * 300_000, 431, "max_header_size=4096"),
        (b"\r\n" * 10_000, 431, "max_header_size=4096"),
        (HEAD + b"a:\r\n" * 20 + b"\r\n", 431, "max_header_count=20"),
        (CHUNKED + b"0\r\n" + b"a: b\r\n" * 25, 431, "max_header_count=20"),
        (CHUNKED + b"0\r\nA: " + b"b" * 10_000, 431, "max_header_size=4096"),
        (CHUNKED + b"5;x=" + b"b" * 10_000, 431, "max_header_size=4096"),
        (CHUNKED + b"1\r\n{\r\n" * 20_000, 431, "max_header_size=4096"),
        (b"what is this?\r\n\r\n", 400, "HTTP"),
        (HEAD, 408, "header_read_timeout=3"),
        (raw_post(BODY)[:-5], 408, "body_read_timeout=3"),
        (CHUNKED + b"5\r\nab", 408, "body_read_timeout=3"),
    ],
    ids=lambda value: str(value)[:20].replace("\\", "") if isinstance(value, bytes) else None,
)
def test_what_is_too_much_or_too_slow_is_refused_with_the_limit_and_its_option(
    limited: Server, sent: bytes, status: int, option: str
) -> None:
    with limited.connect() as connection:
        connection.sendall(sent)
        found, body, _ = refused(connection)
    assert (found, body["code"]) == (status, status)
    assert option in body["message"]
    assert limited.ping() == 200


def test_requests_within_the_limits_pass(limited: Server) -> None:
    padding = "a" * 3500
    with limited.connect() as connection:
        connection.sendall(raw_post(BODY, f"X-Padding: {padding}", *(f"X-{i}: {i}" for i in range(14))))
        assert b" 200 OK" in read_until(connection, b"generated_text")
        connection.sendall(b"GET /ping?" + b"a" * 500 + b" HTTP/1.1\r\nHost: test\r\n\r\n")
        assert b" 200 OK" in read_until(connection, b"Healthy")
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (BODY[:7], BODY[7:8], BODY[8:]))
        connection.sendall(CHUNKED + chunks + b"0\r\nX-Trailer: kept out\r\n\r\n")
        assert b" 200 OK" in read_until(connection, b"generated_text")


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
        connection.sendall((PING + raw_post(BODY) + chunked + b"GET /nowhere HTTP/1.1\r\nHost: test\r\n\r\n") * 3)
        received = b""
        while received.count(b"there is nothing at /nowhere") < 3:
            received += connection.recv(65536)
    statuses = [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"200", b"200", b"404"] * 3


def test_a_request_in_single_bytes_is_answered(limited: Server) -> None:
    with limited.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in raw_post(BODY) + PING:
            connection.send(bytes([byte]))
        answer = read_until(connection, b"Healthy")
    assert answer.count(b"HTTP/1.1 200 OK") == 2


def test_an_idle_connection_is_closed(limited: Server) -> None:
    with limited.connect() as unused, limited.connect() as used:
        used.sendall(PING)
        read_until(used, b"Healthy")
        started = time.monotonic()
        assert read_all(unused) == read_all(used) == b""
        assert time.monotonic() - started > 1


def test_new_connections_take_the_place_of_idle_ones(limited: Server) -> None:
    idle = [limited.connect() for _ in range(80)]
    try:
        for _ in range(5):
            assert httpx.post(limited.url + "/invocations", content=BODY, trust_env=False).status_code == 200
    finally:
        for connection in idle:
            connection.close()


def test_beyond_the_limit_health_is_answered_and_the_rest_is_refused(limited: Server) -> None:
    busy = [limited.connect() for _ in range(60)]
    try:
        for connection in busy:
            connection.sendall(raw_post(b"x" * 100_000)[:-1])  # they are being read for nine seconds
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
        refusals = []
        for connection in held:
            connection.settimeout(0.5)
            with contextlib.suppress(TimeoutError):
                refusals.append(read_until(connection, b"}"))
        assert refusals
        assert all(answer.startswith(b"HTTP/1.1 503") for answer in refusals)
        assert all(b"max_body_memory=2000000" in answer and b"retry-after: 1" in answer.lower() for answer in refusals)
        assert limited.generate(2).status_code == 200
    finally:
        for connection in held:
            connection.close()
    wait_until(lambda: limited.http.post("/invocations", content=large[-900_002:]).status_code == 424)


def test_answers_that_nobody_reads_are_dropped(tmp_path: Path) -> None:
    model = scripted_model(tmp_path / "model", {}, **{"option.stream_write_timeout": 1})
    with serving(model) as server, server.connect(receive_buffer=4096) as connection:
        connection.setblocking(False)

        def dropped() -> bool:
            try:
                connection.send(b"GET /openapi.json HTTP/1.1\r\nHost: test\r\n\r\n" * 100)
            except BlockingIOError:
                pass
            except ConnectionError:
                return True
            return False

        wait_until(dropped, what="the connection is dropped")


def test_the_limit_of_descriptors_is_raised(limited: Server) -> None:
    soft, hard = limited.process.rlimit(psutil.RLIMIT_NOFILE)
    assert soft >= min(hard, 60 + 512)


_FEW_DESCRIPTORS = (
    "-c",
    "from resource import *; from djl_trtllm.cli import main; setrlimit(RLIMIT_NOFILE, (1024, 1024)); main()",
)


@pytest.mark.slow
def test_with_few_descriptors_idle_clients_keep_neither_health_checks_nor_a_new_engine_process_out(
    tmp_path: Path,
) -> None:
    model = scripted_model(tmp_path / "model", {})
    with running(Server(model, program=_FEW_DESCRIPTORS)) as server:
        assert server.says("max_connections=16384 is lowered to 448")
        idle = [server.connect() for _ in range(1064)]
        try:
            for _ in range(5):
                assert httpx.get(server.url + "/ping", trust_env=False).status_code == 200
            restarts = server.metric("executor_restarts_total")
            server.host().kill()
            wait_until(lambda: server.metric("executor_restarts_total") > restarts, what="a new engine process")
            server.wait_for_ping()
            assert httpx.post(server.url + "/invocations", content=BODY, trust_env=False).status_code == 200
        finally:
            for connection in idle:
                connection.close()


@pytest.mark.slow
def test_many_large_bodies_at_once_do_not_fill_the_memory(tmp_path: Path) -> None:
    model = scripted_model(tmp_path / "model", {})
    large = raw_post(b"[" + b" " * 20_000_000 + b"]")
    with serving(model) as server:
        before, most = server.process.memory_info().rss, 0
        senders = [threading.Thread(target=send_all, args=(server, large)) for _ in range(40)]
        for sender in senders:
            sender.start()
        while any(sender.is_alive() for sender in senders):
            most = max(most, server.process.memory_info().rss)
            time.sleep(0.01)
        assert most - before < 300e6
        assert server.metric("http_responses_total", status="503") > 0


def send_all(server: Server, request: bytes) -> None:
    with contextlib.suppress(OSError), server.connect() as connection:
        connection.sendall(request)
        connection.recv(65536)


def test_an_address_of_megabytes_stops_nobody(limited: Server) -> None:
    with Pinging(limited) as pinging, contextlib.suppress(OSError), limited.connect() as connection:
        connection.sendall(b"GET /" + b"a" * 200_000_000)
    limited.wait_for_ping()
    assert set(pinging.statuses) <= {200}
    assert limited.metric("http_responses_total", status="414") > 0
