"""Engine directories: checksums of files, manifests, marks, and the local cache."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from djl_trtllm import progress as progress_module
from djl_trtllm.engines import cache as cache_module
from djl_trtllm.engines.cache import (
    CacheEntry,
    EngineCache,
    Leftover,
    cache_key,
    find_leftovers,
)
from djl_trtllm.errors import EngineError
from djl_trtllm.model import work_directory
from djl_trtllm.model.work_directory import TEMPORARY_PREFIX, marked
from tests.engines.helpers import KEY, Builder, build, is_free, locked, started
from tests.support.processes import wait_until


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
    with pytest.raises(EngineError, match=r"cannot be written: .*option\.engine_cache_dir"):
        EngineCache(entry / "model.bin" / "cache").get_or_build(KEY, Builder(), print)


def test_only_the_builder_keeps_others_out_and_what_was_built_or_looked_up_is_in_use(tmp_path: Path) -> None:
    def check(out: Path) -> None:
        assert not is_free(tmp_path / f"{KEY}.lock")
        build(out)

    def fail(out: Path) -> None:
        raise RuntimeError("no")

    cache = EngineCache(tmp_path)
    with pytest.raises(RuntimeError, match="no"):
        cache.get_or_build(KEY, fail, print)
    with pytest.raises(EngineError, match=f"the builder of {tmp_path / KEY} left no complete engine: no manifest$"):
        cache.get_or_build(KEY, lambda out: None, print)
    cache.get_or_build(KEY, check, print)
    assert is_free(tmp_path / f"{KEY}.lock")
    build(tmp_path / "openvino-other")
    cache.lookup("openvino-other")
    for key in (KEY, "openvino-other"):
        assert not is_free(tmp_path / f"{key}.use"), key


# -- what counts as whole ------------------------------------------------------------------------------------------


def test_files_are_read_only_if_they_were_written_after_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, model = EngineCache(tmp_path), tmp_path / KEY / "model.bin"
    build(tmp_path / KEY)
    model.write_bytes(b"\1" * 10_000)
    assert cache.lookup(KEY) is None
    model.write_bytes(bytes(10_000))
    assert cache.lookup(KEY) == tmp_path / KEY
    build(tmp_path / "other")
    (tmp_path / "other" / "folder").mkdir()
    os.utime(tmp_path / "other" / "folder", (2**33, 2**33))  # a folder's time is not that of its content
    monkeypatch.setattr(cache_module, "file_sha256", lambda path: pytest.fail(f"read {path}"))
    assert cache.lookup("other") == tmp_path / "other"


# -- waiting for another process -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("clock")
def test_what_another_process_builds_meanwhile_is_taken_and_waiting_is_reported(
    tmp_path: Path, building: ExitStack
) -> None:
    builder, told = Builder(), list[str]()

    def progress(line: str) -> None:
        told.append(line)
        if len(told) == 3:
            build(tmp_path / KEY)
            building.close()

    assert EngineCache(tmp_path).get_or_build(KEY, builder, progress) == tmp_path / KEY
    assert told == [
        f"another process is compiling this engine, waiting for it ({seconds} s)" for seconds in (5, 10, 15)
    ]
    assert builder.calls == 0
    assert not is_free(tmp_path / f"{KEY}.use")  # it is in use here, so no other process makes room by it


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


# -- keys ----------------------------------------------------------------------------------------------------------


def test_a_key_is_the_same_in_every_version_of_this_program_and_differs_with_the_engine() -> None:
    engine: dict[str, Any] = {
        "backend": "openvino", "checkpoint": "sha256:abc", "options": {"dtype": "fp16", "quantize": "none"},
        "versions": {"openvino": "2026.4.1"}, "platform": "x86_64",
    }  # fmt: skip
    others: dict[str, Any] = {
        "backend": "tensorrt", "checkpoint": "sha256:def", "options": {"dtype": "fp16", "quantize": "int8"},
        "versions": {"openvino": "2026.4.2"}, "platform": "aarch64",
    }  # fmt: skip
    # Another key is another engine: a release that changes it compiles everything again.
    assert cache_key(**engine) == "openvino-b1e3c6b88773165fef391bdfa3bd6044"
    assert cache_key(**engine | {"options": {"quantize": "none", "dtype": "fp16"}}) == cache_key(**engine)
    assert len({cache_key(**engine), *(cache_key(**engine | {name: other}) for name, other in others.items())}) == 6


# -- The local engine cache between processes, of which some are killed.


@pytest.mark.slow
def test_several_processes_on_an_empty_cache_compile_once(tmp_path: Path) -> None:
    with started("race", tmp_path, *"abcd") as processes:
        wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 4)
        (tmp_path / "go").touch()
        assert [process.wait(300) for process in processes] == [0] * 4
    assert len(list(tmp_path.glob("built-by-*"))) == 1
    assert len(list(tmp_path.glob("served-by-*"))) == 4


@pytest.mark.slow
@pytest.mark.parametrize("what", ["half", "half-in-place"])
def test_a_builder_killed_half_way_leaves_nothing_that_is_taken_for_whole(tmp_path: Path, what: str) -> None:
    cache, builder, told = EngineCache(tmp_path / "cache"), Builder(), list[str]()
    with started(what, tmp_path, "killed") as (process,):
        (tmp_path / "go").touch()
        wait_until((tmp_path / "built-by-killed").exists)
        waiter = threading.Thread(target=cache.get_or_build, args=(KEY, builder, told.append), daemon=True)
        waiter.start()
        wait_until(lambda: bool(told))
        assert cache.lookup(KEY) is None
        process.kill()
        waiter.join(300)
    assert builder.calls == 1
    assert cache.lookup(KEY) == cache.root / KEY
    assert [path.name for path in cache.root.iterdir() if path.is_dir()] == [KEY]


@pytest.mark.slow
def test_an_entry_that_another_process_uses_stays_until_that_is_killed(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path / "cache")
    build(cache.root / KEY)
    with started("use", tmp_path, "user"):
        wait_until((tmp_path / "using").exists)
        assert cache.prune() == []
    assert [entry.key for entry in cache.prune()] == [KEY]


# -- The bound of the local engine cache, and what `djl-trtllm cache` shows and removes.


KEYS = [f"openvino-{number}" for number in range(4)]


@pytest.fixture
def cache(tmp_path: Path) -> EngineCache:
    """A cache of four entries of one size that no process uses, the first used longest ago."""
    for number, key in enumerate(KEYS):
        build(tmp_path / key)
        (tmp_path / f"{key}.use").touch()
        os.utime(tmp_path / f"{key}.use", (1000 + number, 1000 + number))
    (tmp_path / f"{KEYS[1]}.log").touch()
    return EngineCache(tmp_path)


def size_of(cache: EngineCache) -> int:
    """Bytes of one entry."""
    return cache.entries()[0].size


def keys(entries: list[CacheEntry]) -> list[str]:
    return [entry.key for entry in entries]


def test_entries_are_listed_the_most_recently_used_first(cache: EngineCache) -> None:
    assert EngineCache(cache.root / "nowhere").entries() == []
    (cache.root / "hashes").mkdir()  # which holds no engine
    entries = cache.entries()
    assert keys(entries) == KEYS[::-1]
    assert [entry.last_used for entry in entries] == [1003, 1002, 1001, 1000]
    assert all(entry.verify() == [] for entry in entries)
    entry = cache.root / KEYS[0]
    (entry / "folder").mkdir()
    (entry / "folder" / "more.bin").write_bytes(bytes(77))
    assert CacheEntry.of(entry).size == 10_000 + 77 + (entry / "manifest.json").stat().st_size
    (cache.root / f"{KEYS[0]}.use").unlink()
    os.utime(entry, (5, 5))
    assert CacheEntry.of(entry).last_used == 5  # it was used when it was made


def test_verifying_reads_every_byte_and_tells_what_is_wrong(cache: EngineCache) -> None:
    model = cache.root / KEYS[0] / "model.bin"
    model.write_bytes(b"\1" * 10_000)
    os.utime(model, (1, 1))
    entry = CacheEntry.of(model.parent)
    assert entry.verify() == ["model.bin: changed, same size and a different SHA-256"]
    (model.parent / "manifest.json").write_text("{")
    (problem,) = entry.verify()
    assert "manifest.json is broken" in problem
    (model.parent / "manifest.json").unlink()
    assert entry.verify() == ["no manifest"]


# -- what is removed -----------------------------------------------------------------------------------------------


def test_those_used_longest_ago_go_first_until_the_rest_fits(cache: EngineCache) -> None:
    size = size_of(cache)
    assert keys(cache.prune(4 * size)) == []
    assert keys(cache.prune(4 * size - 1)) == KEYS[:1]
    assert keys(cache.prune(size)) == KEYS[1:3]
    assert keys(cache.entries()) == KEYS[3:]


def test_without_a_bound_everything_goes_with_its_log_and_nothing_else(cache: EngineCache) -> None:
    (cache.root / "hashes").mkdir()
    (cache.root / "manifest.json").touch()
    cache.get_or_build("openvino-new", build, print)  # removes nothing
    assert keys(cache.prune()) == KEYS
    left = {path.name for path in cache.root.iterdir() if path.suffix not in (".use", ".lock")}
    assert left == {"hashes", "manifest.json", "openvino-new"}


def test_what_is_used_or_built_stays_and_makes_no_room(cache: EngineCache) -> None:
    assert cache.lookup(KEYS[0]) is not None and cache.entries()[0].key == KEYS[0]
    with locked(cache.root / f"{KEYS[1]}.use", fcntl.LOCK_SH), locked(cache.root / f"{KEYS[2]}.lock"):
        assert keys(cache.prune(3 * size_of(cache))) == [KEYS[3]]
        assert keys(cache.prune()) == []
    assert keys(cache.prune()) == KEYS[1:3]
    assert cache.lookup(KEYS[0]) is not None


# -- a new engine --------------------------------------------------------------------------------------------------


def test_a_new_engine_makes_room_but_not_by_itself(cache: EngineCache) -> None:
    lines: list[str] = []
    bounded = EngineCache(cache.root, max_bytes=3 * size_of(cache))
    assert bounded.get_or_build("openvino-new", build, lines.append).is_dir()
    assert keys(cache.entries()) == ["openvino-new", KEYS[3], KEYS[2]]
    assert [line.split(" to stay")[0] for line in lines] == [f"removed {key} from the engine cache" for key in KEYS[:2]]
    EngineCache(cache.root, max_bytes=0).get_or_build("openvino-large", build, lines.append)
    assert sorted(keys(cache.entries())) == ["openvino-large", "openvino-new"]


def test_one_entry_is_removed_by_its_key_unless_a_process_uses_it(cache: EngineCache) -> None:
    (cache.root / KEYS[0]).rename(cache.root / f".{KEYS[0]}.removed")  # what a killed removal left is no entry
    assert cache.remove(KEYS[0]) is False
    build(cache.root / KEYS[0])
    for key in KEYS[:2]:
        assert cache.remove(key) is True
        assert cache.remove(key) is False
    assert not [path for path in cache.root.iterdir() if path.is_dir() and path.name not in KEYS[2:]]
    with locked(cache.root / f"{KEYS[2]}.use"):
        assert cache.remove(KEYS[2]) is False
    assert sorted(entry.key for entry in cache.entries()) == KEYS[2:]


# -- what crashes leave ------------------------------------------------------------------------------------------------


DEAD = 2**22 + 1
"""More than any process id."""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, of this test alone; those just made count too."""
    path = tmp_path / "tmp"
    path.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(path))
    monkeypatch.setattr(work_directory, "_SHARED_MEMORY", tmp_path / "memory")
    monkeypatch.setattr(work_directory, "_SETTLED_SECONDS", -1.0)
    return path


