from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path

import pytest

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.remote import hub_files
from djl_trtllm.model.remote.hub_files import HubFile, RepositoryFolder
from djl_trtllm.model.remote.progress import ProgressMeter

COMMIT = "0123456789"
WEIGHTS, CONFIG = b"weights" * 1000, b"{}"
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
SHA1 = hashlib.sha1(b"blob 2\0" + CONFIG, usedforsecurity=False).hexdigest()
FILES = {
    "model.safetensors": HubFile(len(WEIGHTS), "SHA-256", SHA256),
    "sub/config.json": HubFile(len(CONFIG), "git SHA-1", SHA1),
}


@pytest.fixture
def folder(tmp_path: Path) -> RepositoryFolder:
    """A repository's folder as the hub's library leaves it: links in a snapshot to blobs."""
    (tmp_path / "blobs").mkdir()
    for name, file in FILES.items():
        (tmp_path / "blobs" / file.checksum).write_bytes(WEIGHTS if "model" in name else CONFIG)
        link = tmp_path / "snapshots" / COMMIT / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(tmp_path / "blobs" / file.checksum)
    return RepositoryFolder(tmp_path)


def checked(folder: RepositoryFolder, files: dict[str, HubFile] = FILES) -> list[str]:
    """The lines that comparing prints."""
    lines: list[str] = []
    folder.check("acme/story", folder.path / "snapshots" / COMMIT, files, lines.append)
    return lines


def refused(folder: RepositoryFolder, files: dict[str, HubFile] = FILES) -> str:
    with pytest.raises(DownloadError) as caught:
        checked(folder, files)
    return str(caught.value)


def record_of(folder: RepositoryFolder) -> dict[str, list[object]]:
    record: dict[str, list[object]] = json.loads((folder.path / ".djl-trtllm-checked.json").read_bytes())
    return record


def test_large_files_have_a_sha256_and_others_gits_name_of_their_content() -> None:
    assert HubFile.listed(5, "abc", "def") == HubFile(5, "SHA-256", "abc")
    assert HubFile.listed(5, None, "def") == HubFile(5, "git SHA-1", "def")
    assert HubFile.listed(None, None, None) == HubFile(0, "", "")
    assert HubFile.listed(None, "abc", None) == HubFile(0, "SHA-256", "abc")


# -- what is still to come -----------------------------------------------------------------------------------------


def test_what_is_here_does_not_come_again(folder: RepositoryFolder) -> None:
    assert folder.missing_bytes(COMMIT, FILES) == 0
    # Under another commit the content is the same.
    assert folder.missing_bytes("another", FILES) == 0


def test_what_is_not_here_is_still_to_come(folder: RepositoryFolder, tmp_path: Path) -> None:
    (tmp_path / "blobs" / SHA256).unlink()
    assert folder.missing_bytes(COMMIT, FILES) == len(WEIGHTS)
    assert RepositoryFolder(tmp_path / "nowhere").missing_bytes(COMMIT, FILES) == len(WEIGHTS) + len(CONFIG)


def test_what_has_no_checksum_is_looked_for_by_its_name(folder: RepositoryFolder) -> None:
    assert folder.missing_bytes(COMMIT, {"sub/config.json": HubFile(2, "", "")}) == 0
    assert folder.missing_bytes(COMMIT, {"other.json": HubFile(2, "", "")}) == 2


def test_what_has_arrived_of_a_file_counts_by_the_disks_blocks(folder: RepositoryFolder, tmp_path: Path) -> None:
    (tmp_path / "blobs" / SHA256).unlink()
    arriving = tmp_path / "blobs" / f"{SHA256}.incomplete"
    arriving.write_bytes(WEIGHTS[:100])
    assert folder.missing_bytes(COMMIT, FILES) == len(WEIGHTS) - 100
    with arriving.open("wb") as holes:
        holes.truncate(len(WEIGHTS))
    assert folder.missing_bytes(COMMIT, FILES) == len(WEIGHTS)
    arriving.write_bytes(WEIGHTS * 2)
    assert folder.missing_bytes(COMMIT, FILES) == 0


# -- what arrives --------------------------------------------------------------------------------------------------


def test_what_arrives_in_the_block_is_noted(folder: RepositoryFolder, tmp_path: Path) -> None:
    progress = ProgressMeter("it", 1000, lambda line: None)
    with folder.watched(progress):
        (tmp_path / "blobs" / "more.incomplete").write_bytes(b"x" * 700)
        (tmp_path / "blobs" / SHA1).unlink()
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "hub-progress")
        assert thread.daemon
    assert progress.done == 700 - len(CONFIG)
    assert not thread.is_alive()


def test_it_is_noted_while_it_arrives(
    folder: RepositoryFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_files, "_LOOK_EVERY_SECONDS", 0.001)
    arrived = threading.Event()
    progress = ProgressMeter("it", 1000, lambda line: None)
    add = progress.add

    def noted(count: int) -> None:
        add(count)
        if count:
            arrived.set()

    progress.add = noted  # type: ignore[method-assign]
    with folder.watched(progress):
        for size in (300, 700):
            (tmp_path / "blobs" / "more.incomplete").write_bytes(b"x" * size)
            assert arrived.wait(300)
            arrived.clear()
    assert progress.done == 700


def test_it_is_looked_every_second(folder: RepositoryFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float | None] = []

    class Noted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            return super().wait(timeout)

    monkeypatch.setattr(threading, "Event", Noted)
    with folder.watched(ProgressMeter("it", 1000, lambda line: None)):
        pass
    assert 1.0 in waits


