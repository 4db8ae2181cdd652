"""The streams of snapshots."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from djl_trtllm.config import Options
from djl_trtllm.errors import OverloadedError
from djl_trtllm.server.exchange import Exchange
from djl_trtllm.server.metrics import ServerCounts
from djl_trtllm.server.monitor.watchers import MOST, PERIOD, Watchers
from tests.support.asgi import Connection
from tests.support.virtual_time import in_virtual_time


class Pages:
    """Watchers with numbered snapshots, and pages that watch."""

    def __init__(self) -> None:
        self.made: list[str | None] = []
        self.watchers = Watchers(self._make)

    def _make(self, name: str | None) -> bytes:
        self.made.append(name)
        return b"%d" % len(self.made)

    def open(self, name: str | None = None) -> Connection:
        async def app(scope: object, receive: object, send: object) -> None:
            options = Options(stream_write_timeout=30.0)
            exchange = Exchange(page.scope, page.receive, page.send, options, ServerCounts())
            await self.watchers.watch(exchange, name)

        page = Connection("GET", "/monitor/events")
        return page.begin(app)


@asynccontextmanager
async def opened(number: int, *names: str | None):  # type: ignore[no-untyped-def]
    """Pages that have had their first snapshot."""
    pages = Pages()
    connections = [pages.open(*names) for _ in range(number)]
    await asyncio.sleep(0.01)
    yield pages, connections
    for connection in connections:
        connection.leave()
    await asyncio.gather(*(each.end() for each in connections))
    assert pages.watchers.count == 0


def events(page: Connection) -> list[bytes]:
    return [part.removeprefix(b"data: ").removesuffix(b"\n\n") for part in page.parts]


@in_virtual_time
async def test_a_page_gets_four_snapshots_a_second() -> None:
    async with opened(1) as (_, (page,)):
        assert page.status == 200
        assert page.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert page.headers["x-accel-buffering"] == "no"
        assert page.parts == [b"data: 1\n\n"]
        await asyncio.sleep(1)
        assert PERIOD == 0.25
        assert events(page) == [b"1", b"2", b"3", b"4", b"5"]


@in_virtual_time
async def test_all_pages_share_a_snapshot() -> None:
    async with opened(MOST) as (pages, connections):
        await asyncio.sleep(0.5)
        assert [events(each) for each in connections] == [[b"1", b"2", b"3"]] * MOST
        assert len(pages.made) == 3


@in_virtual_time
async def test_a_snapshot_is_of_the_model_that_a_page_shows() -> None:
    pages = Pages()
    shown = [pages.open("story"), pages.open("fable"), pages.open("story")]
    await asyncio.sleep(0.01)
    assert pages.made == ["story", "fable"]
    assert [events(each) for each in shown] == [[b"1"], [b"2"], [b"1"]]
    pages.watchers.close()
    await asyncio.gather(*(each.end() for each in shown))


@in_virtual_time
async def test_nothing_is_made_without_a_page() -> None:
    async with opened(1) as (pages, (page,)):
        page.leave()
        await page.end()
        made = len(pages.made)
        await asyncio.sleep(5)
        assert len(pages.made) == made


@in_virtual_time
async def test_one_page_too_many_is_refused_until_another_is_closed() -> None:
    async with opened(MOST) as (pages, connections):
        with pytest.raises(OverloadedError, match="4 pages watch already") as refused:
            await pages.open().end()
        assert (refused.value.queue_depth, refused.value.capacity, refused.value.retry_after) == (4, 4, 5)
        connections[0].leave()
        await connections[0].end()
        later = pages.open()
        await asyncio.sleep(0.01)
        assert later.status == 200
        later.leave()
        await later.end()


@in_virtual_time
async def test_a_slow_page_leaves_snapshots_out() -> None:
    async with opened(2) as (_, (slow, quick)):
        slow.stop_reading()
        await asyncio.sleep(3)
        slow.read_on()
        await asyncio.sleep(0.01)
        # The one that was being sent, and then the newest.
        assert events(slow) == [b"1", b"2"]
        await asyncio.sleep(0.25)
        assert events(slow)[-1] == events(quick)[-1]
        assert len(events(slow)) == 3
        assert len(events(quick)) == 14


@in_virtual_time
async def test_a_page_that_does_not_read_is_dropped() -> None:
    async with opened(2) as (pages, (stuck, quick)):
        stuck.stop_reading()
        await asyncio.sleep(29)
        assert not stuck.done()
        await asyncio.sleep(2)
        assert stuck.done()
        assert stuck.aborted
        assert not quick.aborted
        assert pages.watchers.count == 1


@in_virtual_time
async def test_a_page_that_vanishes_gives_its_place_back() -> None:
    pages = Pages()
    page = pages.open()
    await asyncio.sleep(0.01)
    page.vanish()
    with pytest.raises(OSError, match="gone"):
        await page.end()
    assert pages.watchers.count == 0


@in_virtual_time
async def test_closing_ends_every_stream() -> None:
    pages = Pages()
    connections = [pages.open(), pages.open()]
    await asyncio.sleep(0.3)
    connections[1].stop_reading()
    await asyncio.sleep(0.3)
    pages.watchers.close()
    await asyncio.gather(*(each.end() for each in connections))
    assert connections[0].complete
    assert not connections[0].aborted
    assert connections[1].aborted
    assert pages.watchers.count == 0
