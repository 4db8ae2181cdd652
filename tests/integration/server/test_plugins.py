"""A dialect and an engine of other packages, which their entry points name, in a server started from a shell."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.client import JSON, body
from tests.support.models import scripted_model
from tests.support.plugin import installed
from tests.support.processes import wait_until
from tests.support.server import Server, running


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
        assert "not supported by this backend: 'do_sample'; 'temperature'" in refused.json()["error"]
        assert "backend echo: option.backend=echo" in "\n".join(server.log)


def test_an_unknown_backend_is_refused_with_the_names_there_are(tiny_stories: Path, tmp_path: Path) -> None:
    with serving(tiny_stories, tmp_path, "mlx") as server:
        wait_until(lambda: server.process.poll() is not None, what="the server's end")
        assert server.says("expected one of auto, tensorrt, pytorch, autodeploy, vllm, openvino, scripted, echo")
