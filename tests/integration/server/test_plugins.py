"""A dialect and an engine of other packages, in a server started from a shell; the application in another server."""

from __future__ import annotations

import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.client import JSON, body, raw_post, read_all, read_until, wordy
from tests.support.models import scripted_model
from tests.support.plugin import installed
from tests.support.processes import wait_until
from tests.support.server import Server, running

pytestmark = pytest.mark.slow


def test_a_dialect_of_an_installed_package_is_served(tmp_path: Path) -> None:
    model = scripted_model(tmp_path / "model", {"steps_per_second": 20})
    environment = installed(tmp_path, "djl_trtllm.dialects", "trial = tests.support.plugin:TRIAL")
    with running(Server(model, environment)) as server:
        for path, lines in (("/trial", 2), ("/trial/scripted/stream", 6)):
            answer = server.http.post(path, content="the wolf\nred riding hood", headers={"tokens": "3"})
            assert (answer.status_code, answer.headers["content-type"]) == (200, "text/lines")
            assert len(answer.text.splitlines()) == lines
            refused = server.http.post(path, content="")
            assert (refused.status_code, refused.text) == (400, "! no prompts for scripted\n")
        assert server.http.post("/invocations", content=body(3), headers=JSON).status_code == 200


# -- A fourth engine, which is a folder (`tests/backends/echo`) and an entry point, in a real server -------------------


def serving(model: Path, directory: Path, backend: str) -> Server:
    """A server of a copy of the model with this backend, with a package installed that has the echo."""
    copy = directory / "model"
    shutil.copytree(model, copy)
    (copy / "serving.properties").write_text(f"option.backend={backend}\n")
    point = "echo = tests.backends.echo.backend:EchoBackend"
    return Server(copy, installed(directory, "djl_trtllm.backends", point))


def test_a_backend_from_outside_the_package_is_served_like_the_others(tiny_stories: Path, tmp_path: Path) -> None:
    with serving(tiny_stories, tmp_path, "echo") as server:
        server.wait_for_ping()
        echoed = server.answer("the wolf ran", max_new_tokens=3, decoder_input_details=True)
        assert [token["id"] for token in echoed["details"]["tokens"]] == [
            token["id"] for token in echoed["details"]["prefill"]
        ][:3]
        assert echoed["details"]["finish_reason"] == "length"
        # What it does not honour is refused by name.
        refused = server.post("the wolf ran", max_new_tokens=3, do_sample=True, temperature=0.5)
        assert refused.status_code == 424
        error = refused.json()["error"]
        assert "not supported by this backend: 'do_sample'" in error and error.endswith("; 'temperature'")
        assert "backend echo: option.backend=echo" in "\n".join(server.log)


def test_an_unknown_backend_is_refused_with_the_names_there_are(tiny_stories: Path, tmp_path: Path) -> None:
    with serving(tiny_stories, tmp_path, "mlx") as server:
        wait_until(lambda: server.process.poll() is not None, what="the server's end")
        assert server.says("expected one of auto, tensorrt, pytorch, autodeploy, vllm, openvino, scripted, echo")


# -- the application in a server that is not ours, which has no way to abort a connection -----------------------------


PLAIN = (
    "-c",
    "import sys, uvicorn; from djl_trtllm import create_app; _, serve, model, _, port, *_ = sys.argv; "
    "uvicorn.run(create_app(model, {'stream_write_timeout': 1}, wait_until_ready=True), port=int(port))",
)


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
        server.wait()


def test_a_stream_whose_client_does_not_read_ends_without_its_last_chunk(plain: Server) -> None:
    with socket.create_connection(("127.0.0.1", plain.port)) as client:
        client.sendall(wordy(400_000))
        read_until(client, b"token")
        wait_until(lambda: plain.says("did not read for 1 seconds"))
        rest = read_all(client)
    assert not rest.endswith(b"0\r\n\r\n")
    assert b'"generated_text"' not in rest
    assert plain.ping() == 200
