from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import tritonclient.grpc as triton

from tests.integration.server.conftest import Start, make_model
from tests.support.client import body, raw_post, read_until, wordy
from tests.support.dialects import Way, prompt_tensors, ways
from tests.support.models import PROMPT
from tests.support.processes import wait_until
from tests.support.server import Server, free_port, serving
from tests.support.websocket import opened

ENDLESS = 1_000_000
"""Tokens: more than any test waits for."""


def test_a_client_that_does_not_read_holds_up_nobody_and_is_dropped(start: Start) -> None:
    server = start({}, **{"option.stream_write_timeout": 1.5})
    slow = server.connect(receive_buffer=4096)
    slow.sendall(wordy(ENDLESS))
    read_until(slow, b"token")
    for _ in range(5):
        answer = server.generate(50, stream=True)
        assert len(answer.text.splitlines()) == 50
    wait_until(lambda: server.says("did not read for 1.5 seconds"))
    wait_until(lambda: server.metric("running") == 0)
    assert server.finished("cancelled") == 1
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
# That every path is among `ways` is tested in tests/integration/test_dialects.py. A cancelled request is the same for
# every engine, for all requests: on TensorRT-LLM there is one way whole and one streamed.

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
        *(pytest.param("tensorrt_llm", way, marks=pytest.mark.slow) for way in ON_TENSORRT_LLM),
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
