from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from djl_trtllm.engine.cache import EngineCache, cache_key
from djl_trtllm.engine.manifest import Manifest
from djl_trtllm.engine.staging import staged
from djl_trtllm.errors import EngineError

from .cache_process import KEY
from .helpers import write_engine_files


def complete(path: Path) -> None:
    write_engine_files(path)
    Manifest.of(path, backend="openvino", checkpoint="sha256:abc", options={}, versions={}, platform="x86_64").write(
        path
    )


class Builder:
    """Builds at once and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, out: Path) -> None:
        self.calls += 1
        with staged(out) as partial:
            complete(partial)


def start(what: str, root: Path) -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("cache_process.py")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen([sys.executable, str(script), what, str(root)], env=environment)


def wait_until(condition: Callable[[], object], seconds: float = 120) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_eight_processes_on_an_empty_cache_compile_once(tmp_path: Path) -> None:
    processes = [start("race", tmp_path) for _ in range(8)]
    assert wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 8)
    (tmp_path / "go").touch()
    assert [process.wait(60) for process in processes] == [0] * 8
    assert len(list(tmp_path.glob("built-by-*"))) == 1
    assert len(list(tmp_path.glob("served-by-*"))) == 8


@pytest.mark.parametrize("what", ["half", "half-in-place"])
def test_a_builder_killed_half_way_leaves_nothing_that_is_taken_for_whole(tmp_path: Path, what: str) -> None:
    process = start(what, tmp_path)
    assert wait_until((tmp_path / "half").exists)
    cache, builder, told = EngineCache(tmp_path / "cache"), Builder(), list[str]()
    waiter = threading.Thread(target=cache.get_or_build, args=(KEY, builder, told.append))
    waiter.start()
    assert wait_until(lambda: told)
    assert told[0].startswith("another process is compiling this engine, waiting for it")
    assert cache.lookup(KEY) is None
    process.kill()
    waiter.join(60)
    process.wait(60)
    assert builder.calls == 1
    assert cache.lookup(KEY) == cache.root / KEY
    assert sorted(path.name for path in cache.root.iterdir() if path.suffix not in (".lock", ".use")) == [KEY]
    assert any("interrupted compile left" in line or "is not whole (no manifest)" in line for line in told)


def test_a_second_start_is_a_hit(tmp_path: Path) -> None:
    cache, builder = EngineCache(tmp_path / "not" / "there" / "yet"), Builder()
    assert cache.get_or_build(KEY, builder) == cache.get_or_build(KEY, builder) == cache.root / KEY
    assert builder.calls == 1


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest"])
def test_a_damaged_entry_is_told_and_built_again(tmp_path: Path, damage: str) -> None:
    cache, builder, told = EngineCache(tmp_path), Builder(), list[str]()
    entry = cache.get_or_build(KEY, builder)
    if damage == "truncate":
        (entry / "openvino_model.bin").write_bytes(bytes(10))
    elif damage == "remove":
        (entry / "openvino_model.bin").unlink()
    else:
        (entry / "manifest.json").write_text("{")
    assert cache.lookup(KEY) is None
    cache.get_or_build(KEY, builder, told.append)
    assert builder.calls == 2
    assert cache.lookup(KEY) == entry
    assert any(f"{entry} is not whole" in line for line in told)


def test_a_builder_that_fails_frees_the_cache_for_the_next(tmp_path: Path) -> None:
    def fail(out: Path) -> None:
        with staged(out):
            raise RuntimeError("no")

    cache, builder = EngineCache(tmp_path), Builder()
    with pytest.raises(RuntimeError, match="no"):
        cache.get_or_build(KEY, fail)
    assert not list(tmp_path.glob("*.partial"))
    cache.get_or_build(KEY, builder)
    assert builder.calls == 1


def test_a_builder_that_leaves_no_whole_engine_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="left no whole engine: no manifest"):
        EngineCache(tmp_path).get_or_build(KEY, lambda out: None)


def test_a_cache_that_cannot_be_written_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=r"cannot be written: .*option\.engine_cache_dir"):
        EngineCache(tmp_path / "file" / "cache").get_or_build(KEY, Builder())


def test_waiting_for_a_builder_is_bounded_where_asked(tmp_path: Path) -> None:
    started, done = threading.Event(), threading.Event()

    def slow(out: Path) -> None:
        started.set()
        done.wait(30)
        Builder()(out)

    cache = EngineCache(tmp_path)
    thread = threading.Thread(target=cache.get_or_build, args=(KEY, slow))
    thread.start()
    started.wait(30)
    try:
        with pytest.raises(EngineError, match="another process has been compiling"):
            cache.get_or_build(KEY, Builder(), wait_seconds=0.1)
    finally:
        done.set()
        thread.join(30)


def test_everything_that_changes_the_engine_changes_the_key() -> None:
    base = {
        "backend": "openvino",
        "checkpoint": "sha256:abc",
        "options": {"dtype": "fp16", "quantize": "none"},
        "versions": {"openvino": "2026.4.1"},
        "platform": "x86_64",
    }
    changes = [
        {},
        {"backend": "tensorrt"},
        {"checkpoint": "sha256:def"},
        {"options": {"dtype": "fp16", "quantize": "int8"}},
        {"versions": {"openvino": "2026.4.2"}},
        {"platform": "aarch64"},
    ]
    keys = [cache_key(**{**base, **change}) for change in changes]
    assert len(set(keys)) == len(keys)
    assert keys[0] == cache_key(**{**base, "options": {"quantize": "none", "dtype": "fp16"}})
    assert keys[0].startswith("openvino-")
