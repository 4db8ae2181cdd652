"""Clients that send too much, too slowly or not at all, that leave, or that stream both ways."""

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
import tritonclient.grpc as triton
from websockets.exceptions import ConnectionClosed

from tests.integration.server.conftest import Start, make_model
from tests.support.client import PATH, body, opened, raw_post, read_all, read_until, wordy
from tests.support.dialects import Way, prompt_tensors, ways
from tests.support.hostile import requests, send
from tests.support.models import PROMPT, scripted_model
from tests.support.processes import PATIENCE, wait_until
from tests.support.server import Server, free_port, serving

pytestmark = pytest.mark.slow

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


def test_requests_and_responses_share_a_socket(server: Server) -> None:
    with opened(server.port) as socket:
        for kind in (bytes, str):
            for stream in (False, True):
                request = body(4, stream=stream)
                socket.send(request if kind is bytes else request.decode())
                answer = b""
                while b"generated_text" not in answer:
                    part = socket.recv()
                    assert isinstance(part, kind)
                    answer += part if isinstance(part, bytes) else part.encode()
                lines = [json.loads(line) for line in answer.splitlines()]
                assert len(lines) == (4 if stream else 1)
        assert lines[-1]["generated_text"] == server.generate(4).json()["generated_text"]


def test_a_socket_ends_with_the_server(start: Start) -> None:
    server = start()
    with opened(server.port) as socket:
        server.terminate()
        with pytest.raises(ConnectionClosed):
            while True:
                socket.recv()
    assert server.wait() == 0


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("impatient")
    with serving(scripted_model(folder / "model", **{"option.stream_write_timeout": 1.5})) as server:
        yield server


def test_a_client_that_sends_pings_and_does_not_read_is_dropped(impatient: Server) -> None:
    before = impatient.process.memory_info().rss
    with impatient.connect() as raw:
        offer = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13"
        key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
        raw.sendall(f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\n{offer}\r\n{key}\r\n\r\n".encode())
        assert raw.recv(12) == b"HTTP/1.1 101"
        pings = (b"\x89\xfd" + bytes(4 + 125)) * 1000
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while True:
                raw.sendall(pings)
    assert impatient.process.memory_info().rss - before < 50_000_000


ENDLESS = 1_000_000
"""Tokens: more than any test waits for."""


def test_a_client_that_does_not_read_holds_up_nobody_and_is_dropped(impatient: Server) -> None:
    server, cancelled = impatient, impatient.finished("cancelled")
    slow = server.connect(receive_buffer=4096)
    slow.sendall(wordy(ENDLESS))
    read_until(slow, b"token")
    for _ in range(5):
        answer = server.generate(50, stream=True)
        assert len(answer.text.splitlines()) == 50
    wait_until(lambda: server.says("did not read for 1.5 seconds"))
    wait_until(lambda: server.metric("running") == 0)
    assert server.finished("cancelled") == cancelled + 1
    # Its connection is gone although it has neither read nor closed.
    port = slow.getsockname()[1]
    wait_until(lambda: all(not peer.raddr or peer.raddr.port != port for peer in server.process.net_connections()))
    # Nor does the kernel keep what it had accepted for it.
    received = 0
    with pytest.raises(ConnectionResetError):
        while part := slow.recv(1 << 16):
            received += len(part)
    assert received < 1 << 16
    slow.close()


def test_a_client_that_reads_late_gets_everything(start: Start) -> None:
    tokens = 100_000  # more than the buffers between server and client hold
    server = start({}, **{"option.stream_write_timeout": 600})
    with server.connect(receive_buffer=4096) as late:
        late.sendall(wordy(tokens))
        received = read_until(late, b"token")
        wait_until(lambda: server.metric("running") == 0)
        # The small buffer has done its part; through it the rest would come a few hundred bytes at a time.
        late.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        received += read_until(late, b"\r\n0\r\n\r\n")
    assert received.count(b'"token":') == tokens
    assert received.count(b'"generated_text":') == 1


# -- A client that leaves cancels its request in every dialect, over HTTP, gRPC and a WebSocket ------------------------
#
# That every path is among `ways` is tested in tests/integration/test_dialects.py. A dialect does not
# know its engine: on TensorRT-LLM there is one way whole and one streamed.

scripted = pytest.mark.parametrize("executor", ["scripted"], indirect=True, scope="session")
ON_TENSORRT_LLM = {way.streams: way for way in ways()}.values()


@pytest.fixture(scope="module")
def grpc_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def endless(executor: str, grpc_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on which no request ends by itself, with Triton's gRPC port."""
    folder = tmp_path_factory.mktemp("endless")
    model, environ = make_model(executor, folder / "model", {"steps_per_second": 100})
    with serving(model, **environ, SERVING_TRITON_GRPC_PORT=str(grpc_port)) as server:
        with triton.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
            client.infer("ensemble", tensors(2, stream=False))
        server.note_rest()
        yield server


@pytest.fixture
def one_is_cancelled(endless: Server) -> Iterator[None]:
    """Each test's request runs, and is cancelled when its client is gone."""
    before = endless.finished("cancelled")
    yield
    wait_until(lambda: endless.finished("cancelled") == before + 1, what="a cancelled request")
    wait_until(endless.idle, what="an idle server")


def tensors(tokens: int, *, stream: bool) -> list[Any]:
    """The inputs of a request over gRPC."""
    return prompt_tensors(triton, PROMPT, tokens, stream=stream)


def runs(server: Server) -> None:
    wait_until(lambda: server.metric("running") == 1, what="a request that runs")


@pytest.mark.usefixtures("one_is_cancelled")
@pytest.mark.parametrize(
    ("executor", "way"),
    [
        *(("scripted", way) for way in ways()),
        *(("tensorrt_llm", way) for way in ON_TENSORRT_LLM),
    ],
    ids=lambda value: value.name if isinstance(value, Way) else value,
    indirect=["executor"],
    scope="session",
)
def test_http(endless: Server, way: Way) -> None:
    content = json.dumps(way.body(PROMPT, {"max_new_tokens": ENDLESS})).encode()
    with endless.connect() as connection:
        connection.sendall(raw_post(content, path=way.url("scripted")))
        if way.streams:
            assert connection.recv(12) == b"HTTP/1.1 200"
        runs(endless)


@scripted
@pytest.mark.usefixtures("one_is_cancelled")
@pytest.mark.parametrize("stream", [False, True])
def test_a_websocket(endless: Server, stream: bool) -> None:
    with opened(endless.port) as socket:
        socket.send(body(ENDLESS, stream=stream))
        if stream:
            assert socket.recv()
        runs(endless)


@scripted
@pytest.mark.usefixtures("one_is_cancelled")
@pytest.mark.parametrize("stream", [False, True])
def test_grpc_stream(endless: Server, grpc_port: int, stream: bool) -> None:
    with triton.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
        client.start_stream(lambda result, error: None)
        client.async_stream_infer("ensemble", tensors(ENDLESS, stream=stream))
        runs(endless)
        client.stop_stream(cancel_requests=True)


@scripted
@pytest.mark.usefixtures("one_is_cancelled")
def test_grpc(endless: Server, grpc_port: int) -> None:
    with triton.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
        call = client.async_infer("ensemble", tensors(ENDLESS, stream=False), lambda result, error: None)
        runs(endless)
        call.cancel()
