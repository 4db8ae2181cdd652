"""The answer to a client that does not read, or goes."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from djl_trtllm.server.response_writer import start_now
from tests.server.answered import Answered
from tests.support.virtual_time import in_virtual_time
from tests.support.word_encoder import chunk


@in_virtual_time
async def test_what_a_client_does_not_read_is_kept_and_sent_in_one_piece() -> None:
    answered = Answered()
    answered.deliver(chunk("a"))
    answered.client.stop_reading()
    answered.deliver(chunk("b"), chunk("c"), chunk("d"))
    await asyncio.sleep(29)
    assert answered.client.parts == [b"a"]
    answered.client.read_on()
    await answered.settle()
    assert answered.client.parts == [b"a", b"b", b"cd"]
    answered.deliver(chunk("e"), chunk(ends=True))
    await answered.sees(b"a", b"b", b"cd", b"e", b".", complete=True)


@in_virtual_time
async def test_an_answer_may_end_while_its_client_does_not_read() -> None:
    answered = Answered()
    answered.client.stop_reading()
    answered.deliver(chunk("a"), chunk("b"), chunk(ends=True))
    await answered.settle()
    assert not answered.task.done()
    answered.client.read_on()
    await answered.sees(b"a", b"b.", complete=True)


@in_virtual_time
async def test_a_last_part_that_is_not_read_at_once_is_the_last() -> None:
    answered = Answered()
    answered.client.stop_reading()
    answered.deliver(chunk("a", ends=True))
    await answered.settle()
    assert not answered.task.done()
    answered.client.read_on()
    await answered.sees(b"a.", complete=True)


@in_virtual_time
async def test_a_client_may_read_on_where_nothing_is_kept() -> None:
    answered = Answered()
    answered.client.stop_reading()
    answered.deliver(chunk("a"))
    await answered.settle()
    answered.client.read_on()
    await answered.settle()
    assert answered.client.parts == [b"a"]
    answered.deliver(chunk("b", ends=True))
    await answered.sees(b"a", b"b.", complete=True)


@in_virtual_time
async def test_a_client_that_does_not_read_for_stream_write_timeout_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answered = Answered()
    answered.deliver(chunk("a"))
    answered.client.stop_reading()
    answered.deliver(chunk("b"))
    await asyncio.sleep(29.9)
    assert (answered.client.aborted, answered.task.done()) == (False, False)
    await asyncio.sleep(0.2)
    assert answered.client.aborted
    await answered.sees(b"a", complete=False)
    assert "did not read for 30 seconds (option.stream_write_timeout)" in caplog.text
    answered.deliver(chunk("c"))
    assert answered.client.parts == [b"a"]


@in_virtual_time
async def test_every_write_has_its_own_timeout() -> None:
    answered = Answered()
    for _ in range(5):
        answered.client.stop_reading()
        answered.deliver(chunk("a"))
        await asyncio.sleep(29)
        answered.client.read_on()
        await answered.settle()
    assert not answered.client.aborted
    answered.deliver(chunk(ends=True))
    await answered.sees(*[b"a"] * 5, b".", complete=True)


@in_virtual_time
async def test_a_client_that_leaves_ends_the_wait() -> None:
    answered = Answered()
    answered.deliver(chunk("a"))
    answered.client.upload(b"more than it was asked for")
    await answered.settle()
    assert not answered.task.done()
    answered.client.leave()
    await answered.sees(b"a", complete=False)
    answered.deliver(chunk("b"), chunk(ends=True))
    await answered.settle()
    assert answered.client.parts == [b"a"]


@in_virtual_time
async def test_a_client_that_leaves_while_it_does_not_read_leaves_no_write_behind() -> None:
    answered = Answered()
    answered.client.stop_reading()
    answered.deliver(chunk("a"), chunk("b"))
    await answered.settle()
    answered.client.leave()
    await asyncio.wait_for(answered.task, 1)
    answered.client.read_on()
    await answered.settle()
    assert answered.client.sent == []


@pytest.mark.parametrize("reads", [True, False], ids=["at once", "while it does not read"])
@in_virtual_time
async def test_a_write_that_fails_is_the_end_of_the_answer(caplog: pytest.LogCaptureFixture, reads: bool) -> None:
    caplog.set_level(logging.INFO)
    answered = Answered()
    answered.deliver(chunk("a"))
    if not reads:
        answered.client.stop_reading()
        answered.deliver(chunk("b"), chunk("c"))
        await answered.settle()
    answered.client.vanish()
    answered.deliver(chunk("d"))
    await answered.sees(b"a", complete=False)
    assert "the client is gone: the client is gone" in caplog.text


@in_virtual_time
async def test_a_wait_that_is_cancelled_leaves_nothing() -> None:
    answered = Answered()
    answered.client.stop_reading()
    answered.deliver(chunk("a"))
    await answered.settle()
    answered.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answered.task
    await answered.settle()
    answered.client.read_on()
    await answered.settle()
    assert answered.client.sent == []


# -- coroutines that are begun by hand ---------------------------------------------------------------------------------


class Waiting:
    """A coroutine with two waits."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.waits: list[asyncio.Future[Any]] = [loop.create_future(), loop.create_future()]
        self.seen: list[object] = []

    async def run(self) -> None:
        self.seen.append("begun")
        for wait in self.waits:
            try:
                self.seen.append(await wait)
            except ValueError as error:
                self.seen.append(str(error))
            except BaseException as error:
                self.seen.append(type(error))
                raise


@in_virtual_time
async def test_what_never_waits_is_over_at_once() -> None:
    waiting = Waiting()
    waiting.waits.clear()
    assert start_now(waiting.run()) is None
    assert waiting.seen == ["begun"]


@in_virtual_time
async def test_what_waits_goes_on_with_values_and_exceptions() -> None:
    waiting = Waiting()
    rest = start_now(waiting.run())
    assert waiting.seen == ["begun"]
    assert rest is not None
    task = asyncio.ensure_future(rest)
    await asyncio.sleep(0)
    waiting.waits[0].set_exception(ValueError("wrong"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.waits[1].set_result(7)
    await task
    assert waiting.seen == ["begun", "wrong", 7]


@in_virtual_time
async def test_what_waits_learns_that_it_is_cancelled() -> None:
    waiting = Waiting()
    rest = start_now(waiting.run())
    assert rest is not None
    task = asyncio.ensure_future(rest)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert waiting.seen == ["begun", asyncio.CancelledError]
