"""Downloads from S3: complete and right, or an error; never something in between."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.remote import s3_download
from djl_trtllm.model.remote.s3 import S3Address
from djl_trtllm.model.remote.s3_body import Body
from djl_trtllm.model.remote.s3_download import RECORD, download, list_objects
from tests.engines.helpers import wait_until
from tests.support.s3_server import Fault, Request, Store

ADDRESS = S3Address.parse("s3://models/team/story")
PART = 64 * 1024
CONTENT = {
    "config.json": b'{"model_type": "llama"}',
    "model-00001-of-00002.safetensors": bytes(range(256)) * 1500,
    "model-00002-of-00002.safetensors": bytes(reversed(range(256))) * 700,
    "tokenizer.json": b"{}",
    "empty.txt": b"",
    "engine/nested/file.json": b"[]",
}


@pytest.fixture(autouse=True)
def model(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in the store, in parts of 64 kB."""
    for name, content in CONTENT.items():
        store.put(f"team/story/{name}", content)
    monkeypatch.setattr(s3_download, "_PART_BYTES", PART)
    monkeypatch.setattr(s3_download, "_FIRST_BACKOFF_SECONDS", 0.001)


def fetch(tmp_path: Path, address: S3Address = ADDRESS) -> Path:
    return download(address, tmp_path / "downloads", lambda line: None)


