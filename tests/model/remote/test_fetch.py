from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.checkpoint import StoredTensor
from djl_trtllm.model.remote import fetch as fetch_module
from djl_trtllm.model.remote.fetch import (
    fetch,
    is_remote,
    is_remote_destination,
    remote_headers,
    served_files,
    tokenizer_files,
    upload,
)
from tests.support.s3 import Fault, Request, Store, fast_retries
from tests.support.stub_http import Hub
from tests.support.tables import by_table

FILES = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"[]"}


@pytest.fixture
def model(store: Store) -> Store:
    """A store with a model and an archive of one."""
    for name, content in FILES.items():
        store.put(f"team/story/{name}", content)
    store.put("team/model.tar.gz", b"an archive")
    return store


def names(path: Path) -> set[str]:
    return {file.name for file in path.iterdir() if not file.name.startswith(".")}


def tell(line: str) -> None:
    pass


def test_what_is_elsewhere_is_distinguished_from_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme" / "local").mkdir(parents=True)
    for text in ("s3://models/story", "hf://acme/story", "acme/story", "gpt2", "hf://acme/local"):
        assert is_remote(text), text
    for text in ("acme/local", str(tmp_path), "/opt/ml/nowhere", "./acme/story", ""):
        assert not is_remote(text), text
    assert is_remote_destination("s3://models/story") and is_remote_destination("hf://acme/story")
    assert not is_remote_destination("/engines/story") and not is_remote_destination("acme/story")
    for text in ("s3:/models/story", "s3:models", "hf:/acme/story", "hf:acme/story"):
        assert is_remote(text), text
        with pytest.raises(DownloadError, match=r"expected (s3://|owner/name)"):
            is_remote_destination(text)
    for wrong in (lambda: fetch("/opt/ml/nowhere", tmp_path, tell), lambda: upload(tmp_path, "hf://a/b/c", tell)):
        with pytest.raises(DownloadError, match="is not the name of a model on the hub"):
            wrong()


def test_a_model_in_s3_is_a_directory_for_each_selection_and_an_archive_a_file(model: Store, tmp_path: Path) -> None:
    lines = list[str]()
    whole = fetch("s3://models/team/story", tmp_path, lines.append)
    assert lines[0].startswith("downloading s3://models/team/story: 3 files")
    tokenizer = fetch("s3://models/team/story", tmp_path, tell, tokenizer_only=True)
    config = fetch("s3://models/team/story", tmp_path, tell, config_only=True)
    assert names(whole) == set(FILES) and whole.is_relative_to(tmp_path / "s3")
    assert names(tokenizer) == {"config.json", "tokenizer.json"}
    assert names(config) == {"config.json"}
    archive = fetch("s3://models/team/model.tar.gz", tmp_path, tell)
    assert (archive.name, archive.read_bytes()) == ("model.tar.gz", b"an archive")


@pytest.mark.parametrize(
    ("text", "here"), [("story", True), ("acme/story", True), ("hf://story", False), ("a/story", False)]
)
def test_a_name_that_may_be_meant_for_a_directory_is_said_not_to_be_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, here: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme").mkdir()
    lines: list[str] = []

    def download(*_: object, **__: object) -> Path:
        lines.append("asked")
        raise DownloadError("the hub is away")

    monkeypatch.setattr(fetch_module, "download_from_hub", download)
    with pytest.raises(DownloadError, match="the hub is away") as caught:
        fetch(text, tmp_path, lines.append)
    told = [f"no directory {text} here" in line for line in (*lines, str(caught.value))]
    assert told == ([True, False, True] if here else [False, False])


@pytest.mark.parametrize("text", ["acme/story", "hf://acme/story", "hf://acme/story/"])
def test_a_model_of_the_hub_comes_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    asked: list[tuple[Any, ...]] = []

    def download(repository: str, told: object, **arguments: object) -> Path:
        asked.append((repository, told, arguments))
        return tmp_path / "found"

    monkeypatch.setattr(fetch_module, "download_from_hub", download)
    hub = tmp_path / "hub"
    assert fetch(text, tmp_path, tell, revision="v2", hub_cache=hub, hub_token="hf_x") == tmp_path / "found"
    assert fetch(text, tmp_path, tell, tokenizer_only=True) == tmp_path / "found"
    assert asked == [
        ("acme/story", tell, {"revision": "v2", "cache_dir": hub, "token": "hf_x", "select": served_files}),
        ("acme/story", tell, {"revision": None, "cache_dir": None, "token": None, "select": tokenizer_files}),
    ]


