"""Models of a hub and of S3, through the ordinary command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.hub_server import Hub, hub_server
from tests.support.models import without_sagemakers_model
from tests.support.s3_server import Store, s3_server, variables
from tests.support.server import environment, run_cli, serving


def files_of(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by its relative path."""
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


@without_sagemakers_model
def test_hf_model_id_is_fetched_and_served_and_nothing_else_is(tiny_stories: Path, tmp_path: Path) -> None:
    hub = Hub({"acme/tiny-stories": files_of(tiny_stories) | {"flax_model.msgpack": b"another format"}})
    with hub_server(hub) as endpoint:
        settings = {
            "HF_MODEL_ID": "acme/tiny-stories",
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }
        with serving(None, tmp_path, **settings) as server:
            answer = server.post("Once upon a time", stream=True, max_new_tokens=8)
            lines = [json.loads(line) for line in answer.text.splitlines()]
            assert len(lines) == 8 and lines[-1]["generated_text"]
            assert server.http.get("/ping").json().keys() == {"acme_tiny_stories"}
            assert server.http.post("/predictions/other", json={"inputs": "a"}).status_code == 404
        assert "flax_model.msgpack" not in hub.fetched
        hub.fetched.clear()
        with serving(None, tmp_path, **settings):
            pass
        assert hub.fetched == []


@pytest.mark.slow
def test_a_truss_is_served_with_the_token_of_its_secrets(tiny_stories: Path, tmp_path: Path) -> None:
    secret = "hf_Right0Token0Of0The0Truss"
    files = files_of(tiny_stories)
    hub = Hub({"acme/engine": files, "acme/tokenizer": {name: files[name] for name in files if "tokenizer" in name}})
    hub.private, hub.token = frozenset(hub.repositories), secret
    truss = tmp_path / "truss"
    truss.mkdir()
    config = "model_metadata:\n  tensor_parallelism: 1\n  engine_repository: acme/engine\n"
    config += f"  tokenizer_repository: acme/tokenizer\nsecrets:\n  hf_access_token: {secret}\n"
    (truss / "config.yaml").write_text(config)
    with hub_server(hub) as endpoint:
        settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
        settings |= {"HF_HUB_DISABLE_XET": "1", "OPTION_BACKEND": "openvino"}
        with serving(truss, tmp_path, **settings) as server:
            body = {"prompt": "Once upon a time", "max_tokens": 40}
            with server.http.stream("POST", "/predict", json=body) as answer:
                pieces = [piece for piece in answer.iter_raw() if piece]
            assert answer.status_code == 200 and len(pieces) > 1
            whole = server.http.post("/v1/models/model:predict", json={**body, "stream": False})
            assert whole.json() == {"text": b"".join(pieces).decode()}
            for process in server.descendants():
                assert secret not in str((process.environ(), process.cmdline()))
            assert not server.says(secret)
        written = [path for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
        assert written == [truss / "config.yaml"]
        other = tmp_path / "other"
        other.mkdir()
        environ = environment(other, **settings | {"HF_HOME": str(other), "HF_TOKEN": "hf_wrong"})
        refused = run_cli("compile", str(truss), str(tmp_path / "out"), environ=environ)
        said = refused.stdout + refused.stderr
        assert refused.returncode == 1 and "HF_TOKEN is not" in said and secret not in said


def test_config_looks_at_a_model_of_the_hub_without_its_weights(tiny_stories: Path, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in tiny_stories.iterdir() if path.is_file()}
    hub = Hub({"acme/tiny-stories": files | {"serving.properties": b"option.max_input_len=77\n"}})
    with hub_server(hub) as endpoint:
        settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
        environ = environment(tmp_path, **settings, HF_HUB_DISABLE_XET="1")
        shown = run_cli("config", "acme/tiny-stories", "--backend", "tensorrt", environ=environ)
        assert shown.returncode == 0, shown.stdout + shown.stderr
        assert "option.max_input_len = 77 tokens" in shown.stdout and "max_input_len=77" in shown.stdout
        assert not any(name.endswith(("model.safetensors", "tokenizer.json")) for name in hub.fetched)
        refused = run_cli("config", "acme/tiny-stories", environ={**environ, "OPTION_QUANTIZE": "fp8"})
        assert refused.returncode == 1
        assert "cannot be served: " in refused.stdout and "OPTION_QUANTIZE" in refused.stdout
        missing = run_cli("config", "acme/nowhere", environ=environ)
        assert missing.returncode == 1
        assert "there is no such model" in missing.stdout


@pytest.mark.slow
def test_an_s3_address_is_fetched_once_and_served(tiny_stories: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store = Store(tmp_path / "store")
    for name, content in files_of(tiny_stories).items():
        store.put(f"team/story/{name}", content)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "serving.properties").write_text("option.model_id=s3://models/team/story\n")
    with s3_server(store) as endpoint:
        for model in (tmp_path / "model", "s3://models/team/story"):
            with serving(model, tmp_path, **variables(endpoint)) as server:
                assert server.token_ids("Once upon a time", max_new_tokens=4)
        gets = [request.key for request in store.gets()]
    assert len(gets) == len(set(gets))


@pytest.mark.slow
def test_a_store_that_cannot_be_reached_is_an_error_for_the_reader(tmp_path: Path) -> None:
    settings = environment(tmp_path, **variables("http://127.0.0.1:9"))
    missing = run_cli("compile", "s3://models/nothing", str(tmp_path / "out"), environ=settings)
    assert missing.returncode == 1
    assert "cannot be reached" in missing.stderr


def test_a_gated_model_is_an_error_for_the_reader(tmp_path: Path) -> None:
    with hub_server(Hub({"acme/gated": {"config.json": b"{}"}}, gated=frozenset({"acme/gated"}))) as endpoint:
        settings = environment(tmp_path, HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="0")
        done = run_cli("compile", "acme/gated", str(tmp_path / "out"), environ=settings)
    assert done.returncode == 1
    assert "acme/gated" in done.stderr and "request access on its page" in done.stderr
    assert "Traceback" not in done.stderr
