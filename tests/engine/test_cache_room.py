"""The bound of the local engine cache, and what `djl-trtllm cache` shows and removes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from djl_trtllm.engine import in_use
from djl_trtllm.engine.cache import EngineCache
from djl_trtllm.engine.manifest import Manifest
from djl_trtllm.engine.staging import staged

from .test_cache import wait_until

KEYS = [f"openvino-{number}" for number in range(4)]
SIZE = 10_000


def build(out: Path) -> None:
    with staged(out) as partial:
        (partial / "model.bin").write_bytes(bytes(SIZE))
        Manifest.of(partial, backend="openvino", checkpoint="x", options={}, versions={}, platform="x86_64").write(
            partial
        )


def filled(root: Path) -> EngineCache:
    """A cache of four entries that no process uses, the first used longest ago."""
    code = (
        "import sys; from pathlib import Path; from djl_trtllm.engine.cache import EngineCache; "
        "from tests.engine.test_cache_room import KEYS, build; "
        "[EngineCache(Path(sys.argv[1])).get_or_build(key, build) for key in KEYS]"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code, str(root)], env=environment, check=True)
    for age, key in enumerate(reversed(KEYS)):
        os.utime(root / f"{key}.use", (time.time() - 1000 * (age + 1),) * 2)
    return EngineCache(root)


def test_entries_are_listed_the_most_recently_used_first(tmp_path: Path) -> None:
    entries = filled(tmp_path).entries()
    assert [entry.key for entry in entries] == KEYS[::-1]
    assert all(entry.size > SIZE and entry.verify() == [] for entry in entries)


def test_those_used_longest_ago_go_first(tmp_path: Path) -> None:
    cache = filled(tmp_path)
    removed = cache.prune(3 * (SIZE + 2000))
    assert [entry.key for entry in removed] == KEYS[:1]
    assert [entry.key for entry in cache.entries()] == KEYS[:0:-1]


def test_looking_an_entry_up_makes_it_the_last_to_go(tmp_path: Path) -> None:
    cache = filled(tmp_path)
    assert cache.lookup(KEYS[0]) is not None
    assert cache.entries()[0].key == KEYS[0]


def test_an_entry_in_use_stays(tmp_path: Path) -> None:
    cache = filled(tmp_path)
    assert cache.lookup(KEYS[0]) is not None
    assert [entry.key for entry in cache.prune(0)] == KEYS[1:]
    assert cache.lookup(KEYS[0]) is not None


def test_an_entry_that_another_process_uses_stays_until_that_is_killed(tmp_path: Path) -> None:
    cache = filled(tmp_path)
    code = (
        "import sys, time; from pathlib import Path; from djl_trtllm.engine.cache import EngineCache; "
        "EngineCache(Path(sys.argv[1])).lookup(sys.argv[2]); print('using', flush=True); time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    user = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), KEYS[1]], env=environment, stdout=subprocess.PIPE
    )
    assert user.stdout is not None
    with user.stdout:
        assert user.stdout.readline() == b"using\n"
        assert [entry.key for entry in cache.prune(0)] == [KEYS[0], *KEYS[2:]]
        user.kill()
        user.wait()
    assert wait_until(lambda: [entry.key for entry in cache.prune(0)] == [KEYS[1]])


def test_a_new_engine_makes_room(tmp_path: Path) -> None:
    filled(tmp_path)
    lines: list[str] = []
    cache = EngineCache(tmp_path, max_bytes=3 * (SIZE + 2000))
    assert cache.get_or_build("openvino-new", build, lines.append).is_dir()
    assert [entry.key for entry in cache.entries()] == ["openvino-new", KEYS[3], KEYS[2]]
    assert sum("removed openvino-" in line for line in lines) == 2


def test_an_engine_larger_than_the_bound_is_kept_while_it_is_used(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path, max_bytes=10)
    assert cache.get_or_build("openvino-large", build).is_dir()
    assert cache.lookup("openvino-large") is not None


def test_a_file_written_after_the_engine_was_made_is_read_again(tmp_path: Path) -> None:
    cache = filled(tmp_path)
    model = tmp_path / KEYS[0] / "model.bin"
    model.write_bytes(b"\1" * SIZE)
    assert cache.lookup(KEYS[0]) is None
    os.utime(model, (1, 1))
    assert any("changed" in line for entry in cache.entries() for line in entry.verify())


def test_the_same_content_written_again_is_whole(tmp_path: Path) -> None:
    cache = filled(tmp_path)
    (tmp_path / KEYS[0] / "model.bin").write_bytes(bytes(SIZE))
    assert cache.lookup(KEYS[0]) is not None


def test_what_a_killed_removal_left_is_no_entry(tmp_path: Path) -> None:
    cache = filled(tmp_path)
    (tmp_path / KEYS[0]).rename(tmp_path / f".{KEYS[0]}.removed")
    assert KEYS[0] not in [entry.key for entry in cache.entries()]
    assert cache.get_or_build(KEYS[0], build).is_dir()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_cannot_be_written_is_used_as_it_is(tmp_path: Path) -> None:
    filled(tmp_path)
    for mark in tmp_path.glob("*.use"):
        mark.unlink()
    tmp_path.chmod(0o555)
    try:
        in_use.hold(tmp_path / f"{KEYS[0]}.use")
    finally:
        tmp_path.chmod(0o755)
