"""Models of the hub, from a hub on this machine."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.remote import fetch as hub_module
from djl_trtllm.model.remote.fetch import (
    HubFile,
    RepositoryFolder,
    config_files,
    explain,
    fetch,
    hub_id,
    is_hub_id,
    needed,
    nested_engines,
    served_files,
    tokenizer_files,
)
from djl_trtllm.progress import ProgressMeter
from tests.support.stub_http import Hub
from tests.support.tables import by_rows, by_table

COMMIT = "0123456789"
BLOB_WEIGHTS, BLOB_CONFIG = b"weights" * 1000, b"{}"
SHA256 = hashlib.sha256(BLOB_WEIGHTS).hexdigest()
SHA1 = hashlib.sha1(b"blob 2\0" + BLOB_CONFIG, usedforsecurity=False).hexdigest()
BLOBS = {
    "model.safetensors": HubFile(len(BLOB_WEIGHTS), "SHA-256", SHA256),
    "sub/config.json": HubFile(len(BLOB_CONFIG), "git SHA-1", SHA1),
}


@pytest.fixture
def folder(tmp_path: Path) -> RepositoryFolder:
    """A repository's folder as the hub's library leaves it: links in a snapshot to blobs."""
    (tmp_path / "blobs").mkdir()
    for name, file in BLOBS.items():
        (tmp_path / "blobs" / file.checksum).write_bytes(BLOB_WEIGHTS if "model" in name else BLOB_CONFIG)
        link = tmp_path / "snapshots" / COMMIT / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(tmp_path / "blobs" / file.checksum)
    return RepositoryFolder(tmp_path)


def checked(folder: RepositoryFolder, files: dict[str, HubFile] = BLOBS) -> list[str]:
    """The lines that comparing prints."""
    lines: list[str] = []
    folder.check("acme/story", folder.path / "snapshots" / COMMIT, files, lines.append)
    return lines


def refused(folder: RepositoryFolder, files: dict[str, HubFile] = BLOBS) -> str:
    with pytest.raises(DownloadError) as caught:
        checked(folder, files)
    return str(caught.value)


def record_of(folder: RepositoryFolder) -> dict[str, list[object]]:
    record: dict[str, list[object]] = json.loads((folder.path / ".djl-trtllm-checked.json").read_bytes())
    return record


# -- what is still to come -----------------------------------------------------------------------------------------


def test_what_has_not_arrived_is_still_to_come(folder: RepositoryFolder, tmp_path: Path) -> None:
    size = len(BLOB_WEIGHTS)
    assert folder.missing_bytes(COMMIT, BLOBS) == 0
    assert folder.missing_bytes("another", BLOBS) == 0  # the same content under another commit
    assert folder.missing_bytes(COMMIT, {"sub/config.json": HubFile(2, "", "")}) == 0
    assert folder.missing_bytes(COMMIT, {"other.json": HubFile(2, "", "")}) == 2
    assert RepositoryFolder(tmp_path / "nowhere").missing_bytes(COMMIT, BLOBS) == size + len(BLOB_CONFIG)
    (tmp_path / "blobs" / SHA256).unlink()
    assert folder.missing_bytes(COMMIT, BLOBS) == size
    arriving = tmp_path / "blobs" / f"{SHA256}.incomplete"
    arriving.write_bytes(BLOB_WEIGHTS[:100])
    assert folder.missing_bytes(COMMIT, BLOBS) == size - 100
    with arriving.open("wb") as holes:
        holes.truncate(size)
    assert folder.missing_bytes(COMMIT, BLOBS) == size
    arriving.write_bytes(BLOB_WEIGHTS * 2)
    assert folder.missing_bytes(COMMIT, BLOBS) == 0


# -- what arrives --------------------------------------------------------------------------------------------------


def test_what_arrives_in_the_block_is_noted_while_it_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_LOOK_EVERY_SECONDS", 0.001)
    arrived = threading.Event()
    progress = ProgressMeter("it", 1000, lambda line: None)
    add = progress.add

    def noted(count: int) -> None:
        add(count)
        if count:
            arrived.set()

    progress.add = noted  # type: ignore[method-assign]
    with RepositoryFolder(tmp_path / "new").watched(progress):
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "hub-progress")
        assert thread.daemon
        (tmp_path / "new" / "blobs").mkdir(parents=True)
        for size in (300, 700, 650):
            (tmp_path / "new" / "blobs" / "more.incomplete").write_bytes(b"x" * size)
            assert arrived.wait(300)
            arrived.clear()
        monkeypatch.undo()
        (tmp_path / "new" / "blobs" / "last").write_bytes(b"x")
    assert progress.done == 651 and not thread.is_alive()


# -- comparing -----------------------------------------------------------------------------------------------------


def test_files_are_compared_once_and_again_where_they_were_written(folder: RepositoryFolder, tmp_path: Path) -> None:
    (line,) = checked(folder)
    assert line.startswith("comparing acme/story with the hub's checksums: 7.0 kB in ")
    assert set(record_of(folder)) == {f"blobs/{SHA256}", f"blobs/{SHA1}"}
    assert checked(folder) == []
    for blob, size in ((SHA256, "7.0 kB"), (SHA1, "2 bytes")):
        os.utime(tmp_path / "blobs" / blob, (5, 5))
        (line,) = checked(folder)
        assert f"{size} in" in line
    other = BLOBS | {"model.safetensors": HubFile(len(BLOB_WEIGHTS), "SHA-256", "0" * 64)}
    assert "a different SHA-256" in refused(folder, other)
    (tmp_path / "blobs" / SHA256).unlink(missing_ok=True)
    os.utime(tmp_path / "blobs" / SHA1, (6, 6))
    checked(folder, {"sub/config.json": BLOBS["sub/config.json"]})
    assert set(record_of(folder)) == {f"blobs/{SHA1}"}  # the other one is gone
    assert sorted(path.name for path in tmp_path.iterdir()) == [".djl-trtllm-checked.json", "blobs", "snapshots"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model.safetensors": BLOB_WEIGHTS[:-1] + b"x"}, f"a different SHA-256 (the hub's SHA-256: {SHA256})"),
        ({"model.safetensors": BLOB_WEIGHTS[:-1]}, f"6,999 bytes instead of 7,000 (the hub's SHA-256: {SHA256})"),
        ({"model.safetensors": None}, f"0 bytes instead of 7,000 (the hub's SHA-256: {SHA256})"),
        ({"sub/config.json": b"[]"}, f"a different git SHA-1 (the hub's git SHA-1: {SHA1})"),
        ({"sub/config.json": b""}, f"0 bytes instead of 2 (the hub's git SHA-1: {SHA1})"),
        ({"model.safetensors": b"x", "sub/config.json": b"x"}, "1 bytes instead of 7,000"),
    ],
)
def test_what_is_not_what_the_hub_says_is_removed_and_reported(
    folder: RepositoryFolder, tmp_path: Path, changed: dict[str, bytes | None], said: str
) -> None:
    for name, content in changed.items():
        blob = tmp_path / "blobs" / BLOBS[name].checksum
        blob.unlink() if content is None else blob.write_bytes(content)
    text = refused(folder)
    assert text.startswith(f"{next(iter(changed))} arrived with {said}") and "HF_ENDPOINT" in text
    assert text.count(" arrived with ") == len(changed)
    for name in changed:
        assert not (tmp_path / "blobs" / BLOBS[name].checksum).exists()
        assert not (tmp_path / "snapshots" / COMMIT / name).is_symlink()
    assert len(record_of(folder)) == 2 - len(changed)


def test_what_the_hub_does_not_tell_is_not_compared(folder: RepositoryFolder, tmp_path: Path) -> None:
    unknown = {f"{number}.json": HubFile.listed(1, None, None) for number in range(7)}
    (line,) = checked(folder, unknown)
    assert line == "acme/story: the hub has no checksum to compare for 0.json, 1.json, 2.json, 3.json, 4.json"
    assert not (folder.path / ".djl-trtllm-checked.json").exists()
    files = {"model.safetensors": HubFile.listed(None, SHA256, "pointer")}
    assert len(checked(folder, files)) == 1
    (tmp_path / "blobs" / SHA256).write_bytes(b"x")
    assert refused(folder, files).startswith("model.safetensors arrived with a different SHA-256")


def test_a_folder_that_cannot_be_written_is_taken_as_it_is(
    folder: RepositoryFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blobs" / SHA256).write_bytes(b"x")
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (tmp_path, os.W_OK))
    assert checked(folder) == []


# -- the record ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", [b"", b"{", b"[]", b'{"blobs/x": 3}'])
def test_a_record_that_is_broken_or_cannot_be_written_costs_time_only(
    folder: RepositoryFolder, tmp_path: Path, record: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / ".djl-trtllm-checked.json").write_bytes(record)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        assert len(checked(folder)) == 1
    assert len(checked(folder)) == 1
    assert len(record_of(folder)) == 2


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


@pytest.fixture(autouse=True)
def story(hub: Hub) -> None:
    """The hub has one model."""
    hub.repositories["acme/story"] = dict(FILES)


def get(cache: Path, text: str = "acme/story", told: list[str] | None = None, **arguments: Any) -> Path:
    """Fetch a model into a cache of the hub's."""
    tell = (told if told is not None else []).append
    return fetch(text, cache / "downloads", tell, hub_cache=cache, **arguments)


