"""Images of requests are read by a thread, and the engine's loop goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.executor.gated import GatedExecutor
from djl_trtllm.executor.images import AsyncImageGate, ImageGate, ImagePrompts
from djl_trtllm.executor.protocol import Step, Submit
from djl_trtllm.request import FinishReason, Image, Sampling
from tests.support.vision import seeing_model


class Reading:
    """A gate whose images are the requests' ids, read when `go_on` is set; that of a negative one is damaged."""

    def __init__(self, kind: type[ImageGate] = ImageGate) -> None:
        self.go_on = threading.Event()
        self.threads: set[threading.Thread] = set()
        self.began: list[int] = []
        self.submitted: list[tuple[int, int]] = []
        self.failed: list[tuple[int, str]] = []
        self.gate = kind(
            self.read,
            lambda request, image: self.submitted.append((request.request_id, image)),
            lambda request, error: self.failed.append((request.request_id, str(error))),
        )

    def read(self, request: Submit) -> int:
        self.threads.add(threading.current_thread())
        self.began.append(request.request_id)
        assert self.go_on.wait(60)
        if request.request_id < 0:
            raise ValueError("damaged")
        return request.request_id

    def hold(self, *ids: int) -> None:
        for request_id in ids:
            self.gate.hold(Submit(request_id, [1], Sampling(1)))

    def finish(self) -> None:
        self.go_on.set()
        while self.gate:
            self.gate.advance(60)


@pytest.fixture
def reading() -> Iterator[Reading]:
    made = Reading()
    yield made
    made.go_on.set()
    made.gate.close()


def test_requests_get_their_images_in_the_order_in_which_they_came(reading: Reading) -> None:
    reading.hold(3, 1, 2)
    reading.gate.advance()
    assert (reading.submitted, len(reading.gate)) == ([], 3)
    reading.finish()
    assert reading.submitted == [(3, 3), (1, 1), (2, 2)]
    assert len(reading.threads) == 1 and threading.current_thread() not in reading.threads


def test_a_damaged_image_fails_its_request_alone(reading: Reading) -> None:
    reading.hold(1, -2, 3)
    reading.finish()
    assert (reading.submitted, reading.failed) == ([(1, 1), (3, 3)], [(-2, "damaged")])


def test_a_cancelled_request_is_held_no_longer_and_not_read(reading: Reading) -> None:
    reading.hold(1, 2, 3)
    while not reading.began:
        time.sleep(0.001)
    assert reading.gate.cancel(1) and reading.gate.cancel(2)
    assert not reading.gate.cancel(2) and not reading.gate.cancel(4)
    reading.finish()
    assert (reading.submitted, reading.began) == ([(3, 3)], [1, 3])


def test_an_event_loop_goes_on_while_images_are_read() -> None:
    async def body() -> None:
        reading = Reading(AsyncImageGate)
        reading.hold(1, -2, 3, 4)
        assert reading.gate.cancel(3)
        await asyncio.sleep(0.01)
        assert (reading.submitted, reading.failed, len(reading.gate)) == ([], [], 3)
        reading.go_on.set()
        await until(lambda: not reading.gate)
        assert (reading.submitted, reading.failed) == ([(1, 1), (4, 4)], [(-2, "damaged")])

    asyncio.run(body())


def test_a_gate_that_is_closed_lets_nothing_through() -> None:
    async def body() -> None:
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        reading = Reading(AsyncImageGate)
        reading.hold(1, 2)
        await until(lambda: bool(reading.threads))
        reading.gate.close()
        reading.go_on.set()
        (thread,) = reading.threads
        await asyncio.to_thread(thread.join)
        await asyncio.sleep(0)
        assert (reading.submitted, reading.failed, len(reading.gate), errors) == ([], [], 0, [])

    asyncio.run(body())


class Gated(GatedExecutor):
    """An executor whose requests end when they are started."""

    def __init__(self, read: Callable[[Submit], Any]) -> None:
        super().__init__()
        self.open_images(read)

    @property
    def busy(self) -> bool:
        return self.holds or self.news.has_news

    def step(self) -> Step:
        self.advance(60)
        news, self.news = self.news, Step()
        return news

    def start(self, request: Submit, images: Any = None) -> None:
        self.news.end(request.request_id, FinishReason.STOP)

    def fail(self, request: Submit, error: Exception) -> None:
        self.news.end(request.request_id, FinishReason.ERROR)


def test_an_executor_waits_for_images_and_ends_a_request_that_is_cancelled_before_they_are_read() -> None:
    reading = Reading()
    executor = Gated(reading.read)
    for request_id, images in ((1, (Image(b"", 1, 1, 1),)), (2, (Image(b"", 1, 1, 1),)), (3, ())):
        executor.submit(Submit(request_id, [1], Sampling(1), images=images))
    assert [executor.cancel_held(request_id) for request_id in (2, 2, 3)] == [True, False, False]
    assert [end.finish for end in executor.news.ends] == [FinishReason.STOP, FinishReason.CANCELLED]
    reading.go_on.set()
    assert [end.request_id for end in executor.step().ends] == [3, 2, 1]
    assert not executor.busy
    executor.close_gates()


def test_the_first_request_has_an_image_with_as_many_tokens_as_its_prompt(tmp_path: Path) -> None:
    prompts = ImagePrompts(seeing_model(tmp_path / "seeing"))
    request = prompts.first()
    (image,), (picture,) = request.images, prompts.pictures(request)
    assert prompts.vision.tokens(*picture.size) == prompts.vision.tokens(image.width, image.height)
    assert prompts.vision.expanded(prompts.collapsed(request), [image.tokens]) == request.prompt_ids


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(60_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    pytest.fail("it does not come true")
