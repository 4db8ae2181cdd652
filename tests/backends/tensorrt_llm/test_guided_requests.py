"""Requests with a guide on their way into TensorRT-LLM, behind a checker that is played."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

from djl_trtllm.backends.tensorrt_llm.guided_requests import GuidedRequests
from djl_trtllm.executor.protocol import Submit
from djl_trtllm.request import Sampling
from tests.executor.played_checker import PlayedChecker, regex
from tests.support.virtual_time import in_virtual_time


class Held:
    def __init__(self) -> None:
        self.checker = PlayedChecker()
        self.submitted: list[int] = []
        self.refused: list[tuple[int, str]] = []
        self.requests = GuidedRequests(
            self.checker,  # type: ignore[arg-type]
            lambda request: self.submitted.append(request.request_id),
            lambda request, problem: self.refused.append((request.request_id, problem)),
        )

    def hold(self, request_id: int, text: str) -> None:
        self.requests.hold(Submit(request_id, [5], Sampling(9), guide=regex(text)))


@in_virtual_time
async def test_a_request_is_held_until_its_guide_was_tried() -> None:
    held = Held()
    for number, text in enumerate(("a", "b", "a")):
        held.hold(number, text)
    await asyncio.sleep(1)
    assert (held.submitted, len(held.requests)) == ([], 3)
    held.checker.decide("a")
    await asyncio.sleep(0.1)
    assert (held.submitted, len(held.requests)) == ([0, 2], 1)
    held.checker.decide("b", "no good")
    await asyncio.sleep(0.1)
    assert (held.refused, len(held.requests)) == ([(1, "no good")], 0)
    held.hold(3, "c")
    held.checker.decide("c")
    await asyncio.sleep(0.1)
    assert held.submitted == [0, 2, 3]


@in_virtual_time
async def test_a_request_is_submitted_in_the_context_in_which_it_came() -> None:
    """Lines that are printed for it have its id, and not that of the first one that was held."""
    name: ContextVar[str] = ContextVar("name", default="")
    held, names = Held(), []
    held.requests._submit = lambda request: names.append((request.request_id, name.get()))
    for number, text in ((1, "a"), (2, "b")):
        token = name.set(text)
        held.hold(number, text)
        name.reset(token)
    for text in "ab":
        held.checker.decide(text)
    await asyncio.sleep(0.1)
    assert names == [(1, "a"), (2, "b")]


@in_virtual_time
async def test_a_guide_that_was_tried_holds_nothing_up() -> None:
    held = Held()
    held.checker.decide("a")
    held.checker.decide("b", "no good")
    held.hold(1, "a")
    held.hold(2, "b")
    assert (held.submitted, held.refused) == ([1], [(2, "no good")])


@in_virtual_time
async def test_a_request_that_is_cancelled_meanwhile_is_not_submitted() -> None:
    held = Held()
    held.hold(1, "a")
    cancelled = held.requests.cancel(1)
    assert cancelled is not None and cancelled.request_id == 1
    assert held.requests.cancel(1) is None
    held.checker.decide("a")
    await asyncio.sleep(1)
    assert held.submitted == []


@in_virtual_time
async def test_a_verdict_that_was_forgotten_is_asked_for_again() -> None:
    held = Held()
    held.hold(1, "a")
    await asyncio.sleep(1)
    assert held.checker.checked.count("a") > 2
    assert held.checker.waited == {0.0}
    held.requests.close()


@in_virtual_time
async def test_closing_ends_the_checker_and_the_polling() -> None:
    held = Held()
    held.requests.close()
    held.hold(1, "a")
    held.requests.close()
    checked = len(held.checker.checked)
    await asyncio.sleep(1)
    assert (held.checker.closed, len(held.checker.checked)) == (True, checked)
