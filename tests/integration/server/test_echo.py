"""A fourth engine, which is a folder (`tests/backends/echo`) and one line, in a real server."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.server import Server
from tests.support.waiting import wait_until

PROGRAM = ("-m", "tests.backends.echo.server")


def configured(model: Path, directory: Path, backend: str) -> Path:
    """A copy of a model directory with this backend."""
    copy = directory / "model"
    shutil.copytree(model, copy)
    (copy / "serving.properties").write_text(f"option.backend={backend}\n")
    return copy


def test_a_backend_from_outside_the_package_is_served_like_the_others(tiny_stories: Path, tmp_path: Path) -> None:
    with Server(configured(tiny_stories, tmp_path, "echo"), program=PROGRAM) as server:
        server.wait_for_ping()
        echoed = server.answer("the wolf ran", max_new_tokens=3, decoder_input_details=True)
        assert [token["id"] for token in echoed["details"]["tokens"]] == [
            token["id"] for token in echoed["details"]["prefill"]
        ][:3]
        assert echoed["details"]["finish_reason"] == "length"
        # What it does not honour is refused by name.
        refused = server.post("the wolf ran", max_new_tokens=3, do_sample=True, temperature=0.5)
        assert refused.status_code == 424
        assert "not supported by this backend: 'do_sample'; 'temperature'" in refused.json()["error"]
        assert "backend echo: option.backend=echo" in "\n".join(server.log)


def test_an_unknown_backend_is_refused_with_the_names_there_are(tiny_stories: Path, tmp_path: Path) -> None:
    with Server(configured(tiny_stories, tmp_path, "vllm"), program=PROGRAM) as server:
        wait_until(lambda: server.process.poll() is not None, what="the server's end")
        assert server.says("expected one of auto, tensorrt, pytorch, autodeploy, openvino, scripted, echo")
