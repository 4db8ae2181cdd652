"""The bound of the local engine cache, and what `djl-trtllm cache` shows and removes."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from djl_trtllm.engines.cache import CacheEntry, EngineCache
from tests.engines.cache_entries import build, locked

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
    entries = cache.entries()
    assert keys(entries) == KEYS[::-1]
    assert [entry.last_used for entry in entries] == [1003, 1002, 1001, 1000]
    assert all(entry.verify() == [] for entry in entries)


def test_the_size_of_an_entry_is_that_of_its_files(cache: EngineCache) -> None:
    entry = cache.root / KEYS[0]
    (entry / "folder").mkdir()
    (entry / "folder" / "more.bin").write_bytes(bytes(77))
    assert CacheEntry.of(entry).size == 10_000 + 77 + (entry / "manifest.json").stat().st_size


def test_an_entry_without_a_mark_was_used_when_it_was_made(cache: EngineCache) -> None:
    (cache.root / f"{KEYS[0]}.use").unlink()
    os.utime(cache.root / KEYS[0], (5, 5))
    assert CacheEntry.of(cache.root / KEYS[0]).last_used == 5


def test_a_cache_that_is_not_there_has_no_entries(tmp_path: Path) -> None:
    assert EngineCache(tmp_path / "nowhere").entries() == []


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


def test_without_a_bound_everything_goes_with_its_log(cache: EngineCache) -> None:
    assert keys(cache.prune()) == KEYS
    assert not [path.name for path in cache.root.iterdir() if path.suffix not in (".use", ".lock")]


def test_looking_an_entry_up_makes_it_the_last_to_go(cache: EngineCache) -> None:
    assert cache.lookup(KEYS[0]) is not None
    assert cache.entries()[0].key == KEYS[0]


def test_an_entry_in_use_stays(cache: EngineCache) -> None:
    assert cache.lookup(KEYS[0]) is not None
    assert keys(cache.prune()) == KEYS[1:]
    assert cache.lookup(KEYS[0]) is not None


def test_an_entry_that_another_process_uses_stays_as_long(cache: EngineCache) -> None:
    with locked(cache.root / f"{KEYS[1]}.use", fcntl.LOCK_SH):
        assert keys(cache.prune()) == [KEYS[0], *KEYS[2:]]
    assert keys(cache.prune()) == [KEYS[1]]


def test_an_entry_that_another_process_builds_stays(cache: EngineCache) -> None:
    with locked(cache.root / f"{KEYS[2]}.lock"):
        assert keys(cache.prune(size_of(cache))) == [KEYS[0], KEYS[1], KEYS[3]]


def test_what_is_in_use_makes_no_room_and_the_next_goes(cache: EngineCache) -> None:
    with locked(cache.root / f"{KEYS[0]}.use", fcntl.LOCK_SH):
        assert keys(cache.prune(3 * size_of(cache))) == KEYS[1:2]


def test_what_a_killed_removal_left_is_no_entry_and_in_nobodys_way(cache: EngineCache) -> None:
    entry, gone = cache.root / KEYS[0], cache.root / f".{KEYS[0]}.removed"
    entry.rename(gone)
    assert keys(cache.entries()) == KEYS[:0:-1]
    build(entry)
    assert keys(cache.prune()) == KEYS
    assert not gone.exists()


def test_what_is_no_engine_is_no_entry(cache: EngineCache) -> None:
    (cache.root / "hashes").mkdir()
    (cache.root / "manifest.json").touch()
    assert keys(cache.prune()) == KEYS
    assert (cache.root / "hashes").is_dir()


# -- a new engine --------------------------------------------------------------------------------------------------


def test_a_new_engine_makes_room(cache: EngineCache) -> None:
    lines: list[str] = []
    bounded = EngineCache(cache.root, max_bytes=3 * size_of(cache))
    assert bounded.get_or_build("openvino-new", build, lines.append).is_dir()
    assert keys(cache.entries()) == ["openvino-new", KEYS[3], KEYS[2]]
    assert [line.split(" to stay")[0] for line in lines] == [f"removed {key} from the engine cache" for key in KEYS[:2]]


def test_without_a_bound_a_new_engine_removes_nothing(cache: EngineCache) -> None:
    cache.get_or_build("openvino-new", build, print)
    assert len(cache.entries()) == 5


def test_an_engine_larger_than_the_bound_is_kept_while_it_is_used(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path, max_bytes=0)
    assert cache.get_or_build("openvino-large", build, print).is_dir()
    assert cache.lookup("openvino-large") is not None


def test_one_entry_is_removed_by_its_key_unless_a_process_uses_it(cache: EngineCache) -> None:
    assert cache.remove(KEYS[1]) is True
    assert sorted(entry.key for entry in cache.entries()) == [KEYS[0], *KEYS[2:]]
    assert cache.remove(KEYS[1]) is False
    with locked(cache.root / f"{KEYS[2]}.use"):
        assert cache.remove(KEYS[2]) is False
    assert cache.remove(KEYS[2]) is True
