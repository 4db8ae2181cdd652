from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from pathlib import Path

import pytest

from djl_trtllm.engines import in_use
from tests.engines.cache_entries import is_free, locked


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "engine.use"


def test_a_mark_that_is_held_is_not_free(mark: Path) -> None:
    in_use.hold(mark)
    assert not is_free(mark)
    with in_use.nobody(mark) as free:
        assert not free


def test_other_users_may_look_and_not_write(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        in_use.hold(tmp_path / "held.use")
        with in_use.nobody(tmp_path / "free.use"):
            pass
    finally:
        os.umask(mask)
    assert [stat.S_IMODE(mark.stat().st_mode) for mark in tmp_path.iterdir()] == [0o644, 0o644]


def test_several_processes_hold_a_mark(mark: Path) -> None:
    with locked(mark, fcntl.LOCK_SH):
        in_use.hold(mark)
        with in_use.nobody(mark) as free:
            assert not free


def test_each_use_is_the_time_of_the_mark(mark: Path) -> None:
    before = time.time() - 1
    for _ in range(2):
        in_use.hold(mark)
        assert mark.stat().st_mtime > before
        os.utime(mark, (5, 5))
    in_use.hold(mark)
    assert mark.stat().st_mtime > before


def test_a_mark_is_held_once_however_often_it_is_used(mark: Path) -> None:
    in_use.hold(mark)
    descriptors = len(os.listdir("/proc/self/fd"))
    in_use.hold(mark)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_mark_that_nobody_holds_is_kept_from_others_meanwhile(mark: Path) -> None:
    with in_use.nobody(mark) as free:
        assert free and not is_free(mark)
    assert is_free(mark)


def test_a_mark_that_another_process_holds_is_not_free(mark: Path) -> None:
    for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX):
        with locked(mark, kind), in_use.nobody(mark) as free:
            assert not free
    with in_use.nobody(mark) as free:
        assert free


def test_the_mark_is_let_go_whatever_happens(mark: Path) -> None:
    with pytest.raises(RuntimeError), in_use.nobody(mark):
        raise RuntimeError
    assert is_free(mark)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_where_nothing_can_be_written_there_is_nothing_to_hold(
    mark: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        in_use.hold(mark)
    with in_use.nobody(mark) as free:
        assert free


def test_any_other_failure_is_reported(mark: Path) -> None:
    with pytest.raises(FileNotFoundError):
        in_use.hold(mark / "nowhere")


def test_a_mark_is_no_affair_of_what_this_process_starts(mark: Path) -> None:
    in_use.hold(mark)
    (descriptor,) = (
        int(entry.name) for entry in Path("/proc/self/fd").iterdir() if os.path.realpath(entry) == str(mark)
    )
    assert not os.get_inheritable(descriptor)
