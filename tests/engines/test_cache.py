from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from djl_trtllm.engines import manifest as manifest_module
from djl_trtllm.engines.cache import EngineCache, cache_key
from djl_trtllm.engines.manifest import Manifest
from djl_trtllm.errors import EngineError
from djl_trtllm.model.remote import progress as progress_module
from tests.engines.cache_entries import KEY, Builder, build, is_free, locked, seal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting takes no time, and each look at the lock takes five seconds of its clock."""
    seconds = iter(range(1000, 10_000, 5))
    monkeypatch.setattr(progress_module, "_FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(progress_module, "_NEXT_WAITS_SECONDS", 0.001)
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))


@pytest.fixture
def building(tmp_path: Path) -> Iterator[ExitStack]:
    """Another process builds until this is closed."""
    with ExitStack() as other:
        other.enter_context(locked(tmp_path / f"{KEY}.lock"))
        yield other


def test_a_second_start_is_a_hit(tmp_path: Path) -> None:
    cache, builder = EngineCache(tmp_path / "not" / "there" / "yet"), Builder()
    assert cache.lookup(KEY) is None
    assert cache.get_or_build(KEY, builder, print) == cache.get_or_build(KEY, builder, print) == cache.root / KEY
    assert cache.lookup(KEY) == cache.root / KEY
    assert builder.calls == 1


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest"])
def test_a_damaged_entry_is_reported_and_built_again(tmp_path: Path, damage: str) -> None:
    cache, builder, told = EngineCache(tmp_path), Builder(), list[str]()
    entry = cache.get_or_build(KEY, builder, print)
    if damage == "truncate":
        (entry / "model.bin").write_bytes(bytes(10))
    elif damage == "remove":
        (entry / "model.bin").unlink()
    else:
        (entry / "manifest.json").write_text("{")
    assert cache.lookup(KEY) is None
    cache.get_or_build(KEY, builder, told.append)
    assert builder.calls == 2
    assert cache.lookup(KEY) == entry
    assert [line.split(" (")[0] for line in told] == [f"the cached engine {entry} is incomplete"]


def test_a_builder_that_fails_frees_the_cache_for_the_next(tmp_path: Path) -> None:
    def fail(out: Path) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no") as caught:
        EngineCache(tmp_path).get_or_build(KEY, fail, print)
    assert is_free(tmp_path / f"{KEY}.lock")
    assert caught.tb is not None  # the failed call's own variables are still there


def test_only_the_builder_keeps_others_out_and_only_while_it_builds(tmp_path: Path) -> None:
    def check(out: Path) -> None:
        assert not is_free(tmp_path / f"{KEY}.lock")
        build(out)

    EngineCache(tmp_path).get_or_build(KEY, check, print)
    assert is_free(tmp_path / f"{KEY}.lock")


def test_what_was_built_or_looked_up_is_in_use_from_then_on(tmp_path: Path) -> None:
    EngineCache(tmp_path).get_or_build(KEY, build, print)
    build(tmp_path / "openvino-other")
    EngineCache(tmp_path).lookup("openvino-other")
    for key in (KEY, "openvino-other"):
        assert not is_free(tmp_path / f"{key}.use"), key


def test_a_builder_that_leaves_no_whole_engine_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=f"the builder of {tmp_path / KEY} left no complete engine: no manifest$"):
        EngineCache(tmp_path).get_or_build(KEY, lambda out: None, print)


def test_a_cache_that_cannot_be_written_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=r"cannot be written: .*option\.engine_cache_dir"):
        EngineCache(tmp_path / "file" / "cache").get_or_build(KEY, Builder(), print)


# -- what counts as whole ------------------------------------------------------------------------------------------


def test_a_file_written_after_the_manifest_is_read_again(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path)
    build(tmp_path / KEY)
    (tmp_path / KEY / "model.bin").write_bytes(b"\1" * 10_000)
    assert cache.lookup(KEY) is None
    (tmp_path / KEY / "model.bin").write_bytes(bytes(10_000))
    assert cache.lookup(KEY) == tmp_path / KEY


def test_files_that_nobody_touched_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / KEY)
    (tmp_path / KEY / "folder").mkdir()
    os.utime(tmp_path / KEY / "folder", (2**33, 2**33))  # a folder's time is not that of its content
    monkeypatch.setattr(manifest_module, "file_sha256", lambda path: pytest.fail(f"read {path}"))
    assert EngineCache(tmp_path).lookup(KEY) == tmp_path / KEY


def test_an_entry_that_is_removed_while_it_is_looked_at_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Manifest.read

    def removed_after(directory: Path) -> Manifest | None:
        manifest = read(directory)
        (directory / "manifest.json").unlink()
        return manifest

    build(tmp_path / KEY)
    monkeypatch.setattr(Manifest, "read", removed_after)
    assert EngineCache(tmp_path).lookup(KEY) is None


# -- waiting for another process -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("clock")
def test_what_another_process_builds_meanwhile_is_taken(tmp_path: Path, building: ExitStack) -> None:
    builder, told = Builder(), list[str]()

    def progress(line: str) -> None:
        told.append(line)
        build(tmp_path / KEY)
        building.close()

    assert EngineCache(tmp_path).get_or_build(KEY, builder, progress) == tmp_path / KEY
    assert told == ["another process is compiling this engine, waiting for it (5 s)"]
    assert builder.calls == 0


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("in_place", [False, True])
def test_what_a_killed_builder_left_is_never_taken_for_whole(
    tmp_path: Path, building: ExitStack, in_place: bool
) -> None:
    half = tmp_path / (KEY if in_place else f".{KEY}.123.abc.partial")
    half.mkdir()
    (half / "model.bin").write_bytes(b"half")
    cache, builder, told = EngineCache(tmp_path), Builder(), list[str]()
    assert cache.lookup(KEY) is None

    def progress(line: str) -> None:
        told.append(line)
        building.close()

    assert cache.get_or_build(KEY, builder, progress) == tmp_path / KEY
    assert builder.calls == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [KEY]
    assert told[1:] == [
        f"the cached engine {tmp_path / KEY} is incomplete (no manifest), compiling it again"
        if in_place
        else f"removed the files of an interrupted compile: {half.name}"
    ]


@pytest.mark.usefixtures("clock")
def test_waiting_is_reported(tmp_path: Path, building: ExitStack) -> None:
    builder, told = Builder(), list[str]()

    def progress(line: str) -> None:
        told.append(line)
        if len(told) == 3:
            building.close()

    EngineCache(tmp_path).get_or_build(KEY, builder, progress)
    assert told == [
        f"another process is compiling this engine, waiting for it ({seconds} s)" for seconds in (5, 10, 15)
    ]
    assert builder.calls == 1


# -- keys ----------------------------------------------------------------------------------------------------------


def key_of(**changes: Any) -> str:
    engine: dict[str, Any] = {
        "backend": "openvino",
        "checkpoint": "sha256:abc",
        "options": {"dtype": "fp16", "quantize": "none"},
        "versions": {"openvino": "2026.4.1"},
        "platform": "x86_64",
    }
    return cache_key(**(engine | changes))


def test_everything_that_changes_the_engine_changes_the_key() -> None:
    keys = {
        key_of(),
        key_of(backend="tensorrt"),
        key_of(checkpoint="sha256:def"),
        key_of(options={"dtype": "fp16", "quantize": "int8"}),
        key_of(versions={"openvino": "2026.4.2"}),
        key_of(platform="aarch64"),
    }
    assert len(keys) == 6


def test_a_key_is_the_same_in_every_version_of_this_program() -> None:
    # Another key is another engine: a release that changes it compiles everything again.
    assert key_of() == "openvino-b1e3c6b88773165fef391bdfa3bd6044"
    assert key_of(options={"quantize": "none", "dtype": "fp16"}) == key_of()


def test_entries_lie_in_directories_of_their_keys(tmp_path: Path) -> None:
    for key in ("openvino-1", "tensorrt-2"):
        assert EngineCache(tmp_path).get_or_build(key, build, print) == tmp_path / key
    seal(tmp_path / "openvino-1")
    assert EngineCache(tmp_path).lookup("openvino-1") == tmp_path / "openvino-1"
