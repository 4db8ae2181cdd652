"""Models of the hub, from a hub on this machine. huggingface_hub reads its settings when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.remote.hub import hub_id, is_hub_id
from tests.hub_server import Hub, hub_server

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(range(256)) * 4000,
    "pytorch_model.bin": b"a copy",
    "tokenizer.json": b"{}",
    "README.md": b"# A model",
    "onnx/model.onnx": b"another copy",
    ".gitattributes": b"",
}
PROGRAM = """
import sys
from pathlib import Path
from djl_trtllm.errors import DownloadError
from djl_trtllm.model.remote.fetch import fetch
try:
    path = fetch(sys.argv[1], Path(sys.argv[2]), lambda line: print("told", line), revision=sys.argv[3] or None)
    print("path", path)
except DownloadError as error:
    print("error", error)
"""


def fetch(tmp_path: Path, endpoint: str, text: str, revision: str = "", **variables: str) -> tuple[str, str]:
    """What `fetch` did in a process of its own: ("path" or "error", which)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1"} | variables
    environment |= {"no_proxy": "127.0.0.1", "HF_HUB_DISABLE_XET": "1", "HF_HUB_ETAG_TIMEOUT": "3"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, text, str(tmp_path), revision],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if not line.startswith("told")]
    assert lines, done.stderr
    what, _, value = "\n".join(lines).partition(" ")
    return what, value


def names(path: str) -> set[str]:
    root = Path(path)
    return {file.relative_to(root).as_posix() for file in root.rglob("*") if not file.is_dir()}


def test_only_what_serving_needs_is_fetched(tmp_path: Path) -> None:
    with hub_server(Hub({"acme/story": FILES})) as endpoint:
        what, path = fetch(tmp_path, endpoint, "acme/story")
    assert what == "path", path
    assert names(path) == {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert Path(path, "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_what_is_here_is_not_fetched_again(tmp_path: Path) -> None:
    hub = Hub({"acme/story": FILES})
    with hub_server(hub) as endpoint:
        first = fetch(tmp_path, endpoint, "acme/story")
        hub.fetched.clear()
        assert fetch(tmp_path, endpoint, "acme/story") == first
    assert hub.fetched == []


def test_offline_takes_what_is_here_and_says_when_it_is_not(tmp_path: Path) -> None:
    with hub_server(Hub({"acme/story": FILES})) as endpoint:
        first = fetch(tmp_path, endpoint, "acme/story")
    assert fetch(tmp_path, endpoint, "acme/story", HF_HUB_OFFLINE="1") == first
    what, message = fetch(tmp_path / "empty", endpoint, "acme/story", HF_HUB_OFFLINE="1")
    assert what == "error" and "not whole in the hub's cache" in message


def test_a_download_that_breaks_off_is_gone_on_with(tmp_path: Path) -> None:
    hub = Hub({"acme/story": FILES}, cut={"model.safetensors": 100_000})
    with hub_server(hub) as endpoint:
        what, path = fetch(tmp_path, endpoint, "acme/story")
        if what == "error":  # the next start goes on
            what, path = fetch(tmp_path, endpoint, "acme/story")
    assert what == "path", path
    assert Path(path, "model.safetensors").read_bytes() == FILES["model.safetensors"]


@pytest.mark.parametrize("token", ["", "hf_wrong"])
def test_a_private_model_says_that_it_wants_a_token(tmp_path: Path, token: str) -> None:
    with hub_server(Hub({"acme/secret": FILES}, private=frozenset({"acme/secret"}))) as endpoint:
        what, message = fetch(tmp_path, endpoint, "acme/secret", **({"HF_TOKEN": token} if token else {}))
        assert what == "error"
        assert "acme/secret" in message and "HF_TOKEN" in message
        assert not token or token not in message
        assert fetch(tmp_path, endpoint, "acme/secret", HF_TOKEN="hf_right")[0] == "path"


def test_a_gated_model_says_what_to_do(tmp_path: Path) -> None:
    with hub_server(Hub({"acme/gated": FILES}, gated=frozenset({"acme/gated"}))) as endpoint:
        what, message = fetch(tmp_path, endpoint, "acme/gated")
    assert what == "error"
    assert "acme/gated" in message and "asked for on its page" in message


def test_an_unknown_model_and_an_unknown_revision_are_told_apart(tmp_path: Path) -> None:
    with hub_server(Hub({"acme/story": FILES})) as endpoint:
        _, unknown = fetch(tmp_path, endpoint, "acme/tale")
        _, revision = fetch(tmp_path, endpoint, "acme/story", "v9")
    assert "no such model" in unknown and "acme/tale" in unknown
    assert "no such branch, tag or commit" in revision and "v9" in revision


def test_a_hub_that_cannot_be_reached_is_told(tmp_path: Path) -> None:
    what, message = fetch(tmp_path, "http://127.0.0.1:9", "acme/story")
    assert what == "error" and "acme/story" in message


@pytest.mark.parametrize("text", ["gpt2", "acme/story", "Qwen/Qwen2.5-0.5B-Instruct"])
def test_names_of_the_hub(text: str) -> None:
    assert is_hub_id(text)
    assert hub_id(f"hf://{text}") == text


@pytest.mark.parametrize("text", ["", "/opt/ml/model", "a/b/c", "./model", "../x", "s3://b/x", "a b", "x--y"])
def test_what_is_no_name_of_the_hub(text: str) -> None:
    assert not is_hub_id(text) or text == "./model"
    if text != "./model":
        with pytest.raises(DownloadError):
            hub_id(text)
