"""A real S3 server keeps and gives models as our own small one does: MinIO, where there is one in PATH."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.remote import s3_download
from djl_trtllm.model.remote.fetch import fetch, remote_headers, upload
from djl_trtllm.model.remote.s3 import S3Address
from djl_trtllm.model.remote.s3_download import RECORD, list_objects
from tests.support.s3 import MINIO, MINIO_SECRET, MOTO_BUCKET, client, minio_server, variables

pytestmark = [pytest.mark.slow, pytest.mark.skipif(MINIO is None, reason="no minio in PATH")]

ADDRESS = f"s3://{MOTO_BUCKET}/team/story"
HEADER = b'{"a": {"dtype": "BF16", "shape": [300, 1000], "data_offsets": [0, 600000]}}'
CONTENT = {
    "config.json": b"{}",
    "model.safetensors": len(HEADER).to_bytes(8, "little") + HEADER + bytes(range(200)) * 3000,
    "engine/nested/file.json": b"[]",
    "empty.txt": b"",
}
_MANY = 2001
"""Keys on three pages of a listing."""


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with minio_server(tmp_path_factory.mktemp("minio")) as url:
        yield url


@pytest.fixture
def store(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of it, whose variables this process has too; a file of several parts is one of 600,000 bytes."""
    for name, value in variables(endpoint, MINIO_SECRET).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3_download, "PART_BYTES", 64 * 1024)
    return client(endpoint, secret=MINIO_SECRET)


def tell(line: str) -> None:
    pass


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != RECORD)
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def test_a_model_that_went_up_comes_back_whole_and_then_what_has_changed(store: Any, tmp_path: Path) -> None:
    for name, content in CONTENT.items():
        (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / name).write_bytes(content)
    upload(tmp_path / "model", ADDRESS, tell)
    assert remote_headers(ADDRESS, tmp_path / "cache")["model.safetensors"]["a"].shape == (300, 1000)
    whole = fetch(ADDRESS, tmp_path / "cache", tell)
    assert contents(whole) == CONTENT
    store.put_object(Bucket=MOTO_BUCKET, Key="team/story/config.json", Body=b'{"changed": true}')
    store.delete_object(Bucket=MOTO_BUCKET, Key="team/story/empty.txt")
    lines = list[str]()
    changed = fetch(ADDRESS, tmp_path / "cache", lines.append)
    expected = {**CONTENT, "config.json": b'{"changed": true}'}
    del expected["empty.txt"]
    assert contents(changed) == expected
    assert "600.1 kB of them here" in lines[0]


def test_a_prefix_of_many_pages_is_listed_whole_and_no_other_one(store: Any) -> None:
    names = [f"many/{number}.json" for number in range(_MANY)] + ["many-others/1.json"]
    with ThreadPoolExecutor(16) as clients:
        list(clients.map(lambda key: store.put_object(Bucket=MOTO_BUCKET, Key=key, Body=b"{}"), names))
    assert len(list_objects(S3Address.parse(f"s3://{MOTO_BUCKET}/many"))) == _MANY


def test_what_is_not_there_is_said(store: Any, tmp_path: Path) -> None:
    for address, said in ((f"s3://{MOTO_BUCKET}/nothing", "nothing"), ("s3://other-bucket/story", "other-bucket")):
        with pytest.raises(DownloadError, match=said):
            fetch(address, tmp_path, tell)
