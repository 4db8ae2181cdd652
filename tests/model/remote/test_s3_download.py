"""Downloads from S3: complete and right, or an error; never something in between."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from botocore.response import StreamingBody
from hypothesis import HealthCheck, given, settings, strategies as st
from urllib3 import HTTPConnectionPool
from urllib3.connection import HTTPConnection

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.remote import s3_download
from djl_trtllm.model.remote.s3 import S3Address
from djl_trtllm.model.remote.s3_download import RECORD, download, list_objects, reading
from tests.support.processes import wait_until
from tests.support.s3 import Fault, Request, Store, fast_retries
from tests.support.tables import by_table

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
def model(store: Store) -> None:
    """A model in the store."""
    for name, content in CONTENT.items():
        store.put(f"team/story/{name}", content)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 64 kB, and short pauses."""
    monkeypatch.setattr(s3_download, "PART_BYTES", PART)
    monkeypatch.setattr("djl_trtllm.model.remote.s3.FIRST_PAUSE_SECONDS", 0.001)


def fetch(tmp_path: Path, address: S3Address = ADDRESS, told: list[str] | None = None) -> Path:
    return download(address, tmp_path / "downloads", ([] if told is None else told).append)


def contents(directory: Path) -> dict[str, bytes]:
    """The files of a download without its record."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != RECORD)
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def no_complete_directory(tmp_path: Path) -> bool:
    return not list((tmp_path / "downloads").glob(f"*/[!.]*/{RECORD}"))


def test_only_what_has_changed_is_fetched_and_what_was_removed_is_gone(store: Store, tmp_path: Path) -> None:
    store.put("team/story/empty.txt", b"", checksum=False)
    store.put("team/story-2/config.json", b"a longer neighbour")
    first = fetch(tmp_path)
    assert contents(first) == CONTENT
    store.requests.clear()
    assert fetch(tmp_path) == first and not store.gets()
    store.put("team/story/tokenizer.json", b'{"changed": true}')
    del store.objects["team/story/empty.txt"]
    expected = CONTENT | {"tokenizer.json": b'{"changed": true}'}
    del expected["empty.txt"]
    assert contents(fetch(tmp_path)) == expected
    assert {request.key for request in store.gets()} == {"team/story/tokenizer.json"}
    assert not first.exists()
    found = fetch(tmp_path, S3Address.parse("s3://models/team/story/config.json"))
    assert contents(found) == {"config.json": CONTENT["config.json"]}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("s3")]


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


def test_a_part_may_break_off_often_as_long_as_each_time_more_of_it_arrives(store: Store, tmp_path: Path) -> None:
    store.fault = lambda request: PART // 16 if request.method == "GET" else None
    assert contents(fetch(tmp_path)) == CONTENT


def test_a_connection_that_always_breaks_is_an_error_and_the_next_start_fetches_what_is_missing(
    store: Store, tmp_path: Path
) -> None:
    broken = "team/story/model-00001-of-00002.safetensors"

    def fault(request: Request) -> int | None:
        return 0 if request.method == "GET" and request.key == broken and request.start >= 3 * PART else None

    store.fault = fault
    with pytest.raises(DownloadError, match=r"safetensors broke off at byte .* 6 times in a row.*continues from there"):
        fetch(tmp_path)
    assert no_complete_directory(tmp_path)
    store.fault = None
    store.requests.clear()
    assert contents(fetch(tmp_path)) == CONTENT
    fetched_again = [request for request in store.gets() if request.key == broken and request.start < 3 * PART]
    assert len(fetched_again) < 3  # parts of it may still have been under way


def test_an_abandoned_download_of_an_earlier_version_is_removed(store: Store, tmp_path: Path) -> None:
    store.fault = lambda request: 0 if request.method == "GET" else None
    with pytest.raises(DownloadError):
        fetch(tmp_path)
    store.fault = None
    (abandoned,) = (tmp_path / "downloads").glob("*/.*.partial")
    store.put("team/story/tokenizer.json", b'{"changed": true}')
    found = fetch(tmp_path)
    assert not abandoned.exists()
    assert [path for path in found.parent.iterdir() if path.is_dir()] == [found]


@pytest.mark.parametrize(("checksum", "algorithm"), [(True, "CRC64NVME"), (False, "MD5")])
def test_a_wrong_checksum_is_an_error_and_the_file_is_fetched_again(
    store: Store, tmp_path: Path, checksum: bool, algorithm: str
) -> None:
    key = "team/story/model-00001-of-00002.safetensors"
    right = store.objects[key].path.read_bytes()
    store.put(key, right, checksum=checksum)
    store.objects[key].path.write_bytes(right[:-1] + b"\0")
    with pytest.raises(DownloadError, match=f"arrived with a different {algorithm} than S3 has"):
        fetch(tmp_path)
    assert no_complete_directory(tmp_path)
    store.objects[key].path.write_bytes(right)
    assert contents(fetch(tmp_path)) == CONTENT


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
    told: list[str] = []
    assert contents(fetch(tmp_path, told=told)) == CONTENT | {"model-00001-of-00002.safetensors": replaced}
    assert any("model-00001-of-00002.safetensors was replaced during the download" in line for line in told)


def test_files_without_a_checksum_are_named(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Example: files that S3 encrypts with a key of its customer."""
    told: list[str] = []
    fetch(tmp_path / "with", told=told)
    assert not any("no checksum" in line for line in told)
    monkeypatch.setattr(s3_download, "claim_of", lambda head, part_size: None)
    fetch(tmp_path / "without", told=told)
    (line,) = [line for line in told if "no checksum" in line]
    assert len(set(line.rpartition(" for ")[2].split(", ")) & CONTENT.keys()) == 5, "of many the first ones"


