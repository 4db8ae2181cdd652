"""The application in a server that is not ours, which has no way to abort a connection."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.client import body, raw_post, read_all, read_until, wordy
from tests.support.models import scripted_model
from tests.support.processes import wait_until
from tests.support.server import Server

PLAIN = ("-m", "tests.support.plain_uvicorn")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("plain")
    with Server(scripted_model(folder / "model"), scratch=folder, program=PLAIN) as server:
        server.wait_for_ping()
        yield server


def test_answers_are_those_of_our_own_server(plain: Server, server: Server) -> None:
    answers = []
    for each in (plain, server):
        streamed = each.http.post("/invocations", content=body(20, stream=True))
        chat = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 5}
        whole = each.http.post("/v1/chat/completions", json=chat)
        assert (streamed.status_code, whole.status_code) == (200, 200)
        answers.append((streamed.content, whole.json()["choices"]))
    assert answers[0] == answers[1]
    assert b'"generated_text"' in answers[0][0]


def test_sigterm_lets_running_streams_end(tmp_path: Path) -> None:
    model = scripted_model(tmp_path / "model", {"steps_per_second": 20})
    with Server(model, scratch=tmp_path, program=PLAIN) as server:
        server.wait_for_ping()
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(raw_post(body(40, stream=True), "Connection: close"))
            read_until(client, b"token")
            server.process.send_signal(signal.SIGTERM)
            rest = read_all(client)
        assert b'"generated_text"' in rest
        assert rest.endswith(b"\r\n0\r\n\r\n")
        server.process.wait(60)


def test_a_stream_whose_client_does_not_read_ends_without_its_last_chunk(plain: Server) -> None:
    with socket.create_connection(("127.0.0.1", plain.port)) as client:
        client.sendall(wordy(400_000))
        read_until(client, b"token")
        wait_until(lambda: plain.says("did not read for 1 seconds"))
        rest = read_all(client)
    assert not rest.endswith(b"0\r\n\r\n")
    assert b'"generated_text"' not in rest
    assert plain.ping() == 200