def refusal(cache: Path, text: str = "acme/story", revision: str | None = None, **arguments: Any) -> str:
    """Why a model is not fetched."""
    with pytest.raises(DownloadError) as caught:
        get(cache, text, revision=revision, **arguments)
    head, _, reason = str(caught.value).partition(" hub: ")
    assert head == f"cannot download {text if revision is None else f'{text} at {revision}'} from the Hugging Face"
    return reason


def names(path: Path) -> set[str]:
    return {file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir()}


def test_for_its_tokenizer_a_model_comes_without_weights(hub: Hub, tmp_path: Path) -> None:
    path = get(tmp_path, "hf://acme/story", tokenizer_only=True)
    assert names(path) == NEEDED - {"model.safetensors"}
    assert get(tmp_path, "hf://acme/story") == path
    assert sorted(hub.fetched) == sorted(NEEDED)


def test_what_is_here_is_neither_fetched_nor_compared_again(hub: Hub, tmp_path: Path) -> None:
    told, cache = list[str](), tmp_path / "not" / "there"
    path = get(cache, told=told, revision="main")
    assert path.is_relative_to(cache) and names(path) == NEEDED
    assert {name: (path / name).read_bytes() for name in NEEDED} == {name: FILES[name] for name in NEEDED}
    head = "downloading acme/story at main from http://127.0.0.1:"
    assert told[0].startswith(head) and told[0].endswith(": 5 files, 1.0 MB")
    assert [line.split(": 1.0 MB in")[0] for line in told[1:]] == [
        "downloading acme/story at main",
        "comparing acme/story at main with the hub's checksums",
    ]
    hub.fetched.clear()
    told.clear()
    file = (path / "model.safetensors").resolve()
    state = file.stat()
    file.write_bytes(b"\1" + WEIGHTS[1:])
    # As if it had gone bad on the disk: nobody reads everything at every start.
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert get(cache, told=told) == path
    assert told == ["acme/story is in the hub's cache: 5 files, 1.0 MB"]
    assert hub.fetched == []
    os.utime(file)  # written anew, by whomever
    assert "arrived with a different SHA-256" in refusal(cache)


