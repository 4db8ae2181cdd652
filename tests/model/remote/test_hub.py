"""Models of the hub, from a hub on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.remote import hub as hub_module
from djl_trtllm.model.remote.hub import explain, hub_id, is_hub_id
from tests.model.remote.hub_process import Fetched, HubProcess
from tests.support.hub_server import Hub, hub_server

WEIGHTS = bytes(range(256)) * 4000
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"a copy",
    "tokenizer.json": b"{}",
    "README.md": b"# A model",
    "odd[1]*?.json": b"[]",
    "onnx/model.onnx": b"another copy",
    ".gitattributes": b"",
}
NEEDED = {"config.json", "model.safetensors", "tokenizer.json", "README.md", "odd[1]*?.json"}
OFFLINE = "from huggingface_hub import constants; constants.HF_HUB_OFFLINE = True"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hub, HubProcess]]:
    hub = Hub({})
    with hub_server(hub) as endpoint:
        process = HubProcess(endpoint, tmp_path_factory.mktemp("hub"))
        yield hub, process
        process.close()


@pytest.fixture
def hub(served: tuple[Hub, HubProcess]) -> Hub:
    """A hub with one model."""
    hub = served[0]
    fresh = Hub({"acme/story": dict(FILES)})
    for name in fresh.__dataclass_fields__:
        setattr(hub, name, getattr(fresh, name))
    return hub


@pytest.fixture
def process(served: tuple[Hub, HubProcess], hub: Hub) -> HubProcess:
    return served[1]


def fetched(found: Fetched) -> Path:
    assert found.path is not None, found.error
    return found.path


def names(path: Path) -> set[str]:
    return {file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir()}


def test_only_what_serving_needs_is_fetched(process: HubProcess, tmp_path: Path) -> None:
    path = fetched(process.fetch("acme/story", tmp_path))
    assert names(path) == NEEDED
    assert {name: (path / name).read_bytes() for name in NEEDED} == {name: FILES[name] for name in NEEDED}
    assert path.is_relative_to(tmp_path)


def test_for_its_tokenizer_a_model_comes_without_weights(hub: Hub, process: HubProcess, tmp_path: Path) -> None:
    path = fetched(process.fetch("hf://acme/story", tmp_path, tokenizer_only=True))
    assert names(path) == NEEDED - {"model.safetensors"}
    assert fetched(process.fetch("hf://acme/story", tmp_path)) == path
    assert sorted(hub.fetched) == sorted(NEEDED)


def test_what_is_here_is_not_fetched_again(hub: Hub, process: HubProcess, tmp_path: Path) -> None:
    first = process.fetch("acme/story", tmp_path)
    assert re.fullmatch(r"downloading acme/story from http://127\.0\.0\.1:\d+: 5 files, 1\.0 MB", first.told[0])
    assert re.match(r"downloading acme/story: 1\.0 MB in ", first.told[1])
    assert first.told[2].startswith("comparing acme/story with the hub's checksums: 1.0 MB in ")
    assert len(first.told) == 3
    hub.fetched.clear()
    second = process.fetch("acme/story", tmp_path)
    assert second.path == first.path
    assert second.told == ["acme/story is in the hub's cache: 5 files, 1.0 MB"]
    assert hub.fetched == []


def test_a_revision_is_fetched_and_named(process: HubProcess, tmp_path: Path) -> None:
    found = process.fetch("acme/story", tmp_path, revision="main")
    assert found.told[0].startswith("downloading acme/story at main from http")


def test_offline_takes_what_is_here_and_says_when_it_is_not(process: HubProcess, tmp_path: Path) -> None:
    first = process.fetch("acme/story", tmp_path / "full")
    offline = process.fetch("acme/story", tmp_path / "full", before=OFFLINE)
    assert offline.path == first.path
    assert offline.told == ["HF_HUB_OFFLINE is set: taking acme/story from the hub's cache"]
    missing = process.fetch("acme/story", tmp_path / "empty", before=OFFLINE)
    assert missing.error.startswith(
        "cannot download acme/story from the Hugging Face hub: it is not complete in the hub's"
    )


def test_a_download_that_breaks_off_is_gone_on_with(hub: Hub, process: HubProcess, tmp_path: Path) -> None:
    hub.cut["model.safetensors"] = 100_000
    found = process.fetch("acme/story", tmp_path)
    if found.error:  # the next start goes on
        found = process.fetch("acme/story", tmp_path)
        assert "of them here already" in found.told[0]
    assert (fetched(found) / "model.safetensors").read_bytes() == WEIGHTS


def test_what_has_arrived_already_is_reported(process: HubProcess, tmp_path: Path) -> None:
    path = fetched(process.fetch("acme/story", tmp_path))
    (path / "config.json").resolve().unlink()
    (path / "config.json").unlink()
    again = process.fetch("acme/story", tmp_path)
    assert again.told[0].endswith(": 5 files, 1.0 MB, 1.0 MB of them here already")
    assert again.path == path


@pytest.mark.parametrize(
    ("name", "sent"),
    [("model.safetensors", b"\1" + WEIGHTS[1:]), ("config.json", b'{"model_type": "lLama"}')],
    ids=["a wrong byte", "a small file"],
)
def test_a_file_that_is_not_what_the_hub_says_is_removed_and_fetched_again(
    hub: Hub, process: HubProcess, tmp_path: Path, name: str, sent: bytes
) -> None:
    hub.changed[name] = sent
    error = process.fetch("acme/story", tmp_path).error
    assert error.startswith(f"cannot download acme/story from the Hugging Face hub: {name} arrived with a different ")
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == sent]
    hub.changed.clear()
    hub.fetched.clear()
    assert (fetched(process.fetch("acme/story", tmp_path)) / name).read_bytes() == FILES[name]
    assert hub.fetched == [name]


def test_a_file_is_compared_once(process: HubProcess, tmp_path: Path) -> None:
    path = fetched(process.fetch("acme/story", tmp_path))
    file = (path / "model.safetensors").resolve()
    state = file.stat()
    file.write_bytes(b"\1" + WEIGHTS[1:])
    # As if it had gone bad on the disk: nobody reads everything at every start.
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert process.fetch("acme/story", tmp_path).path == path
    # Written anew, by whomever.
    os.utime(file)
    assert "arrived with a different SHA-256" in process.fetch("acme/story", tmp_path).error


def test_bars_and_requests_of_the_hubs_library_stay_out_of_the_log(process: HubProcess, tmp_path: Path) -> None:
    to_log = "import logging, sys; logging.basicConfig(level='DEBUG', stream=sys.stderr); logging.info('begun')"
    found = process.fetch("acme/story", tmp_path, before=to_log)
    assert found.path is not None and "begun" in found.log
    assert "Fetching" not in found.log and "/api/models/" not in found.log


def test_who_wants_the_requests_in_the_log_has_them(process: HubProcess, tmp_path: Path) -> None:
    to_log = "import logging, sys; logging.basicConfig(level='DEBUG', stream=sys.stderr)\n"
    to_log += "for client in ('httpx', 'urllib3'): logging.getLogger(client).setLevel('DEBUG')"
    assert "/api/models/acme/story" in process.fetch("acme/story", tmp_path, before=to_log).log


def test_room_is_wanted_for_what_is_missing(process: HubProcess, tmp_path: Path) -> None:
    size = sum(len(FILES[name]) for name in NEEDED)
    usage = "import shutil; shutil.disk_usage = lambda path: type('Usage', (), {'free': %d})"
    error = process.fetch("acme/story", tmp_path, before=usage % (size + (256 << 20) - 1)).error
    assert "1.0 MB are still missing, and 269.5 MB are free" in error and "(268.4 MB stay free)" in error
    assert "HF_HOME" in error
    fetched(process.fetch("acme/story", tmp_path, before=usage % (size + (256 << 20))))
    fetched(process.fetch("acme/story", tmp_path, before=usage % 0))


def test_a_cache_that_is_not_there_yet_is_made(process: HubProcess, tmp_path: Path) -> None:
    assert fetched(process.fetch("acme/story", tmp_path / "not" / "there")).is_relative_to(tmp_path / "not" / "there")


# -- what the hub refuses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["", "hf_wrong"])
def test_a_private_model_says_that_it_wants_a_token(hub: Hub, process: HubProcess, tmp_path: Path, token: str) -> None:
    hub.private = frozenset({"acme/story"})
    error = process.fetch("acme/story", tmp_path, environ={"HF_TOKEN": token} if token else {}).error
    assert "acme/story" in error and "HF_TOKEN" in error
    assert not token or token not in error
    fetched(process.fetch("acme/story", tmp_path, environ={"HF_TOKEN": "hf_right"}))


def test_a_token_of_the_configuration_is_used_unless_the_environment_has_one(
    hub: Hub, process: HubProcess, tmp_path: Path
) -> None:
    hub.private = frozenset({"acme/story"})
    fetched(process.fetch("acme/story", tmp_path / "a", token="hf_right"))
    fetched(process.fetch("acme/story", tmp_path / "b", token="hf_right", environ={"HF_TOKEN": " "}))
    fetched(process.fetch("acme/story", tmp_path / "c", token="hf_wrong", environ={"HF_TOKEN": "hf_right"}))
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        error = process.fetch("acme/story", tmp_path / "d", token="hf_right", environ={variable: "hf_wrong"}).error
        assert "HF_TOKEN" in error and "option.hf_access_token" not in error


@pytest.mark.parametrize("token", ["hf_wrong", "two words", "a\nb", "t\u00f6ken", ""])
def test_a_wrong_token_of_the_configuration_is_named_and_not_shown(
    hub: Hub, process: HubProcess, tmp_path: Path, token: str
) -> None:
    hub.private = frozenset({"acme/story"})
    found = process.fetch("acme/story", tmp_path, token=token)
    assert "option.hf_access_token" in found.error and "HF_TOKEN" not in found.error
    assert not token or token not in found.error + found.log


def test_a_gated_model_says_what_to_do(hub: Hub, process: HubProcess, tmp_path: Path) -> None:
    hub.gated = frozenset({"acme/story"})
    error = process.fetch("acme/story", tmp_path).error
    assert error.startswith(
        "cannot download acme/story from the Hugging Face hub: it is gated: request access on its page"
    )


def test_an_unknown_model_and_an_unknown_revision_are_distinguished(process: HubProcess, tmp_path: Path) -> None:
    unknown = process.fetch("acme/tale", tmp_path).error
    assert unknown.startswith("cannot download acme/tale from the Hugging Face hub: there is no such model, or it is")
    revision = process.fetch("acme/story", tmp_path, revision="v9").error
    assert revision.startswith("cannot download acme/story at v9 from the Hugging Face hub: it has no such branch")


def test_a_model_without_files_is_reported(hub: Hub, process: HubProcess, tmp_path: Path) -> None:
    hub.repositories["acme/story"] = {".gitattributes": b""}
    assert process.fetch("acme/story", tmp_path).error.endswith("hub: it has no files that can be served")


def test_a_hub_that_cannot_be_reached_is_reported(process: HubProcess, tmp_path: Path) -> None:
    nowhere = "from huggingface_hub import constants; constants.ENDPOINT = 'http://127.0.0.1:9'"
    error = process.fetch("acme/story", tmp_path, before=nowhere).error
    assert error.startswith(
        "cannot download acme/story from the Hugging Face hub: no connection to http://127.0.0.1:9 (Conn"
    )
    assert "Connection refused" in error and error.endswith("): check the network, proxies and HF_ENDPOINT")


def test_answers_of_the_hub_say_what_to_do() -> None:
    from huggingface_hub import errors

    def answered(status: int) -> Exception:
        response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
        error = errors.HfHubHTTPError.__new__(errors.HfHubHTTPError)
        Exception.__init__(error, "it\nwas so")
        error.response = response
        return error

    assert explain(answered(401)) == "HF_TOKEN is not valid: create a new one under Settings, Access Tokens"
    assert explain(answered(401), "hf_x").startswith("option.hf_access_token is not valid: create a new one")
    assert explain(ValueError("header hf_x"), "hf_x") == "ValueError: header option.hf_access_token"
    assert explain(answered(502)) == "the hub answered with status 502 (it)"
    assert explain(DownloadError("no room")) == "no room"
    assert explain(ValueError("a\nb")) == "ValueError: a"
    assert explain(ValueError()) == "ValueError: no message"
    assert explain(ConnectionResetError("by peer")).startswith(
        "no connection to https://huggingface.co (ConnectionReset"
    )


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["gpt2", "acme/story", "Qwen/Qwen2.5-0.5B-Instruct", "a" * 96 + "/" + "b" * 96])
def test_names_of_the_hub(text: str) -> None:
    assert is_hub_id(text)
    assert hub_id(f"hf://{text}/") == hub_id(text) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "/opt/ml/model", "a/b/c", "../x", "s3://b/x", "a b", "x--y", "x..y", "acme/story.git", "a" * 97, "é/x\n"),
        *("./story", ".story", "~/story", "acme/.story", "-acme/story", "acme./story", "story."),
    ],
)
def test_what_is_no_name_of_the_hub(text: str) -> None:
    assert not is_hub_id(text)
    with pytest.raises(DownloadError, match="is not the name of a model on the hub: expected owner/name"):
        hub_id(text)


def test_a_name_is_a_pattern_for_itself() -> None:
    from fnmatch import fnmatchcase

    for name in ("odd[1]*?.json", "[!a]", "plain.json"):
        assert fnmatchcase(name, hub_module._literal(name))
    assert not fnmatchcase("odd1xy.json", hub_module._literal("odd[1]*?.json"))
