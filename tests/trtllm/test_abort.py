"""A client that goes away: its request ends in the engine, and its place is free again."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from tests.support.client import lmi, raw_post, read_until
from tests.support.processes import wait_until
from tests.support.server import Server
from tests.trtllm.conftest import START_SECONDS, ask

pytestmark = pytest.mark.timeout(3 * START_SECONDS)

LONG = 1000


@pytest.fixture(autouse=True)
def _places_are_free_again(server: Server) -> Iterator[None]:
    yield
    wait_until(lambda: server.metric("running") == server.metric("waiting") == 0, what="all places free")
    assert ask(server, "the wolf", max_new_tokens=4).status_code == 200
    assert server.ping() == 200


def send(server: Server, tokens: int = LONG, *, stream: bool = True) -> socket.socket:
    """A request on a connection of its own."""
    connection = server.connect()
    parameters = {"max_new_tokens": tokens, "ignore_eos_token": True}
    connection.sendall(raw_post(json.dumps(lmi("once upon a time", stream=stream, **parameters)).encode()))
    return connection


def cancelled(server: Server) -> float:
    return server.finished("cancelled")


def leave(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


@pytest.mark.parametrize("lines", [1, 2, 50])
def test_in_the_first_and_in_a_middle_token(server: Server, lines: int) -> None:
    """Streams carry log-probabilities: aborting one can crash the engine backend (TensorRT-LLM #10810)."""
    before = cancelled(server)
    connection = send(server)
    for _ in range(lines):
        read_until(connection, b'{"token"')
    leave(connection)
    wait_until(lambda: cancelled(server) == before + 1, what="the request is cancelled")


def test_as_soon_as_it_is_sent(server: Server) -> None:
    """The request is in the queue, in the context phase, or not read yet."""
    for _ in range(5):
        leave(send(server))


def test_in_the_queue(server: Server) -> None:
    running = [send(server), send(server)]
    for connection in running:
        read_until(connection, b'{"token"')
    before = cancelled(server)
    queued = send(server)
    wait_until(lambda: server.metric("waiting") == 1, what="it waits")
    leave(queued)
    wait_until(lambda: cancelled(server) == before + 1, what="the request is cancelled")
    for connection in running:
        read_until(connection, b"generated_text")
        connection.close()


def test_after_the_end(server: Server) -> None:
    before = cancelled(server)
    connection = send(server, tokens=3)
    read_until(connection, b"generated_text")
    leave(connection)
    wait_until(lambda: server.metric("running") == 0, what="nothing runs")
    assert cancelled(server) == before


def test_a_whole_answer(server: Server) -> None:
    before = cancelled(server)
    connection = send(server, stream=False)
    wait_until(lambda: server.metric("running") == 1, what="it runs")
    leave(connection)
    wait_until(lambda: cancelled(server) == before + 1, what="the request is cancelled")


def test_others_go_on(server: Server) -> None:
    leaving, staying = send(server), send(server, tokens=400)
    read_until(leaving, b'{"token"')
    leave(leaving)
    read_until(staying, b"generated_text")
    staying.close()


def test_many_at_once(server: Server) -> None:
    connections = [send(server) for _ in range(16)]
    read_until(connections[0], b'{"token"')
    for connection in connections:
        leave(connection)