def test_offline_takes_what_is_here_and_says_when_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    path, told = get(tmp_path / "full"), list[str]()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert get(tmp_path / "full", told=told) == path
    assert told == ["HF_HUB_OFFLINE is set: taking acme/story from the hub's cache"]
    assert refusal(tmp_path / "empty").startswith("it is not complete in the hub's cache")


def test_a_download_that_breaks_off_is_gone_on_with(hub: Hub, tmp_path: Path) -> None:
    hub.cut["model.safetensors"] = 100_000
    told: list[str] = []
    with suppress(DownloadError):
        get(tmp_path)
    path = get(tmp_path)
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    (path / "config.json").resolve().unlink()
    (path / "config.json").unlink()
    assert get(tmp_path, told=told) == path
    assert told[0].endswith(": 5 files, 1.0 MB, 1.0 MB of them here already")


def test_bars_and_requests_of_the_hubs_library_are_in_the_log_only_if_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    clients = [logging.getLogger(name) for name in ("httpx2", "httpx", "urllib3")]
    for client in clients:
        client.setLevel(logging.NOTSET)
    caplog.set_level(logging.DEBUG)
    get(tmp_path)
    assert "/api/models/" not in caplog.text and capsys.readouterr().err == ""
    for client in clients:
        client.setLevel(logging.DEBUG)
    get(tmp_path)
    assert "/api/models/acme/story" in caplog.text


def test_files_of_a_branch_that_moves_meanwhile_are_compared_with_the_list_of_their_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = hub_module.list_files

    def before_the_move(repository: str, revision: str | None, *further: Any) -> tuple[str, dict[str, HubFile]]:
        commit, files = listed(repository, revision, *further)
        if revision is not None:
            return commit, files
        return "f" * 40, {name: file._replace(checksum="0" * len(file.checksum)) for name, file in files.items()}

    monkeypatch.setattr(hub_module, "list_files", before_the_move)
    assert names(get(tmp_path)) == NEEDED


def test_room_is_wanted_for_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = sum(len(FILES[name]) for name in NEEDED) + (256 << 20)
    for left, fits in ((free - 1, False), (free, True), (0, True)):  # the last time nothing is missing
        monkeypatch.setattr(shutil, "disk_usage", lambda path, left=left: SimpleNamespace(free=left))
        if fits:
            get(tmp_path)
        else:
            error = refusal(tmp_path)
            assert (
                "1.0 MB more are needed on the disk of" in error and "269.5 MB are free (268.4 MB stay free)" in error
            )
            assert "HF_HOME" in error


