"""What is said of an engine process that grows, and when it is recycled."""

from __future__ import annotations

import asyncio

import pytest

from djl_trtllm.service.memory_watch import MemoryWatch
from tests.support.virtual_time import in_virtual_time

GB = 10**9


def watch(limit: float | None = None, at_start: int = 2 * GB) -> MemoryWatch:
    made = MemoryWatch("story", limit)
    made.begin(4000, at_start)
    return made


def test_growth_is_said_at_each_further_quarter(caplog: pytest.LogCaptureFixture) -> None:
    one = watch()
    for resident in (2.2, 2.49, 2.6, 3.0, 3.3, 3.3, 1.0):
        assert one.look(int(resident * GB)) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "the engine process (pid 4000) has grown to 2.60 GB, from 2.00 GB after loading" in caplog.messages[0]
    assert "has grown to 3.30 GB, from 2.00 GB" in caplog.messages[1]


def test_small_processes_grow_unnoticed(caplog: pytest.LogCaptureFixture) -> None:
    one = watch(at_start=GB // 10)
    one.look(GB // 3)
    assert caplog.messages == []
    one.look(GB // 2)
    assert len(caplog.messages) == 1


def test_a_process_at_its_limit_is_recycled() -> None:
    one = watch(3)
    assert one.look(3 * GB - 1) is None
    assert one.look(3 * GB) == "it takes 3.00 GB (option.executor_memory_limit=3)"
    assert one.resident == 3 * GB


def test_a_limit_below_what_an_engine_takes_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    one = watch(1.5)
    assert one.look(4 * GB) is None
    assert "option.executor_memory_limit=1.5 has no effect" in caplog.messages[0]
    assert "takes 2.00 GB as soon as it is loaded" in caplog.messages[0]
    one.begin(4001, GB)
    assert one.look(2 * GB) is not None


def test_a_process_that_has_ended_is_not_looked_at() -> None:
    one = watch(3)
    one.look(3 * GB)
    assert one.look(0) is None
    assert one.resident == 3 * GB


@in_virtual_time
async def test_recyclings_are_a_minute_apart() -> None:
    one = watch()
    assert one.may_recycle()
    await asyncio.sleep(59)
    assert not one.may_recycle()
    await asyncio.sleep(1.1)
    assert one.may_recycle()
    assert not one.may_recycle()


def test_growth_by_exactly_a_quarter_is_said(caplog: pytest.LogCaptureFixture) -> None:
    one = watch()
    one.look(2 * GB + GB // 2 - 1)
    assert caplog.messages == []
    one.look(2 * GB + GB // 2)
    assert len(caplog.messages) == 1


def test_before_there_is_a_process_nothing_is_resident() -> None:
    assert MemoryWatch("story", None).resident == 0
