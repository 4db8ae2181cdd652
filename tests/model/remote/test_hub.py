"""Models of the hub, from a hub on this machine. huggingface_hub reads its settings when it is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.remote.hub import hub_id, is_hub_id
from tests.support.hub_server import Hub, hub_server

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


def fetch(
    tmp_path: Path,
    endpoint: str,
    text: str,
    revision: str = "",
    told: list[str] | None = None,
    before: str = "",
    *,
    variables: Mapping[str, str] = {},
) -> tuple[str, str]:
    """What `fetch` did in a process of its own, after the line `before`: ("path" or "error", which)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1"} | dict(variables)
    environment |= {"no_proxy": "127.0.0.1", "HF_HUB_DISABLE_XET": "1", "HF_HUB_ETAG_TIMEOUT": "3"}
    done = subprocess.run(
        [sys.executable, "-c", before + PROGRAM, text, str(tmp_path), revision],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if told is not None:
        told += [line for line in done.stdout.splitlines() if line.startswith("told")]
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
    assert fetch(tmp_path, endpoint, "acme/story", variables={"HF_HUB_OFFLINE": "1"}) == first
    what, message = fetch(tmp_path / "empty", endpoint, "acme/story", variables={"HF_HUB_OFFLINE": "1"})
    assert what == "error" and "not whole in the hub's cache" in message


def test_a_download_that_breaks_off_is_gone_on_with(tmp_path: Path) -> None:
    hub = Hub({"acme/story": FILES}, cut={"model.safetensors": 100_000})
    with hub_server(hub) as endpoint:
        what, path = fetch(tmp_path, endpoint, "acme/story")
        if what == "error":  # the next start goes on
            what, path = fetch(tmp_path, endpoint, "acme/story")
    assert what == "path", path
    assert Path(path, "model.safetensors").read_bytes() == FILES["model.safetensors"]


WEIGHTS = FILES["model.safetensors"]


@pytest.mark.parametrize(
    ("name", "sent", "said"),
    [
        (
            "model.safetensors",
            b"\1" + WEIGHTS[1:],
            "model.safetensors arrived with another SHA-256 (the hub's SHA-256: ",
        ),
        ("model.safetensors", WEIGHTS[:-1000], "model.safetensors arrived with 1,023,000 bytes instead of 1,024,000"),
        (
            "config.json",
            b'{"model_type": "lLama"}',
            "config.json arrived with another git SHA-1 (the hub's git SHA-1: ",
        ),
    ],
    ids=["a wrong byte", "cut", "a small file"],
)
def test_a_file_that_is_not_what_the_hub_says_is_removed_and_fetched_again(
    tmp_path: Path, name: str, sent: bytes, said: str
) -> None:
    hub = Hub({"acme/story": FILES}, changed={name: sent})
    with hub_server(hub) as endpoint:
        what, message = fetch(tmp_path, endpoint, "acme/story")
        assert what == "error" and "acme/story" in message and said in message
        assert "removed, and the next start fetches again" in message and "HF_ENDPOINT" in message
        assert not [path for path in (tmp_path / "hf").rglob("*") if path.is_file() and path.read_bytes() == sent]
        hub.changed.clear()
        hub.fetched.clear()
        what, path = fetch(tmp_path, endpoint, "acme/story")
    assert what == "path" and Path(path, name).read_bytes() == FILES[name]
    assert hub.fetched == [name]


def test_a_file_is_compared_once(tmp_path: Path) -> None:
    with hub_server(Hub({"acme/story": FILES})) as endpoint:
        _, path = fetch(tmp_path, endpoint, "acme/story")
        file = Path(path, "model.safetensors").resolve()
        state = file.stat()
        file.write_bytes(b"\1" + WEIGHTS[1:])
        # As if it had gone bad on the disk: nobody reads everything at every start.
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
        assert fetch(tmp_path, endpoint, "acme/story") == ("path", path)
        # Written anew, by whomever.
        os.utime(file)
        assert fetch(tmp_path, endpoint, "acme/story")[0] == "error"


def test_how_far_the_download_is_stands_in_the_log(tmp_path: Path) -> None:
    told: list[str] = []
    hub = Hub({"acme/story": FILES | {"model.safetensors": WEIGHTS * 20}}, bytes_per_second=10e6)
    often = "from djl_trtllm.model.remote import hub_files, progress\n"
    often += "hub_files._LOOK_EVERY_SECONDS = progress._TELL_EVERY_SECONDS = 0.3\n"
    with hub_server(hub) as endpoint:
        assert fetch(tmp_path, endpoint, "acme/story", told=told, before=often)[0] == "path"
        assert any(
            re.search(r"downloading acme/story from http://127.0.0.1:\d+: 4 files, 20.5 MB$", line) for line in told
        )
        assert any(re.search(r"downloading acme/story: \S+ MB of 20.5 MB, .*/s, \d+ s left", line) for line in told)
        assert any(re.search(r"downloading acme/story: 20.5 MB in \S+ s", line) for line in told)
        told.clear()
        fetch(tmp_path, endpoint, "acme/story", told=told)
    assert [line.removeprefix("told ") for line in told] == ["acme/story is in the hub's cache: 4 files, 20.5 MB"]


def test_bars_and_requests_of_the_hubs_library_stay_out_of_the_log(tmp_path: Path) -> None:
    logged = tmp_path / "log"
    to_file = f"import logging, sys; sys.stderr = open({str(logged)!r}, 'w'); logging.basicConfig(level='INFO')\n"
    with hub_server(Hub({"acme/story": FILES})) as endpoint:
        assert fetch(tmp_path, endpoint, "acme/story", before=to_file)[0] == "path"
    assert "Fetching" not in logged.read_text() and "HTTP Request" not in logged.read_text()


def test_room_is_wanted_for_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = "import shutil; shutil.disk_usage = lambda path: type('Usage', (), {'free': 257 << 20})"
    with hub_server(Hub({"acme/story": FILES | {"model.safetensors": WEIGHTS * 2}})) as endpoint:
        what, message = fetch(tmp_path, endpoint, "acme/story", before=usage)
        assert what == "error" and "2.0 MB of it are still to come" in message and "HF_HOME" in message
        assert fetch(tmp_path, endpoint, "acme/story")[0] == "path"
        assert fetch(tmp_path, endpoint, "acme/story", before=usage.replace("257 << 20", "0"))[0] == "path"


@pytest.mark.parametrize("token", ["", "hf_wrong"])
def test_a_private_model_says_that_it_wants_a_token(tmp_path: Path, token: str) -> None:
    with hub_server(Hub({"acme/secret": FILES}, private=frozenset({"acme/secret"}))) as endpoint:
        environ: dict[str, str] = {"HF_TOKEN": token} if token else {}
        what, message = fetch(tmp_path, endpoint, "acme/secret", variables=environ)
        assert what == "error"
        assert "acme/secret" in message and "HF_TOKEN" in message
        assert not token or token not in message
        assert fetch(tmp_path, endpoint, "acme/secret", variables={"HF_TOKEN": "hf_right"})[0] == "path"


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