# -- what the hub refuses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["", "hf_wrong"])
def test_a_private_model_says_that_it_wants_a_token(
    hub: Hub, tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.private = frozenset({"acme/story"})
    monkeypatch.setenv("HF_TOKEN", token)
    error = refusal(tmp_path)
    assert "HF_TOKEN" in error and (not token or token not in error)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    get(tmp_path)


def test_a_token_of_the_configuration_is_used_unless_the_environment_has_one(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.private = frozenset({"acme/story"})
    get(tmp_path / "a", hub_token="hf_right")
    monkeypatch.setenv("HF_TOKEN", " ")
    get(tmp_path / "b", hub_token="hf_right")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    get(tmp_path / "c", hub_token="hf_wrong")
    monkeypatch.delenv("HF_TOKEN")
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "hf_wrong")
            error = refusal(tmp_path / "d", hub_token="hf_right")
        assert "HF_TOKEN" in error and "option.hf_access_token" not in error


@pytest.mark.parametrize("token", ["hf_wrong", "two words", "a\nb", "t\u00f6ken", ""])
def test_a_wrong_token_of_the_configuration_is_named_and_not_shown(
    hub: Hub, tmp_path: Path, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    hub.private = frozenset({"acme/story"})
    error = refusal(tmp_path, hub_token=token)
    assert "option.hf_access_token" in error and "HF_TOKEN" not in error
    assert not token or token not in error + caplog.text


def test_what_the_hub_does_not_give_is_refused_with_the_reason(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    assert refusal(tmp_path, "acme/tale").startswith("there is no such model, or it is private")
    assert refusal(tmp_path, revision="v9").startswith("it has no such branch")
    hub.gated = frozenset({"acme/story"})
    assert refusal(tmp_path).startswith("it is gated: request access on its page")
    hub.gated = frozenset()
    hub.repositories["acme/story"] = {".gitattributes": b""}
    assert refusal(tmp_path) == "it has no files that can be served"
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    unreached = refusal(tmp_path)
    assert unreached.startswith("no connection to http://127.0.0.1:9 (Conn") and "Connection refused" in unreached
    assert unreached.endswith("check the network, proxies and HF_ENDPOINT")


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
    assert explain(ConnectionResetError("by peer")).startswith("no connection to http://127.0.0.1:")


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["gpt2", "acme/story", "Qwen/Qwen2.5-0.5B-Instruct", "a" * 96 + "/" + "b" * 96])
def test_names_of_the_hub(text: str) -> None:
    assert is_hub_id(text)
    assert hub_id(f"hf://{text}/") == hub_id(text) == text


@by_rows(
    "text",
    [
        *("", "/opt/ml/model", "a/b/c", "../x", "s3://b/x", "a b", "x--y", "x..y", "acme/story.git", "a" * 97, "é/x\n"),
        *("./story", ".story", "~/story", "acme/.story", "-acme/story", "acme./story", "story.", "model.tar.gz"),
        *("acme/serving.properties", "tensorrt_llm/config.pbtxt", "story/config.yaml", "config.yml"),
    ],
)
def test_what_is_no_name_of_the_hub(text: str) -> None:
    assert not is_hub_id(text)
    with pytest.raises(DownloadError, match="is not the name of a model on the hub: expected owner/name"):
        hub_id(text)


# -- the files that are downloaded -------------------------------------------------------------------------------------


@by_table("present", "left_out")
def test_one_set_of_weights_and_what_belongs_to_it(present: list[str], left_out: list[str]) -> None:
    assert needed([*left_out, *present]) == sorted(present)


def test_beside_safetensors_no_pickled_weights_are_needed() -> None:
    pickled = ["a.bin", "b.pt", "c.pth", "pytorch_model.bin.index.json", "deeper/d.bin", "deeper/e.pt"]
    assert needed(["model.safetensors", *pickled]) == ["model.safetensors"]
    assert needed(pickled) == sorted(pickled)


def test_for_its_tokenizer_alone_a_model_comes_without_weights() -> None:
    kept = ["config.json", "qwen.tiktoken", "tokenization_qwen.py", "tokenizer.json", "tokenizer.model", "vocab.json"]
    weights = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "1/rank0.engine"]
    assert tokenizer_files([*kept, *weights, "onnx/tokenizer.json"]) == kept
    pickled = ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth"]
    assert tokenizer_files([*kept, *pickled]) == kept


def test_what_describes_a_model_is_small() -> None:
    kept = ["config.json", "hf_quant_config.json", "model.safetensors.index.json", "serving.properties"]
    kept += ["tensorrt_llm/config.pbtxt", "tokenizer_config.json"]
    other = ["model-00001-of-00002.safetensors", "tokenizer.json", "model.py", "README.md", ".gitattributes"]
    assert config_files([*kept, *other]) == kept
    assert config_files(other) == []


@by_table("present", "nested")
def test_engines_in_other_folders_are_found(present: list[str], nested: list[str]) -> None:
    assert nested_engines(present) == nested
    if nested:
        with pytest.raises(DownloadError, match=", ".join(nested)):
            served_files(iter(present))
    else:
        assert served_files(iter(present)) == needed(present)
