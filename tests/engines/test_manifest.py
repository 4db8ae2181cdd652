"""Engine directories: checksums of files, manifests, directories that appear whole, and marks."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from djl_trtllm.engines import cache as cache_module
from djl_trtllm.engines.cache import (
    FileEntry,
    FileHashes,
    Manifest,
    hold_mark,
    installed_versions,
    raise_damaged,
    unheld,
)
from djl_trtllm.errors import EngineMismatchError
from djl_trtllm.files import file_sha256
from djl_trtllm.model.work_directory import staged, sweep
from tests.engines.helpers import is_free, locked, write_engine_files
from tests.support.tables import by_table


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read, with every file counting as large."""
    files: list[Path] = []

    def counted(path: Path) -> str:
        files.append(path)
        return file_sha256(path)

    monkeypatch.setattr(cache_module, "file_sha256", counted)
    monkeypatch.setattr(cache_module, "_WORTH_REMEMBERING_BYTES", 0)
    return files


def written(path: Path, content: bytes, *, age: float = 100) -> Path:
    path.write_bytes(content)
    modified = path.stat().st_mtime - age
    os.utime(path, (modified, modified))
    return path


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_unchanged_files_are_read_once(tmp_path: Path, reads: list[Path]) -> None:
    hashes = FileHashes(tmp_path / "not" / "there" / "yet")
    paths = [written(tmp_path / name, name.encode()) for name in ("one", "two")]
    for _ in range(2):
        assert [hashes.sha256(path) for path in paths] == [sha256(b"one"), sha256(b"two")]
    assert reads == paths
    one, two = (tmp_path / "not" / "there" / "yet").iterdir()
    for content in (b"", b"{}", b"\xff"):
        one.write_bytes(content)
        two.write_bytes(content)
        assert hashes.sha256(paths[0]) == sha256(b"one")
    status = paths[0].stat()
    paths[0].write_bytes(b"1ne")  # the same size, and then the same time of modification
    os.utime(paths[0], ns=(status.st_atime_ns, status.st_mtime_ns))
    assert hashes.sha256(paths[0]) == sha256(b"1ne")