def contents(directory: Path) -> dict[str, bytes]:
    """The files of a download without its record."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != RECORD)
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def no_complete_directory(tmp_path: Path) -> bool:
    return not list((tmp_path / "downloads").glob(f"*/[!.]*/{RECORD}"))


def test_a_download_is_what_is_in_the_store(store: Store, tmp_path: Path) -> None:
    assert contents(fetch(tmp_path)) == CONTENT


def test_one_object_is_a_directory_with_that_file(store: Store, tmp_path: Path) -> None:
    found = fetch(tmp_path, S3Address.parse("s3://models/team/story/config.json"))
    assert contents(found) == {"config.json": CONTENT["config.json"]}


def test_a_prefix_does_not_take_in_its_longer_neighbour(store: Store, tmp_path: Path) -> None:
    store.put("team/story-2/config.json", b"another")
    assert contents(fetch(tmp_path)) == CONTENT


def test_what_is_here_and_unchanged_is_not_fetched_again(store: Store, tmp_path: Path) -> None:
    first = fetch(tmp_path)
    before = len(store.gets())
    assert fetch(tmp_path) == first
    assert len(store.gets()) == before


def test_a_changed_object_is_fetched_again_and_only_that(store: Store, tmp_path: Path) -> None:
    first = fetch(tmp_path)
    store.requests.clear()
    store.put("team/story/tokenizer.json", b'{"changed": true}')
    second = fetch(tmp_path)
    assert contents(second) == CONTENT | {"tokenizer.json": b'{"changed": true}'}
    assert {request.key for request in store.gets()} == {"team/story/tokenizer.json"}
    assert not first.exists()


def test_a_removed_object_is_gone_the_next_time(store: Store, tmp_path: Path) -> None:
    fetch(tmp_path)
    del store.objects["team/story/empty.txt"]
    assert "empty.txt" not in contents(fetch(tmp_path))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, PART - 1), times=st.integers(1, 4))
def test_a_connection_cut_at_any_byte_is_gone_on_with(
    store: Store, tmp_path_factory: pytest.TempPathFactory, cut: int, times: int
) -> None:
    cuts: dict[int, int] = {}

    def fault(request: Request) -> int | None:
        part = request.start // PART
        if request.method != "GET" or cuts.get(part, 0) >= times:
            return None
        cuts[part] = cuts.get(part, 0) + 1
        return min(cut, request.end - request.start - 1)

    store.fault = fault
    name = "model-00002-of-00002.safetensors"
    found = fetch(tmp_path_factory.mktemp("cut"), S3Address.parse(f"s3://models/team/story/{name}"))
    assert contents(found) == {name: CONTENT[name]}


def test_a_connection_that_falls_silent_is_gone_on_with(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = threading.Event()

    def readinto(body: Body, buffer: memoryview) -> int:
        if not silent.is_set():
            silent.set()
            raise ConnectionError("timed out")
        return original(body, buffer)

    original = Body.readinto
    monkeypatch.setattr(Body, "readinto", readinto)
    assert contents(fetch(tmp_path)) == CONTENT
    assert silent.is_set()


def test_a_connection_that_always_breaks_is_an_error_and_leaves_nothing_whole(store: Store, tmp_path: Path) -> None:
    broken = "team/story/model-00001-of-00002.safetensors"
    store.fault = lambda request: 0 if request.method == "GET" and request.key == broken else None
    with pytest.raises(DownloadError, match="safetensors broke off at byte") as error:
        fetch(tmp_path)
    assert "continues from there" in str(error.value)
    assert no_complete_directory(tmp_path)


def test_after_a_failure_the_next_start_fetches_only_what_is_missing(store: Store, tmp_path: Path) -> None:
    broken = "team/story/model-00001-of-00002.safetensors"

    def fault(request: Request) -> int | None:
        return 0 if request.method == "GET" and request.key == broken and request.start >= 3 * PART else None

    store.fault = fault
    with pytest.raises(DownloadError):
        fetch(tmp_path)
    store.fault = None
    store.requests.clear()
    assert contents(fetch(tmp_path)) == CONTENT
    fetched_again = [request for request in store.gets() if request.key == broken and request.start < 3 * PART]
    assert len(fetched_again) < 3  # parts of it may still have been under way


def test_server_errors_are_tried_again(store: Store, tmp_path: Path) -> None:
    def fault(request: Request) -> int | None:
        if request.method == "GET" and request.count < 2:
            raise Fault(500, "InternalError")
        return None

    store.fault = fault
    assert contents(fetch(tmp_path)) == CONTENT


def test_a_wrong_checksum_is_an_error_and_the_file_is_fetched_again(store: Store, tmp_path: Path) -> None:
    damaged = store.objects["team/story/model-00001-of-00002.safetensors"]
    right = damaged.path.read_bytes()
    damaged.path.write_bytes(right[:-1] + b"\0")
    with pytest.raises(DownloadError, match="arrived with a different CRC64NVME than S3 has"):
        fetch(tmp_path)
    assert no_complete_directory(tmp_path)
    damaged.path.write_bytes(right)
    assert contents(fetch(tmp_path)) == CONTENT


def test_without_an_s3_checksum_the_etag_is_compared(store: Store, tmp_path: Path) -> None:
    store.put("team/story/tokenizer.json", b'{"old": true}', checksum=False)
    damaged = store.objects["team/story/tokenizer.json"]
    damaged.path.write_bytes(b'{"old": fals}')
    with pytest.raises(DownloadError, match="arrived with a different MD5"):
        fetch(tmp_path)


def test_an_empty_object_without_an_s3_checksum_arrives(store: Store, tmp_path: Path) -> None:
    store.put("team/story/empty.txt", b"", checksum=False)
    assert contents(fetch(tmp_path)) == CONTENT


def test_an_object_shorter_than_listed_is_an_error(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = store.objects["team/story/model-00001-of-00002.safetensors"]
    listed = list_objects(ADDRESS)
    short.path.write_bytes(b"x" * 1000)
    monkeypatch.setattr(s3_download, "list_objects", lambda address, select: listed)
    with pytest.raises(DownloadError):
        fetch(tmp_path)
    assert no_complete_directory(tmp_path)


def test_an_object_replaced_during_the_download_is_looked_up_again(store: Store, tmp_path: Path) -> None:
    key = "team/story/model-00001-of-00002.safetensors"
    replaced = bytes(range(256)) * 1400
    once = threading.Event()

    def fault(request: Request) -> int | None:
        if request.method == "GET" and request.key == key and request.start >= PART and not once.is_set():
            once.set()
            store.put(key, replaced)
        return None

    store.fault = fault
    assert contents(fetch(tmp_path)) == CONTENT | {"model-00001-of-00002.safetensors": replaced}


def test_a_full_disk_is_reported_before_anything_is_fetched(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=300 * 1024))
    with pytest.raises(DownloadError, match=r"needs 563.2 kB more on the disk of .*are free"):
        fetch(tmp_path)
    assert not store.gets()


def test_a_disk_that_fills_meanwhile_is_an_error(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: object, at: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DownloadError, match="No space left on device"):
        fetch(tmp_path)
    assert no_complete_directory(tmp_path)


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (403, "AccessDenied", "s3:GetObject"),
        (400, "ExpiredToken", "have expired"),
        (403, "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"),
        (403, "RequestTimeTooSkewed", "clock"),
        (418, "Teapot", "answered Teapot"),
    ],
)
def test_an_answer_that_trying_again_does_not_change_says_what_to_do(
    store: Store, tmp_path: Path, status: int, code: str, says: str
) -> None:
    def fault(request: Request) -> int | None:
        raise Fault(status, code)

    store.fault = fault
    with pytest.raises(DownloadError, match=says) as error:
        fetch(tmp_path)
    assert "s3://models/team/story" in str(error.value)


def test_credentials_that_expire_during_a_download_end_it(store: Store, tmp_path: Path) -> None:
    def fault(request: Request) -> int | None:
        if request.method == "GET" and request.start >= 2 * PART:
            raise Fault(400, "ExpiredToken")
        return None

    store.fault = fault
    with pytest.raises(DownloadError, match="have expired"):
        fetch(tmp_path)
    assert no_complete_directory(tmp_path)


def test_a_missing_bucket_a_missing_prefix_and_a_wrong_address_are_distinguished(store: Store, tmp_path: Path) -> None:
    for address, says in {
        "s3://other/x": "no such bucket",
        "s3://models/nothing": "there is nothing under this prefix",
    }.items():
        with pytest.raises(DownloadError, match=says):
            fetch(tmp_path, S3Address.parse(address))
    with pytest.raises(DownloadError, match="expected s3://BUCKET/PREFIX"):
        S3Address.parse("s3://")


def test_no_credentials_and_no_store_are_reported(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match="cannot be reached"):
        fetch(tmp_path)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(DownloadError, match="no AWS credentials"):
        fetch(tmp_path)


def test_a_key_that_leads_out_is_refused(store: Store, tmp_path: Path) -> None:
    store.put("team/story/../../evil.json", b"{}")
    with pytest.raises(DownloadError, match="leads out"):
        fetch(tmp_path)


@pytest.mark.slow
def test_a_killed_download_is_gone_on_with(store: Store, tmp_path: Path) -> None:
    store.bytes_per_second = 16_000
    program = (
        "from tests.model.remote.test_s3_download import *; s3_download._PART_BYTES = PART // 16; "
        f"download(ADDRESS, Path({str(tmp_path / 'downloads')!r}), print)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], env=dict(os.environ), cwd=Path(__file__).parents[3])
    try:
        wait_until(lambda: noted(tmp_path))
    finally:
        process.kill()
        process.wait()
    assert no_complete_directory(tmp_path)
    s3_download._PART_BYTES = PART // 16
    here = noted(tmp_path)
    store.bytes_per_second = 0
    store.requests.clear()
    assert contents(fetch(tmp_path)) == CONTENT
    assert not here & {(request.key, request.start // (PART // 16)) for request in store.gets()}


def noted(tmp_path: Path) -> set[tuple[str, int]]:
    """The parts that are complete: key and number."""
    journals = (tmp_path / "downloads").rglob("*.parts")
    return {
        (f"team/story/{journal.name.removesuffix('.parts')}", json.loads(line)[0])
        for journal in journals
        for line in journal.read_bytes().split(b"\n")[1:-1]
    }


def test_of_several_at_the_same_time_one_downloads(store: Store, tmp_path: Path) -> None:
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(fetch(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and len(set(results)) == 1
    spans = [(request.key, request.start) for request in store.gets()]
    assert len(spans) == len(set(spans))


def test_no_thread_is_left(store: Store, tmp_path: Path) -> None:
    fetch(tmp_path)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("s3")]