def test_half_a_record_of_a_killed_process_is_no_matter(store: Store, tmp_path: Path) -> None:
    store.fault = lambda request: 0 if request.method == "GET" else None
    with pytest.raises(DownloadError):
        fetch(tmp_path)
    store.fault = None
    (abandoned,) = (tmp_path / "downloads").glob("*/.*.partial")
    (abandoned / RECORD).write_bytes(b'{"address"')
    assert contents(fetch(tmp_path)) == CONTENT


def test_a_full_disk_is_reported_before_anything_is_fetched_or_when_it_fills(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: object, at: int) -> int:
        raise OSError(28, "No space left on device")

    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=300 * 1024))
        with pytest.raises(DownloadError, match=r"563.2 kB more are needed on the disk of .*are free"):
            fetch(tmp_path)
    assert not store.gets()
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DownloadError, match="No space left on device"):
        fetch(tmp_path)
    assert no_complete_directory(tmp_path)


@pytest.mark.parametrize("after", [0, 2 * PART])
def test_credentials_that_expire_end_it(store: Store, tmp_path: Path, after: int) -> None:
    def fault(request: Request) -> int | None:
        if not after or (request.method == "GET" and request.start >= after):
            raise Fault(400, "ExpiredToken")
        return None

    store.fault = fault
    with pytest.raises(DownloadError, match=r"s3://models/team/story.*have expired"):
        fetch(tmp_path)
    assert no_complete_directory(tmp_path)


def test_a_listing_asks_for_the_prefix_with_its_slash_and_only_then_for_the_object(
    store: Store, tmp_path: Path
) -> None:
    store.put("team/story.tar.gz", b"archive")
    store.put("team/story-2/config.json", b"{}")
    fetch(tmp_path)
    fetch(tmp_path, S3Address.parse("s3://models/team/story.tar.gz"))
    listings = [request.key for request in store.requests if request.method == "LIST"]
    assert listings == ["team/story/", "team/story.tar.gz/"]
    assert not [request for request in store.requests if request.key == "team/story"]


def test_a_prefix_of_many_pages_is_listed_whole(store: Store) -> None:
    store.put("many/0.json", b"{}")
    for number in range(1, 2_500):
        store.objects[f"many/{number}.json"] = store.objects["many/0.json"]
    assert len(list_objects(S3Address.parse("s3://models/many"))) == 2_500


