"""The model repository of the workflow for Llama: served on Triton's ports, with Triton's table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import tritonclient.http as triton

from tests.server.test_triton_ports import TABLE
from tests.support.models import PROMPT, scripted_model
from tests.support.server import Server, free_port, running, serving

SCRIPT = Path(__file__).parents[3] / "scripts" / "launch_triton_server.py"
MODELS = ("ensemble", "preprocessing", "postprocessing", "tensorrt_llm", "tensorrt_llm_bls")


def repository(root: Path, *, decoupled: str = "true") -> Path:
    """The five models, and what runs them here."""
    model = scripted_model(root / "engine")
    folder = root / "triton_model_repo"
    for name in MODELS:
        (folder / name).mkdir(parents=True)
        policy = f"model_transaction_policy {{ decoupled: {decoupled} }}" if name.startswith("tensorrt") else ""
        (folder / name / "config.pbtxt").write_text(f'name: "{name}"\nmax_batch_size: 4\n{policy}\n')
    properties = (model / "serving.properties").read_text()
    lines = [line for line in properties.splitlines() if "max_rolling_batch_size" not in line]
    (folder / "serving.properties").write_text("\n".join([*lines, f"option.model_id={model}"]) + "\n")
    (model / "serving.properties").unlink()
    return folder


def test_it_listens_on_tritons_ports_and_prints_tritons_table(tmp_path: Path) -> None:
    http, metrics = free_port(), free_port()
    ports = {"SERVING_TRITON_HTTP_PORT": str(http), "SERVING_TRITON_METRICS_PORT": str(metrics)}
    with serving(repository(tmp_path), **ports) as server:
        assert TABLE in "\n".join(line.strip() for line in server.log)
        with triton.InferenceServerClient(f"127.0.0.1:{http}") as client:
            assert client.is_server_ready() and client.is_model_ready("ensemble")
            assert {model["name"] for model in client.get_model_repository_index()} >= set(MODELS)
            assert client.get_model_config("ensemble")["max_batch_size"] == 4
        page = httpx.get(f"http://127.0.0.1:{metrics}/metrics", trust_env=False).text
        assert 'djl_trtllm_ready{model="scripted"} 1.0' in page


def test_a_repository_that_is_not_decoupled_refuses_streams(tmp_path: Path) -> None:
    with serving(repository(tmp_path, decoupled="false")) as server:
        body = {"text_input": PROMPT, "max_tokens": 3}
        refused = server.http.post("/v2/models/ensemble/generate_stream", json=body)
        expected = {"error": "Streaming is only supported if model is deployed using decoupled mode."}
        assert (refused.status_code, refused.json()) == (400, expected)
        assert server.http.post("/v2/models/ensemble/generate", json=body).status_code == 200
        assert server.generate(3, stream=True).status_code == 200


def test_a_port_that_is_taken_ends_the_server_with_the_option_to_change(tmp_path: Path) -> None:
    folder = repository(tmp_path)
    port = str(free_port())
    with (
        serving(folder, SERVING_TRITON_HTTP_PORT=port),
        Server(folder, {"SERVING_TRITON_HTTP_PORT": port}) as second,
    ):
        assert second.wait() == 1
        assert second.says(f"triton_http_port={port}: cannot listen on 127.0.0.1:{port}")
        assert second.says("SERVING_TRITON_HTTP_PORT to another one or to 0 for none")


def test_the_script_of_the_workflow_does_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell stands between, as `Server` has its own arguments."""
    program = tmp_path / "launch.py"
    program.write_text(
        "import os, sys\n"
        "_, serve, repository, port_flag, port, host_flag, host = sys.argv\n"
        "os.environ |= {'SERVING_INFERENCE_PORT': port, 'SERVING_INFERENCE_HOST': host}\n"
        f"os.execv({sys.executable!r}, [{sys.executable!r}, {str(SCRIPT)!r}, '--world_size=1', '--model_repo', "
        "repository, '--http_port=0', '--metrics_port=0'])\n"
    )
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    server = Server(repository(tmp_path), {"PATH": path}, program=(str(program),))
    with running(server):
        assert TABLE in "\n".join(line.strip() for line in server.log)


def test_the_script_says_how_it_is_used() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=True)
    assert "--world_size" in done.stdout and "--model_repo" in done.stdout