@pytest.fixture
def root(tmp_path: Path, temporary: Path) -> Path:
    path = tmp_path / "cache"
    path.mkdir()
    return path


def names(root: Path) -> list[str]:
    return [item.path.name for item in find_leftovers(root)]


def file(path: Path, size: int = 7) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    return path


def test_an_empty_cache_and_whole_engines_have_no_leftovers(root: Path) -> None:
    assert names(root / "not there") == []
    build(root / KEY)
    (root / f"{KEY}.lock").touch()
    file(root / f"{KEY}.log")
    assert names(root) == []


def test_what_a_killed_builder_left_in_the_cache(root: Path, temporary: Path) -> None:
    file(root / f".{KEY}.{DEAD}.abcd.partial" / "model.bin", 100)
    file(root / f".{KEY}.removed" / "model.bin")
    file(root / f".{KEY}.fetched" / "model.bin")
    file(root / "outgoing" / f".bucket.{DEAD}.abcd.partial" / "model.bin")
    file(root / "outgoing" / ".bucket.1.abcd.partial.log")  # an error names it, and a compiler may write it
    file(root / "openvino-failed.log")
    (root / "openvino-half.lock").touch()
    file(root / "openvino-half" / "model.bin")
    file(root / "hashes" / ".aaaa.json.bbbb")
    file(temporary / f"{TEMPORARY_PREFIX}x" / "torch")
    found = find_leftovers(root)
    assert {item.path.name: item.size for item in found} == {
        f".{KEY}.{DEAD}.abcd.partial": 100,
        f".{KEY}.removed": 7,
        f".{KEY}.fetched": 7,
        f".bucket.{DEAD}.abcd.partial": 7,
        "openvino-failed.log": 7,
        "openvino-half": 7,
        ".aaaa.json.bbbb": 7,
        f"{TEMPORARY_PREFIX}x": 7,
    }
    for item in found:
        item.remove()
    assert names(root) == []


