"""What a newcomer does first works as documented, and what goes wrong for a newcomer is an error that helps."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.models import scripted_model
from tests.support.processes import PATIENCE, wait_until
from tests.support.reference import DOCUMENT
from tests.support.server import CLI, Server, environment, run_cli, serving

REQUEST = {"inputs": DOCUMENT, "parameters": {"max_new_tokens": 128, "do_sample": True}}


def copied(model: Path, to: Path, *, properties: str = "") -> Path:
    """The model's files elsewhere, with a serving.properties of its own."""
    shutil.copytree(model, to)
    (to / "serving.properties").write_text(properties)
    return to


# -- the document's request --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default_server(model: Path, scratch: Path) -> Iterator[Server]:
    """The model as it is, nothing configured."""
    with serving(model, scratch) as started:
        yield started


def is_a_story(text: str) -> bool:
    """Whether it is whole sentences of English in ASCII."""
    words = re.findall(r"[A-Za-z']+", text)
    return len(words) > 20 and text.isascii() and "." in text and " the " in text


def tells_a_story(ask: Callable[[], str]) -> bool:
    """Whether one of several answers is a story: the document's request samples, and some answers end early."""
    return any(is_a_story(ask()) for _ in range(6))


@pytest.mark.parametrize("path", ["/invocations", "/predictions/{model}", "/endpoints/anything/invocations"])
def test_the_documents_request_gets_a_story(default_server: Server, path: str) -> None:
    (name,) = default_server.http.get("/ping").json()

    def ask() -> str:
        answer = default_server.http.post(path.format(model=name), json=REQUEST)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        assert list(answer.json()) == ["generated_text"]
        text: str = answer.json()["generated_text"]
        return text

    assert tells_a_story(ask)


def test_the_documents_request_by_curl(default_server: Server) -> None:
    command = ["curl", "-s", "-X", "POST", f"{default_server.url}/invocations", "-H", "Content-Type: application/json"]
    command += ["-d", json.dumps(REQUEST)]
    environ = {**os.environ, "NO_PROXY": "*"}
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")

    def ask() -> str:
        answer = subprocess.run(command, env=environ, capture_output=True, check=True)
        text: str = json.loads(answer.stdout)["generated_text"]
        return text

    assert tells_a_story(ask)


# -- archives ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_tarball_serves(model: Path, scratch: Path, tmp_path: Path) -> None:
    directory = copied(model, tmp_path / "model", properties="engine=Python\noption.max_rolling_batch_size=4\n")
    subprocess.run(["tar", "czf", str(tmp_path / "model.tar.gz"), "model/"], cwd=tmp_path, check=True)
    with tarfile.open(tmp_path / "model.tar.gz") as archive:
        assert any(name.endswith("openvino_model.bin") for name in archive.getnames())
    shutil.rmtree(directory)
    with serving(tmp_path / "model.tar.gz", scratch) as server:
        assert tells_a_story(lambda: server.http.post("/invocations", json=REQUEST).json()["generated_text"])
        wait_until(lambda: server.says("up to 4 sequences"))


# -- what a newcomer gets wrong ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_failed_start_ends_with_its_reason(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        in_use = str(taken.getsockname()[1])
        for named, port, reason in (
            (str(model), in_use, f"inference_port={in_use}: cannot listen"),
            (str(tmp_path / "empty"), "0", "is empty: copy a checkpoint"),
            ("nosuch", "0", "there is no directory nosuch here"),
        ):
            arguments = ("serve", named, "--host", "127.0.0.1", "--port", port)
            done = run_cli(*arguments, environ=environment(tmp_path))
            lines = done.stderr.strip().splitlines()
            assert done.returncode == 1 and reason in lines[-1], done.stderr
            assert not any("uvicorn" in line for line in lines)


@pytest.mark.slow
def test_an_engine_that_cannot_be_loaded_is_reported_with_the_loaders_words(
    model: Path, scratch: Path, tmp_path: Path
) -> None:
    engine = copied(model / "engine", tmp_path / "engine")
    (engine / "manifest.json").unlink()
    graph = engine / "openvino_model.xml"
    graph.write_text(graph.read_text().replace('type="MatMul"', 'type="NoSuchOperation"'))
    run = run_cli("serve", str(engine), "--port", "0", environ=environment(scratch / "cache"))
    assert run.returncode == 1
    assert "has failed: the engine process" in run.stderr
    assert "doesn't contain the operation with type: NoSuchOperation" in run.stderr


@pytest.mark.slow
def test_port_0_is_the_systems_choice_and_the_log_has_it(tmp_path: Path) -> None:
    model = scripted_model(tmp_path / "model")
    command = [sys.executable, *CLI, "serve", str(model), "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(command, env=environment(tmp_path / "cache"), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = (re.search(r"listening on http://127\.0\.0\.1:(\d+)", line) for line in process.stderr)
        port = int(next(found[1] for found in said if found))
        socket.create_connection(("127.0.0.1", port)).close()
    finally:
        process.terminate()
        process.stderr.close()
        process.wait(PATIENCE)
