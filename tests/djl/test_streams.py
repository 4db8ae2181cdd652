"""Many answers on one socket."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from djl_trtllm.djl.item import Item
from djl_trtllm.djl.streams import Stream, Streams
from tests.support.djl import Socket
from tests.support.virtual_time import in_virtual_time

NUMBER = "request_tracking_id"


class Carried:
    """A stream, and what it has brought into djl_python's queue."""

    def __init__(self, streams: Streams, number: str, queue: asyncio.Queue[Streams] | None = None) -> None:
        self.number = number
        self.stream = Stream(streams, number)
        self.brought: list[Streams] = []
        self._queue = queue
        self.task = asyncio.ensure_future(self._carry())

    async def _carry(self) -> None:
        async for streams in self.stream.carry():
            self.brought.append(streams)
            if self._queue is not None:
                await self._queue.put(streams)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def sent(streams: Streams) -> Socket:
    """What one turn of djl_python's sender writes."""
    connection = Socket()
    streams.send(cast(Any, connection))
    return connection


@in_virtual_time
async def test_an_item_is_framed_with_its_requests_number() -> None:
    streams = Streams()
    carried = Carried(streams, "r1")
    carried.stream.put(Item(b"a", properties=(("Content-Type", "text/plain"),)))
    (frame,) = sent(streams).frames
    assert (frame.code, frame.message) == (200, "OK")
    assert frame.properties == {NUMBER: "r1", "Content-Type": "text/plain"}
    assert frame.contents == [{"data": "a", "last": "false"}]
    carried.stream.put(Item(b"b", True))
    (frame,) = sent(streams).frames
    assert frame.properties == {NUMBER: "r1"}
    assert frame.contents == [{"data": "b", "last": "true"}]
    await carried.task


@in_virtual_time
async def test_what_waits_of_all_requests_goes_in_one_write_with_one_reference_in_the_queue() -> None:
    streams = Streams()
    first, second = Carried(streams, "r1"), Carried(streams, "r2")
    for stream, text in ((first, b"a"), (second, b"b"), (first, b"c")):
        stream.stream.put(Item(text))
    await settle()
    assert (first.brought, second.brought) == ([streams], [])
    connection = sent(streams)
    assert len(connection.writes) == 1
    assert [(frame.properties[NUMBER], frame.contents[0]["data"]) for frame in connection.frames] == [
        ("r1", "ac"),
        ("r2", "b"),
    ]
    # Written, so that the next item brings it again.
    second.stream.put(Item(b"d"))
    await settle()
    assert (first.brought, second.brought) == ([streams], [streams])
    for stream in (first, second):
        stream.stream.put(Item(b"", True))
    await settle()
    assert [frame.contents[0] for frame in sent(streams).frames] == [
        {"data": "d", "last": "false"},
        {"data": "", "last": "true"},
        {"data": "", "last": "true"},
    ]
    await asyncio.gather(first.task, second.task)


@in_virtual_time
async def test_an_error_has_a_frame_of_its_own() -> None:
    streams = Streams()
    carried = Carried(streams, "r1")
    carried.stream.put(Item(b"a"))
    carried.stream.put(Item(b"", True, 500, "broken"))
    assert [frame.contents[0].get("code") for frame in sent(streams).frames] == [None, "500"]
    await carried.task


@in_virtual_time
async def test_nothing_waits_and_nothing_is_written() -> None:
    streams = Streams()
    carried = Carried(streams, "r1")
    carried.stream.put(Item(b"a", True))
    await carried.task
    assert len(sent(streams).writes) == 1
    assert sent(streams).writes == []


@in_virtual_time
async def test_a_request_ends_when_it_has_brought_its_last_item() -> None:
    streams = Streams()
    one, other = Carried(streams, "r1"), Carried(streams, "r2")
    one.stream.put(Item(b"a"))
    await settle()
    assert not one.task.done()
    other.stream.put(Item(b"b", True))
    await settle()
    # `one` has brought the queue's reference, in which the last item of `other` travels.
    assert (other.brought, other.task.done()) == ([], True)
    one.stream.put(Item(b"c", True))
    await settle()
    assert one.task.done()
    assert [frame.contents[0]["data"] for frame in sent(streams).frames] == ["a", "c", "b"]


@in_virtual_time
async def test_items_that_come_while_the_queue_is_full_are_brought_before_the_end() -> None:
    streams = Streams()
    stream = Stream(streams, "r1")
    carrying = stream.carry()
    stream.put(Item(b"a"))
    assert await carrying.__anext__() is streams
    sent(streams)
    # djl_python is busy with what it was given; meanwhile the answer ends.
    stream.put(Item(b"b"))
    stream.put(Item(b"c", True))
    assert await carrying.__anext__() is streams
    assert [frame.contents[0]["data"] for frame in sent(streams).frames] == ["b", "c"]
    assert [each async for each in carrying] == []


@pytest.mark.parametrize("backlog", [1, 3, 1000])
@in_virtual_time
async def test_every_token_arrives_once_and_in_order_however_long_the_backlog(backlog: int) -> None:
    """djl_python's sender takes all that is in its queue every `backlog` steps."""
    steps = 50
    streams, queue, connection = Streams(), asyncio.Queue[Streams](), Socket()
    carried = [Carried(streams, f"r{number}", queue) for number in range(5)]

    def take_all() -> None:
        while not queue.empty():
            queue.get_nowait().send(cast(Any, connection))

    longest = 0
    for step in range(steps):
        for each in carried:
            each.stream.put(Item(f"{step};".encode(), step == steps - 1))
        await settle()
        longest = max(longest, queue.qsize())
        if step % backlog == 0:
            take_all()
    await asyncio.gather(*(each.task for each in carried))
    take_all()
    assert longest == 1
    assert len(connection.writes) <= steps // backlog + 2
    for each in carried:
        own = [frame.contents[0] for frame in connection.frames if frame.properties == {NUMBER: each.number}]
        assert "".join(content["data"] for content in own) == "".join(f"{step};" for step in range(steps))
        assert [content["last"] for content in own] == ["false"] * (len(own) - 1) + ["true"]


@in_virtual_time
async def test_the_number_that_djl_python_adds_is_not_needed() -> None:
    Streams().add_property(NUMBER, "r1")