@pytest.mark.parametrize(("age", "remembered"), [(2.0, False), (2.001, True)])
def test_a_file_is_remembered_if_it_has_been_settled_for_two_seconds(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch, age: float, remembered: bool
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    os.utime(path, (1000, 1000))
    monkeypatch.setattr(cache_module, "time", SimpleNamespace(time=lambda: 1000 + age))
    FileHashes(tmp_path / "store").sha256(path)
    assert (tmp_path / "store").exists() is remembered
    # A store that cannot be written costs time only, and a file that changes while it is read is not remembered.
    assert FileHashes(path / "store").sha256(path) == sha256(b"one")

    def touched(path: Path) -> str:
        os.utime(path, (5, 5))
        return sha256(b"one")

    monkeypatch.setattr(cache_module, "file_sha256", touched)
    FileHashes(tmp_path / "another").sha256(path)
    assert not (tmp_path / "another").exists()


@pytest.mark.parametrize(("size", "remembered"), [(0, False), ((64 << 20) - 1, False), (64 << 20, True)])
def test_files_of_64_mebibytes_are_worth_remembering(tmp_path: Path, size: int, remembered: bool) -> None:
    path = tmp_path / "weights"
    path.touch()
    os.truncate(path, size)
    os.utime(path, (1000, 1000))
    assert FileHashes(tmp_path / "store").sha256(path) == sha256(bytes(size))
    assert (tmp_path / "store").exists() is remembered


VERSIONS = {"openvino": "2026.4.0", "openvino-genai": "2026.4.0.0"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_engine_files(tmp_path / "engine")


def described(directory: Path) -> Manifest:
    options = {"dtype": "fp16", "quantize": "int8"}
    manifest = Manifest.of(
        directory,
        backend="openvino",
        checkpoint="sha256:abc",
        options=options,
        versions=VERSIONS,
        platform="x86_64",
        limits={"max_seq_len": 512},
    )
    manifest.write(directory)
    return manifest


def test_what_was_written_is_read_back(directory: Path) -> None:
    (directory / "folder").mkdir()
    (directory / "folder" / "more.bin").write_bytes(b"more")
    described(directory)
    before = datetime.now(timezone.utc).replace(microsecond=0)
    manifest = described(directory)
    assert Manifest.read(directory) == manifest
    assert manifest.files == {
        name: FileEntry(len(content), sha256(content))
        for name in ("folder/more.bin", "openvino_model.bin", "openvino_model.xml")
        if (content := (directory / name).read_bytes())
    }
    assert (manifest.versions, manifest.platform) == (VERSIONS, "x86_64")
    assert (manifest.backend, manifest.checkpoint, manifest.format) == ("openvino", "sha256:abc", 1)
    assert manifest.options == {"dtype": "fp16", "quantize": "int8"} and manifest.limits == {"max_seq_len": 512}
    assert manifest.verify(directory) == []
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", manifest.created)
    assert before <= datetime.fromisoformat(manifest.created) <= datetime.now(timezone.utc)
    path = directory / "manifest.json"
    assert path.read_text().startswith('{\n  "format": 1,\n  "backend": "openvino",\n')  # people can read it
    path.write_text(json.dumps(json.loads(path.read_text()) | {"gpu": "H200"}))
    assert Manifest.read(directory) == manifest  # fields of later versions are no error


def test_a_manifest_is_there_whole_or_not_at_all(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (directory, directory / "nowhere", directory / "openvino_model.xml"):
        assert Manifest.read(place) is None
    before = described(directory)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        described(directory)
    assert Manifest.read(directory) == before


@pytest.mark.parametrize(
    ("content", "says"),
    [
        *((content, "is broken .*compile the engine again") for content in (b"", b"{", b"[]", b"\xff\xfe")),
        (b'{"format": 1}', "is broken .*compile the engine again"),
        (b'"format": 99', "has format 99, .* reads format 1: compile the engine again, or delete the manifest"),
        (None, "cannot be read: .*it is a directory"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_named(directory: Path, content: bytes | None, says: str) -> None:
    path = directory / "manifest.json"
    if content is None:
        path.mkdir()
    elif content == b'"format": 99':
        described(directory)
        path.write_bytes(path.read_bytes().replace(b'"format": 1', content))
    else:
        path.write_bytes(content)
    with pytest.raises(EngineMismatchError, match=rf"manifest\.json {says}"):
        Manifest.read(directory)


def test_each_bad_file_is_named_with_what_is_wrong(directory: Path) -> None:
    for name in ("folder/in it", "loop", "long"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(b"x")
    manifest = described(directory)
    (directory / "openvino_model.xml").unlink()
    (directory / "openvino_model.bin").write_bytes(bytes(400))
    shutil.rmtree(directory / "folder")
    (directory / "folder").touch()
    (directory / "loop").unlink()
    (directory / "loop").symlink_to("loop")
    (directory / "long").write_bytes(b"xy")
    for contents in (True, False):
        loop, *others = sorted(manifest.verify(directory, contents=contents), key=lambda line: "loop" not in line)
        assert loop.startswith("loop: cannot be read (")
        assert others == [
            "folder/in it: missing",
            "long: changed, 2 bytes where 1 were written",
            "openvino_model.bin: truncated, 400 of 1000 bytes",
            "openvino_model.xml: missing",
        ]


def test_a_message_lists_a_bounded_number_of_bad_files(directory: Path) -> None:
    with pytest.raises(EngineMismatchError, match=r"\n  - rank19: missing\n  - 81 more\n"):
        raise_damaged(directory, [f"rank{rank}: missing" for rank in range(101)])


def test_a_changed_byte_is_found_by_contents_and_not_by_sizes(directory: Path) -> None:
    manifest = described(directory)
    (directory / "openvino_model.bin").write_bytes(b"x" + bytes(999))
    assert manifest.verify(directory, contents=False) == []
    assert manifest.verify(directory) == ["openvino_model.bin: changed, same size and a different SHA-256"]
    manifest.require_whole(directory)
    (directory / "openvino_model.bin").write_bytes(bytes(999))
    with pytest.raises(
        EngineMismatchError, match=r"is damaged:\n  - openvino_model\.bin: truncated, 999 of 1000"
    ) as caught:
        manifest.require_whole(directory)
    assert str(directory) in str(caught.value) and "`djl-trtllm compile CHECKPOINT OUT`" in str(caught.value)


def test_an_engine_that_fits_is_taken_and_another_is_refused_with_every_difference(directory: Path) -> None:
    manifest = described(directory)
    manifest.require_fit(directory, backend="openvino", options={"dtype": "fp16"}, versions=VERSIONS)
    with pytest.raises(EngineMismatchError) as caught:
        manifest.require_fit(directory, backend="tensorrt", options={"dtype": "bf16"}, versions={"openvino": "2026.3"})
    head, *lines, remedy = str(caught.value).splitlines()
    assert str(directory) in head and "`djl-trtllm compile CHECKPOINT OUT`" in remedy
    assert lines == [
        "  - option.backend: engine has openvino, asked for tensorrt",
        "  - option.dtype: engine has fp16, asked for bf16",
        "  - openvino: the engine was made with 2026.4.0, and 2026.3 is installed, an older one",
    ]
    assert manifest.differences(checkpoint="sha256:def", options={"quantize": None, "dtype": "fp16"}) == [
        "checkpoint: engine was made from sha256:abc, this one is sha256:def",
        "option.quantize: engine has int8, asked for none",
    ]
    # What is not asked for is not compared, nor what the engine says nothing of.
    assert manifest.differences(options={"max_batch_size": 4}, versions={"torch": "0.1"}) == []


@by_table("installed", "differs", apart=True)  # fmt: skip
def test_only_an_older_runtime_differs(directory: Path, installed: str, differs: bool) -> None:
    manifest = described(directory)
    for made_with in ("2026.4.1-1-abc", "2026.4.1"):
        manifest.versions["openvino"] = made_with
        lines = manifest.differences(versions={"openvino": installed, "something-else": "1.0"})
        expected = f"openvino: the engine was made with {made_with}, and {installed} is installed, an older one"
        assert lines == ([expected] if differs else [])
    packages = ["no-such-package", "pytest", "no-such-package-either", "packaging"]
    assert installed_versions(packages) == {name: version(name) for name in ("pytest", "packaging")}


def test_a_directory_appears_when_it_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "not" / "there" / "out"
    with staged(out) as partial, staged(out.with_name("other")) as other, staged(out.with_name("out.2")) as second:
        assert len({partial, other, second}) == 3  # two builders do not meet
        assert list(partial.iterdir()) == [] and not out.exists()
        assert partial.parent == out.parent
        (partial / "file").write_text("content")
    assert sorted(path.name for path in out.parent.iterdir()) == ["other", "out", "out.2"]
    assert (out / "file").read_text() == "content"
    with pytest.raises(OSError, match="not empty"), staged(out):
        pass
    assert (out / "file").read_text() == "content"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_fails_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    for remove in (False, True):
        with pytest.raises(error), staged(tmp_path / "out") as partial:
            partial.rmdir() if remove else (partial / "file").touch()
            raise error
        assert list(tmp_path.iterdir()) == []


def test_what_killed_builders_left_is_removed_and_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    left = [staged(out).__enter__(), tmp_path / ".out.1.abc.partial", tmp_path / ".out.2.abc.partial"]
    others = [tmp_path / name for name in (".another.1.abc.partial", ".out.5.1.abc.partial", ".out.log", "out")]
    for path in (*left, *others):
        path.mkdir(exist_ok=True)
        (path / "file").touch()
    assert sweep(out) == sorted(left)
    assert sorted(tmp_path.iterdir()) == sorted(others)
    left[1].touch()  # a file cannot be removed as a folder, which is no error
    assert sweep(out) == [left[1]]


def test_nothing_is_removed_while_somebody_builds(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / ".out.1.abc.partial").mkdir()
    (tmp_path / ".out.1.abc.partial.log").touch()
    with staged(out) as partial:
        before = sorted(tmp_path.iterdir())
        assert partial in before and sweep(out) == []
        assert sorted(tmp_path.iterdir()) == before
    assert [path.name for path in sweep(out)] == [".out.1.abc.partial"]
    assert list(tmp_path.iterdir()) == [out]


# -- marks -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "engine.use"


def test_a_mark_is_held_until_the_process_ends_and_its_time_is_the_last_use(mark: Path) -> None:
    before = time.time() - 1
    mask = os.umask(0)
    try:
        with locked(mark, fcntl.LOCK_SH):  # several processes hold a mark
            hold_mark(mark)
        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            assert mark.stat().st_mtime > before
            os.utime(mark, (5, 5))
            hold_mark(mark)
    finally:
        os.umask(mask)
    assert mark.stat().st_mtime > before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not is_free(mark)
    with unheld(mark) as free:
        assert not free
    (descriptor,) = (
        int(entry.name) for entry in Path("/proc/self/fd").iterdir() if os.path.realpath(entry) == str(mark)
    )
    assert not os.get_inheritable(descriptor)
    with pytest.raises(FileNotFoundError):
        hold_mark(mark.parent / "no" / "where")


def test_a_mark_that_nobody_holds_is_kept_from_others_meanwhile(mark: Path) -> None:
    for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX):
        mark.unlink(missing_ok=True)
        with locked(mark, kind), unheld(mark) as free:
            assert not free
    mark.unlink()
    mask = os.umask(0)
    try:
        with pytest.raises(RuntimeError), unheld(mark) as free:
            assert free and not is_free(mark)
            raise RuntimeError
    finally:
        os.umask(mask)
    assert is_free(mark) and stat.S_IMODE(mark.stat().st_mode) == 0o644  # other users may look and not write


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_where_nothing_can_be_written_there_is_nothing_to_hold(
    mark: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        hold_mark(mark)
    with unheld(mark) as free:
        assert free