def test_what_a_builder_works_on_or_another_user_owns_stays(
    root: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = file(root / f".{KEY}.1.abcd.partial" / "model.bin").parent
    work = file(temporary / f"{TEMPORARY_PREFIX}x" / "torch").parent
    with pytest.raises(KeyboardInterrupt), EngineCache(root).outgoing("s3://a/bucket", print) as bucket:
        file(bucket / "model.bin")
        file(bucket.with_name(f"{bucket.name}.log"))
        raise KeyboardInterrupt  # the engine is not uploaded
    file(root / f"{KEY}.log")
    file(root / f".{KEY}.removed" / "model.bin")
    file(root / KEY / "model.bin")
    with (
        pytest.raises(KeyboardInterrupt),
        locked(root / f"{KEY}.lock"),
        marked(partial),
        marked(work),
        EngineCache(root).outgoing("s3://a/bucket/", print) as outgoing,
    ):
        assert outgoing.is_dir() and names(root) == []
        raise KeyboardInterrupt
    assert len(names(root)) == 7
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: work.stat().st_uid + 1)
        assert work.name not in names(root) and len(names(root)) == 6
    for item in (*find_leftovers(root), Leftover(root / "gone", 0)):
        item.remove()
    assert names(root) == []


@pytest.mark.parametrize("place", [f".{KEY}.1.ab.partial", "models/.abc.1.ab.partial"])
def test_what_another_machine_works_on_stays(root: Path, place: str) -> None:
    """On a network file system a directory's mark is one of this machine, and a file's lock one of all machines."""
    partial = file(root / place / "model.safetensors").parent
    lock = root / f"{KEY}.lock" if partial.parent == root else root / "models" / ".abc.lock"
    with locked(lock):
        assert names(root) == []
    assert names(root) == [partial.name]