def test_a_folder_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    progress = ProgressMeter("it", 1000, lambda line: None)
    with RepositoryFolder(tmp_path / "new").watched(progress):
        (tmp_path / "new" / "blobs").mkdir(parents=True)
        (tmp_path / "new" / "blobs" / "x").write_bytes(b"x" * 50)
    assert progress.done == 50


# -- comparing -----------------------------------------------------------------------------------------------------


def test_files_are_compared_once(folder: RepositoryFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = checked(folder)
    assert line.startswith("comparing acme/story with the hub's checksums: 7.0 kB in ")
    assert set(record_of(folder)) == {f"blobs/{SHA256}", f"blobs/{SHA1}"}
    monkeypatch.setattr(hub_files, "_is_right", lambda *_: pytest.fail("read again"))
    assert checked(folder) == []


def test_what_was_written_since_is_compared_again_and_nothing_else(folder: RepositoryFolder, tmp_path: Path) -> None:
    checked(folder)
    os.utime(tmp_path / "blobs" / SHA256, (5, 5))
    (line,) = checked(folder)
    assert "7.0 kB in" in line
    os.utime(tmp_path / "blobs" / SHA1, (5, 5))
    (line,) = checked(folder)
    assert "2 bytes in" in line
    assert checked(folder) == []


def test_another_checksum_for_the_same_file_is_compared(folder: RepositoryFolder) -> None:
    checked(folder)
    other = FILES | {"model.safetensors": HubFile(len(WEIGHTS), "SHA-256", "0" * 64)}
    assert "a different SHA-256" in refused(folder, other)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors", WEIGHTS[:-1] + b"x", f"a different SHA-256 (the hub's SHA-256: {SHA256})"),
        ("model.safetensors", WEIGHTS[:-1], f"6,999 bytes instead of 7,000 (the hub's SHA-256: {SHA256})"),
        ("sub/config.json", b"[]", f"a different git SHA-1 (the hub's git SHA-1: {SHA1})"),
        ("sub/config.json", b"", f"0 bytes instead of 2 (the hub's git SHA-1: {SHA1})"),
    ],
)
def test_what_is_not_what_the_hub_says_is_removed_and_reported(
    folder: RepositoryFolder, tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    blob = tmp_path / "blobs" / FILES[name].checksum
    blob.write_bytes(content)
    text = refused(folder)
    assert text.startswith(f"{name} arrived with {said}; it was removed, and the next start downloads again.")
    assert "HF_ENDPOINT" in text
    assert not blob.exists() and not (tmp_path / "snapshots" / COMMIT / name).is_symlink()
    assert len(record_of(folder)) == 1  # the other one was right


def test_several_wrong_files_are_reported_at_once(folder: RepositoryFolder, tmp_path: Path) -> None:
    for blob in (tmp_path / "blobs").iterdir():
        blob.write_bytes(b"x")
    text = refused(folder)
    assert "model.safetensors arrived" in text and "; sub/config.json arrived" in text
    assert "; they were removed" in text


def test_a_file_that_has_gone_since_is_wrong(folder: RepositoryFolder, tmp_path: Path) -> None:
    (tmp_path / "blobs" / SHA256).unlink()
    assert refused(folder).startswith("model.safetensors arrived with 0 bytes instead of 7,000 ")


def test_a_size_that_the_hub_does_not_tell_is_not_compared(folder: RepositoryFolder, tmp_path: Path) -> None:
    files = {"model.safetensors": HubFile(0, "SHA-256", SHA256)}
    assert len(checked(folder, files)) == 1
    (tmp_path / "blobs" / SHA256).write_bytes(b"x")
    assert refused(folder, files).startswith("model.safetensors arrived with a different SHA-256")


def test_what_has_no_checksum_is_reported_and_taken(folder: RepositoryFolder) -> None:
    (line,) = checked(folder, {f"{number}.json": HubFile(1, "", "") for number in range(7)})
    assert line == ("acme/story: the hub has no checksum to compare for 0.json, 1.json, 2.json, 3.json, 4.json")
    assert not (folder.path / ".djl-trtllm-checked.json").exists()


def test_a_folder_that_cannot_be_written_is_taken_as_it_is(
    folder: RepositoryFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blobs" / SHA256).write_bytes(b"x")
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (tmp_path, os.W_OK))
    assert checked(folder) == []


# -- the record ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", [b"", b"{", b"[]", b'{"blobs/x": 3}'])
def test_a_broken_record_is_not_believed(folder: RepositoryFolder, tmp_path: Path, record: bytes) -> None:
    checked(folder)
    (tmp_path / ".djl-trtllm-checked.json").write_bytes(record)
    assert len(checked(folder)) == 1
    assert len(record_of(folder)) == 2


def test_files_that_are_gone_leave_the_record(folder: RepositoryFolder, tmp_path: Path) -> None:
    checked(folder)
    (tmp_path / "blobs" / SHA256).unlink()
    os.utime(tmp_path / "blobs" / SHA1, (5, 5))
    checked(folder, {"sub/config.json": FILES["sub/config.json"]})
    assert set(record_of(folder)) == {f"blobs/{SHA1}"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [".djl-trtllm-checked.json", "blobs", "snapshots"]


def test_a_record_that_cannot_be_written_costs_time_only(
    folder: RepositoryFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    for _ in range(2):
        assert len(checked(folder)) == 1
