"""A client that leaves cancels its request in every dialect, over HTTP, gRPC and a WebSocket.

That every path is among `ways` is tested in tests/integration/test_dialects.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import tritonclient.grpc as triton
from websockets.sync.client import connect

from tests.integration.server.conftest import make_model
from tests.support.client import body, raw_post
from tests.support.dialects import Way, ways
from tests.support.models import PROMPT
from tests.support.server import Server, free_port, serving
from tests.support.triton_tensors import prompt_tensors
from tests.support.waiting import wait_until

ENDLESS = 1_000_000


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


@pytest.fixture(autouse=True)
def _one_is_cancelled(endless: Server) -> Iterator[None]:
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


@pytest.mark.parametrize("way", ways(), ids=lambda way: way.name)
def test_http(endless: Server, way: Way) -> None:
    content = json.dumps(way.body(PROMPT, {"max_new_tokens": ENDLESS})).encode()
    with endless.connect() as connection:
        connection.sendall(raw_post(content, path=way.url("scripted")))
        if way.streams:
            assert connection.recv(12) == b"HTTP/1.1 200"
        runs(endless)


@pytest.mark.parametrize("stream", [False, True])
def test_a_websocket(endless: Server, stream: bool) -> None:
    url = f"ws://127.0.0.1:{endless.port}/invocations-bidirectional-stream"
    with connect(url, proxy=None) as socket:
        socket.send(body(ENDLESS, stream=stream))
        if stream:
            assert socket.recv(timeout=60)
        runs(endless)


@pytest.mark.parametrize("stream", [False, True])
def test_grpc_stream(endless: Server, grpc_port: int, stream: bool) -> None:
    with triton.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
        client.start_stream(lambda result, error: None)
        client.async_stream_infer("ensemble", tensors(ENDLESS, stream=stream))
        runs(endless)
        client.stop_stream(cancel_requests=True)


def test_grpc(endless: Server, grpc_port: int) -> None:
    with triton.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
        call = client.async_infer("ensemble", tensors(ENDLESS, stream=False), lambda result, error: None)
        runs(endless)
        call.cancel()