@pytest.mark.parametrize("place", ["models/.abc.1.ab.partial", "downloads/s3/model-1/.v1.partial"])
def test_interrupted_extractions_and_downloads_are_leftovers_unless_they_go_on(root: Path, place: str) -> None:
    partial = file(root / place / "model.safetensors").parent
    lock = partial.with_name(".lock")
    lock.touch()
    with locked(lock), marked(partial):
        assert names(root) == []
    assert names(root) == [partial.name]


_COMPILE = """
import sys
from pathlib import Path
from djl_trtllm.config import load
from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.engines import build
from djl_trtllm.model import inspect
checkpoint, root, *command = sys.argv[1:]
config, layout = load(None, {"OPTION_ENGINE_CACHE_DIR": root}), inspect(Path(checkpoint))
plan = plan_engine(config, layout)
original = build.build_engine
def quick(*arguments, **options):
    return original(*arguments, command=command, **options)
build.build_engine = quick
print("started", flush=True)
build.prepare_engine(config, layout, print, plan=plan)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_at_any_moment_leaves_nothing_that_prune_does_not_remove(
    checkpoint: Path,
    root: Path,
    temporary: Path,
    fake_compiler: Callable[..., list[str]],
    number: signal.Signals,
) -> None:
    moments = random.Random(number)
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", _COMPILE, str(checkpoint), str(root), *fake_compiler("slow")],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(moments.uniform(0, 0.6))
        process.send_signal(number)
        process.wait()
        process.stdout.close()

        def is_clean() -> bool:
            # The compiler ends by itself when its parent is gone.
            for item in find_leftovers(root):
                item.remove()
            return not [path for folder in (root, temporary) for path in folder.iterdir() if not _stays(path)]

        wait_until(is_clean, 60)


def _stays(path: Path) -> bool:
    """Whether it is an engine, the log of one in the cache or an empty lock."""
    if path.suffix in (".lock", ".use"):
        return path.stat().st_size == 0
    return (path.with_suffix("") / "manifest.json").is_file()
