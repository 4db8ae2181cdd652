"""One request on the scripted executor: its errors, protocols that it offers, and clients of HTTP/1.0 or that leave."""

from __future__ import annotations

import json
import socket

import pytest

from tests.support.client import JSON, body, raw_post, read_all
from tests.support.processes import wait_until
from tests.support.server import Server

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("offer", ["websocket", "h2c", "other"])
def test_a_request_with_a_body_is_answered_whatever_protocol_it_offers(server: Server, offer: str) -> None:
    headers = {**JSON, "Connection": "Upgrade", "Upgrade": offer}
    for content in (body(2), iter([body(2)])):
        answer = server.http.post("/invocations", content=content, headers=headers)
        assert answer.json() == server.generate(2).json()


def test_an_error_of_one_request_is_its_own(server: Server) -> None:
    whole = server.generate(77)
    # A busy server may have the error before it has sent anything, and answers with its status then.
    attempts = (server.generate(77, stream=True) for _ in range(50))
    streamed = next(attempt for attempt in attempts if attempt.status_code == 200)
    assert whole.status_code == 424
    assert whole.json() == {"error": "scripted error", "code": 424}
    last = json.loads(streamed.text.splitlines()[-1])
    assert last["token"]["error_msg"] == "scripted error"
    assert last["details"]["finish_reason"] == "error"


def test_an_http_1_0_client_gets_its_answer_and_the_end_of_the_connection(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(raw_post(body(3), version="1.0"))
        head, _, content = read_all(connection).partition(b"\r\n\r\n")
    assert b"200 OK" in head
    assert f"content-length: {len(content)}".encode() in head
    with server.connect() as connection:
        connection.sendall(raw_post(body(3, stream=True), version="1.0"))
        assert b"generated_text" in read_all(connection)


def test_a_half_closed_client_is_gone(server: Server) -> None:
    before = server.finished("cancelled")
    with server.connect() as connection:
        connection.sendall(raw_post(body(2000)))
        wait_until(lambda: server.metric("running") == 1)
        connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: server.metric("running") == 0)
    assert server.finished("cancelled") == before + 1


@pytest.mark.parametrize("part", [0.2, 0.9])
def test_a_client_that_goes_while_it_sends_leaves_nothing(server: Server, part: float) -> None:
    request = raw_post(body(5))
    before = server.metric("requests_total")
    with server.connect() as connection:
        connection.sendall(request[: int(len(request) * part)])
    assert server.generate().status_code == 200
    assert server.metric("requests_total") == before + 1
