"""SageMaker's bidirectional streaming, with the client of the websockets library."""

from __future__ import annotations

import json
import socket

import pytest
from websockets.exceptions import ConnectionClosed

from tests.integration.server.conftest import Start
from tests.support.client import body
from tests.support.processes import wait_until
from tests.support.server import Server
from tests.support.websocket import PATH, opened


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


def test_a_client_that_sends_pings_and_does_not_read_is_dropped(start: Start) -> None:
    server = start(**{"option.stream_write_timeout": 1})
    before = server.process.memory_info().rss
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as raw:
        offer = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13"
        key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
        raw.sendall(f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\n{offer}\r\n{key}\r\n\r\n".encode())
        assert raw.recv(12) == b"HTTP/1.1 101"
        pings = (b"\x89\xfd" + bytes(4 + 125)) * 1000
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while True:
                raw.sendall(pings)
    assert server.process.memory_info().rss - before < 50_000_000
    wait_until(server.idle, what="an idle server")
