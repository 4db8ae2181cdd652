"""The local engine cache between processes, of which some are killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from djl_trtllm.engines.cache import EngineCache
from tests.engines.cache_entries import KEY, Builder, build
from tests.engines.helpers import wait_until

pytestmark = pytest.mark.slow


@contextmanager
def started(what: str, root: Path, count: int = 1) -> Iterator[list[subprocess.Popen[bytes]]]:
    script = Path(__file__).with_name("cache_process.py")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script), what, str(root)]
    processes = [subprocess.Popen(command, env=environment) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_several_processes_on_an_empty_cache_compile_once(tmp_path: Path) -> None:
    with started("race", tmp_path, 4) as processes:
        wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 4)
        (tmp_path / "go").touch()
        assert [process.wait(300) for process in processes] == [0] * 4
    assert len(list(tmp_path.glob("built-by-*"))) == 1
    assert len(list(tmp_path.glob("served-by-*"))) == 4


@pytest.mark.parametrize("what", ["half", "half-in-place"])
def test_a_builder_killed_half_way_leaves_nothing_that_is_taken_for_whole(tmp_path: Path, what: str) -> None:
    cache, builder, told = EngineCache(tmp_path / "cache"), Builder(), list[str]()
    with started(what, tmp_path) as (process,):
        wait_until((tmp_path / "half").exists)
        waiter = threading.Thread(target=cache.get_or_build, args=(KEY, builder, told.append), daemon=True)
        waiter.start()
        wait_until(lambda: told)
        assert cache.lookup(KEY) is None
        process.kill()
        waiter.join(300)
    assert builder.calls == 1
    assert cache.lookup(KEY) == cache.root / KEY
    assert [path.name for path in cache.root.iterdir() if path.is_dir()] == [KEY]


def test_an_entry_that_another_process_uses_stays_until_that_is_killed(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path / "cache")
    build(cache.root / KEY)
    with started("use", tmp_path):
        wait_until((tmp_path / "using").exists)
        assert cache.prune() == []
    assert [entry.key for entry in cache.prune()] == [KEY]