def test_an_engine_in_folders_is_refused_before_it_is_downloaded(store: Store, tmp_path: Path) -> None:
    for name in ("README.md", "fp16/tp1/config.json", "fp16/tp1/rank0.engine"):
        store.put(f"team/engine/{name}", b"{}")
    with pytest.raises(DownloadError, match=r"folders: fp16/tp1/config\.json, fp16/tp1/rank0\.engine; expected"):
        fetch("s3://models/team/engine", tmp_path, tell)
    assert not list(tmp_path.rglob("rank0.engine"))


UPLOADED = {"config.json": b"{}", "1/rank0.engine": b"engine" * 100, "empty": b"", "z.json": b"[]"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name, content in UPLOADED.items():
        (tmp_path / "engine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "engine" / name).write_bytes(content)
    return tmp_path / "engine"


def contents(store: Store) -> dict[str, bytes]:
    return {key: value.path.read_bytes() for key, value in store.objects.items()}


def test_every_file_goes_up_under_its_name(store: Store, directory: Path) -> None:
    lines: list[str] = []
    upload(directory, "s3://models/team/engine/", lines.append)
    assert contents(store) == {f"team/engine/{name}": content for name, content in UPLOADED.items()}
    assert lines[0] == "uploading to s3://models/team/engine: 4 files, 604 bytes"
    assert lines[1].startswith("uploading to s3://models/team/engine: 604 bytes in ")
    assert len(lines) == 2


def test_one_file_goes_up_last_where_asked(store: Store, directory: Path) -> None:
    for last in ("config.json", "z.json"):
        store.clear()
        upload(directory, "s3://models", tell, last=last)
        puts = [request.key for request in store.requests if request.method == "PUT"]
        assert len(puts) == 4 and puts[-1] == last


def test_what_is_sent_again_is_counted_once(store: Store, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = iter(range(20))  # botocore repeats less often

    def fault(request: Request) -> None:
        if request.method == "PUT" and next(refused, None) is not None:
            raise Fault(503, "SlowDown")

    store.fault = fault
    monkeypatch.setattr("random.uniform", lambda least, most: 0.0)
    lines: list[str] = []
    with fast_retries(monkeypatch):
        upload(directory, "s3://models/x", lines.append)
    assert lines[-1].startswith("uploading to s3://models/x: 604 bytes in ")
    assert len(store.objects) == len(UPLOADED)


def test_an_upload_that_the_store_has_completed_and_does_not_know_any_more_is_complete(
    store: Store, directory: Path
) -> None:
    upload(directory, "s3://models/x", tell)

    def forget(request: Request) -> None:
        if request.method == "PUT":
            raise Fault(404, "NoSuchUpload")

    store.fault = forget
    upload(directory, "s3://models/x", tell)
    losses: list[Callable[[], None]] = [lambda: store.put("x/z.json", b"["), store.objects.clear]
    for lose in losses:
        lose()
        with pytest.raises(DownloadError, match="NoSuchUpload"):
            upload(directory, "s3://models/x", tell)


@by_table("status", "code", "says", apart=True)  # fmt: skip
def test_why_the_store_refuses_is_reported_with_what_to_do(
    store: Store, directory: Path, status: int, code: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(request: Request) -> int | None:
        raise Fault(status, code)

    store.fault = refuse
    if not status:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match=f"s3://models/x: {says}"):
        upload(directory, "s3://models/x", tell)


# -- the hub -------------------------------------------------------------------------------------------------------


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, Any]]:
    """What is asked of the hub, with its token."""
    import huggingface_hub

    calls: list[tuple[str, Any, Any]] = []

    def noted(name: str) -> Callable[..., None]:
        return lambda api, *arguments, **named: calls.append((name, api.token, arguments or named))

    for name in ("create_repo", "upload_folder"):
        monkeypatch.setattr(huggingface_hub.HfApi, name, noted(name))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_a_repository_on_the_hub_is_made_private_with_the_token_of_the_configuration(
    directory: Path, api: list[tuple[str, Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    lines: list[str] = []
    upload(directory, "hf://acme/engine", lines.append, hub_token="hf_given")
    assert api == [
        ("create_repo", "hf_given", ("acme/engine",)),
        ("upload_folder", "hf_given", {"repo_id": "acme/engine", "folder_path": directory}),
    ]
    assert lines == ["uploading to acme/engine on the hub (private, where it is new)"]
    with pytest.raises(DownloadError, match=r"option\.hf_access_token is not a token") as caught:
        upload(directory, "hf://acme/engine", tell, hub_token="two words")
    assert "two words" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_environment")  # which the library reads itself
    created: list[object] = []
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda api, name, **named: created.append(named))
    upload(directory, "hf://acme/engine", tell, hub_token="hf_given")
    assert created == [{"private": True, "exist_ok": True}] and api[-1][1] is None

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("too large")

    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", refuse)
    with pytest.raises(DownloadError, match=r"cannot upload .*engine to acme/engine: ValueError: too large"):
        upload(directory, "hf://acme/engine", tell)


def weights(**tensors: list[int]) -> bytes:
    """A safetensors file in bf16 without its weights' bytes beyond 64: nothing may ask for them."""
    header, at = {}, 0
    for name, shape in tensors.items():
        size = 2 * shape[0] * shape[1]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * at


WEIGHED = {
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": weights(a=[200, 1000]),
    "model-00002-of-00002.safetensors": weights(**{f"layer.{index}.{'x' * 200}": [1, 1] for index in range(2000)}),
    "adapter_model.safetensors": weights(c=[1, 1]),
}


def test_headers_in_s3_are_read_without_the_weights(store: Store, tmp_path: Path) -> None:
    for name, content in WEIGHED.items():
        store.put(f"team/story/{name}", content)
    headers = remote_headers("s3://models/team/story", tmp_path)
    assert sorted(headers) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert headers["model-00001-of-00002.safetensors"]["a"].shape == (200, 1000)
    assert len(headers["model-00002-of-00002.safetensors"]) == 2000
    asked = [request.end - request.start for request in store.requests if request.method == "GET" and request.key]
    # The first file's 400,000 bytes are more than what is asked for at first; the second has a long header.
    assert max(asked) < 600_000
    assert sorted(asked)[:2] == [256 * 1024, 256 * 1024]


def test_a_damaged_file_in_s3_is_an_error_with_its_address(store: Store, tmp_path: Path) -> None:
    for content in (b"", (10**9).to_bytes(8, "little") + b"{}", (4).to_bytes(8, "little") + b"[}]!"):
        store.put("team/story/model.safetensors", content)
        with pytest.raises(DownloadError, match=r"s3://models/team/story/model.safetensors .*; upload it again"):
            remote_headers("s3://models/team/story", tmp_path)


def test_headers_on_the_hub_are_read_with_ranges_and_from_files_that_are_here(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    first, second, adapter = list(WEIGHED)[1:]
    (tmp_path / first).write_bytes(weights(local=[1, 1]))
    (tmp_path / adapter).write_bytes(weights(other=[1, 1]))
    with pytest.raises(DownloadError, match="cannot read the sizes of acme/none from the hub: there is no such model"):
        remote_headers("acme/none", tmp_path)
    hub.repositories["acme/story"] = dict(WEIGHED)
    found = remote_headers("hf://acme/story", tmp_path)
    assert sorted(found) == [first, second]
    assert list(found[first]) == ["local"] and len(found[second]) == 2000
    assert found[second][f"layer.7.{'x' * 200}"] == StoredTensor("BF16", (1, 1), (14, 16))
    assert hub.fetched == [second] * 2
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / first).rename(tmp_path / "model.safetensors")
    assert sorted(remote_headers("acme/story", tmp_path)) == ["model.safetensors"]