@pytest.mark.parametrize("method", ["LIST", "HEAD", "GET"])
def test_a_store_that_is_asked_too_often_is_waited_for(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    refused = iter(range(20))  # more than botocore repeats

    def fault(request: Request) -> None:
        if request.method == method and next(refused, None) is not None:
            raise Fault(503, "SlowDown")

    store.fault = fault
    with fast_retries(monkeypatch):
        assert contents(fetch(tmp_path)) == CONTENT


def test_a_store_that_is_asked_too_often_is_given_up_after_the_time_to_load(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(request: Request) -> None:
        raise Fault(503, "SlowDown")

    store.fault = fault
    with fast_retries(monkeypatch), pytest.raises(DownloadError, match="try again later"):
        download(ADDRESS, tmp_path / "downloads", lambda line: None, patience=0.5)


@by_table("address", "says", apart=True)  # fmt: skip
def test_an_address_without_a_model_is_refused(store: Store, tmp_path: Path, address: str, says: str) -> None:
    store.put("team/evil/../../evil.json", b"{}")
    store.put("team/pictures/a.png", b"x")
    with pytest.raises(DownloadError, match=f"{address}.*{says}"):
        fetch(tmp_path, S3Address.parse(address))


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


@pytest.mark.slow
def test_a_killed_download_is_gone_on_with(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.bytes_per_second = 16_000
    program = f"""from tests.model.remote.test_s3_download import *
s3_download.PART_BYTES = PART // 16
fetch(Path({str(tmp_path)!r}))"""
    monkeypatch.setattr(s3_download, "PART_BYTES", PART // 16)
    process = subprocess.Popen([sys.executable, "-c", program], env=dict(os.environ), cwd=Path(__file__).parents[3])
    try:
        wait_until(lambda: bool(noted(tmp_path)))
    finally:
        process.kill()
        process.wait()
    assert no_complete_directory(tmp_path)
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


BODY = bytes(range(256)) * 2000
BUFFER = 200_000


@pytest.fixture
def pool(s3: tuple[Store, str], store: Store) -> Iterator[HTTPConnectionPool]:
    """Connections to a store with one object."""
    store.put("object", BODY)
    address = urlsplit(s3[1])
    with closing(HTTPConnectionPool(str(address.hostname), address.port)) as pool:
        yield pool


def get(pool: HTTPConnectionPool, seconds: float = 30) -> AbstractContextManager[Callable[[memoryview], int]]:
    answer = pool.request(
        "GET", "/models/object", preload_content=False, decode_content=False, retries=False, timeout=seconds
    )
    return reading(StreamingBody(answer, answer.headers["Content-Length"]))


def read(readinto: Callable[[memoryview], int]) -> list[bytes]:
    buffer = memoryview(bytearray(BUFFER))
    chunks: list[bytes] = []
    while count := readinto(buffer):
        chunks.append(bytes(buffer[:count]))
    return chunks


def test_a_connection_whose_body_was_read_is_used_again(
    store: Store, pool: HTTPConnectionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected: list[str] = []

    class Connection(HTTPConnection):
        def connect(self) -> None:
            connected.append(self.host)
            super().connect()

    monkeypatch.setattr(pool, "ConnectionCls", Connection)
    for _ in range(3):
        with get(pool) as body:
            chunks = read(body)
        assert b"".join(chunks) == BODY
        assert [len(chunk) for chunk in chunks] == [BUFFER, BUFFER, len(BODY) - 2 * BUFFER]
    assert len(connected) == 1
    store.fault = lambda request: BUFFER + 1
    with get(pool) as body:
        assert [len(chunk) for chunk in read(body)] == [BUFFER, 1]  # it was cut off


def test_a_connection_with_a_rest_of_a_body_is_not_used_again(store: Store, pool: HTTPConnectionPool) -> None:
    store.bytes_per_second = 1_000_000
    sent_at_once = memoryview(bytearray(256 * 1024))
    with get(pool) as readinto:
        assert readinto(sent_at_once) == len(sent_at_once)
    with get(pool) as body:
        assert b"".join(read(body)) == BODY


def test_a_connection_is_not_lost_where_its_body_is_not_read(s3: tuple[Store, str], pool: HTTPConnectionPool) -> None:
    address = urlsplit(s3[1])
    with closing(HTTPConnectionPool(str(address.hostname), address.port, maxsize=1, block=True)) as one:
        with pytest.raises(ZeroDivisionError), get(one):
            raise ZeroDivisionError
        answer = one.request("GET", "/models/object", pool_timeout=5)
        assert answer.data == BODY


def test_a_store_that_falls_silent_is_a_broken_connection(store: Store, pool: HTTPConnectionPool) -> None:
    store.bytes_per_second = 100_000
    with get(pool, seconds=0.5) as body, pytest.raises(ConnectionError, match="timed out"):
        read(body)
