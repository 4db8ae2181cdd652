"""Many answers on one socket."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from djl_trtllm.djl.item import Item
from djl_trtllm.djl.streams import Stream, Streams
from tests.support.djl import Socket
from tests.support.virtual_time import in_virtual_time


class Carried:
    """A stream, and what it has brought into djl_python's queue."""

    def __init__(self, streams: Streams, number: str) -> None:
        self.stream = Stream(streams, number)
        self.brought: list[Streams] = []
        self.task = asyncio.ensure_future(self._carry())

    async def _carry(self) -> None:
        async for streams in self.stream.carry():
            self.brought.append(streams)


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
    assert frame.properties == {"request_tracking_id": "r1", "Content-Type": "text/plain"}
    assert frame.contents == [{"data": "a", "last": "false"}]
    carried.stream.put(Item(b"b", True))
    (frame,) = sent(streams).frames
    assert frame.properties == {"request_tracking_id": "r1"}
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
    assert [(frame.properties["request_tracking_id"], frame.contents[0]["data"]) for frame in connection.frames] == [
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
    assert [frame.contents[0]["last"] for frame in sent(streams).frames] == ["true", "true"]
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
    assert len(sent(streams).frames) == 2


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
    assert [frame.contents[0]["data"] for frame in sent(streams).frames] == ["bc"]
    assert [each async for each in carrying] == []


@in_virtual_time
async def test_the_number_that_djl_python_adds_is_not_needed() -> None:
    Streams().add_property("request_tracking_id", "r1")
