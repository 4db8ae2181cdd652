from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.remote import fetch as fetch_module
from djl_trtllm.model.remote.fetch import fetch, is_remote
from djl_trtllm.model.remote.selection import served_files, tokenizer_files
from tests.support.s3_server import Store

FILES = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"[]"}


@pytest.fixture
def model(store: Store) -> Store:
    """A store with a model and an archive of one."""
    for name, content in FILES.items():
        store.put(f"team/story/{name}", content)
    store.put("team/model.tar.gz", b"an archive")
    return store


def tell(line: str) -> None:
    pass


def names(path: Path) -> set[str]:
    return {file.name for file in path.iterdir() if not file.name.startswith(".")}


def test_what_has_to_be_fetched_is_distinguished_from_local_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme" / "local").mkdir(parents=True)
    for text in ("s3://models/story", "hf://acme/story", "acme/story", "gpt2", "hf://acme/local"):
        assert is_remote(text), text
    for text in ("acme/local", str(tmp_path), "/opt/ml/nowhere", "./acme/story", ""):
        assert not is_remote(text), text


def test_a_model_in_s3_is_a_directory(model: Store, tmp_path: Path) -> None:
    found = fetch("s3://models/team/story", tmp_path, tell)
    assert names(found) == set(FILES)
    assert found.is_relative_to(tmp_path / "s3")


def test_an_archive_in_s3_is_a_file(model: Store, tmp_path: Path) -> None:
    found = fetch("s3://models/team/model.tar.gz", tmp_path, tell)
    assert (found.name, found.read_bytes()) == ("model.tar.gz", b"an archive")


def test_its_tokenizer_lies_elsewhere_and_leaves_the_model_alone(model: Store, tmp_path: Path) -> None:
    whole = fetch("s3://models/team/story", tmp_path, tell)
    tokenizer = fetch("s3://models/team/story", tmp_path, tell, tokenizer_only=True)
    assert names(tokenizer) == {"config.json", "tokenizer.json"}
    assert tokenizer.is_relative_to(tmp_path / "s3-tokenizers")
    assert names(whole) == set(FILES)


def test_what_describes_it_is_fetched_alone(model: Store, tmp_path: Path) -> None:
    found = fetch("s3://models/team/story", tmp_path, tell, config_only=True)
    assert names(found) == {"config.json"}
    assert found.is_relative_to(tmp_path / "s3-config")


def test_the_download_reports_its_progress(model: Store, tmp_path: Path) -> None:
    lines = list[str]()
    fetch("s3://models/team/story", tmp_path / "a", lines.append)
    assert lines[0].startswith("downloading s3://models/team/story: 3 files")


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


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="is not the name of a model on the hub"):
        fetch("/opt/ml/nowhere", tmp_path, tell)
