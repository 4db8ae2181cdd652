from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from djl_trtllm.executor.protocol import Delta, Stats, Step
from djl_trtllm.executor.step_buffer import StepBuffer
from djl_trtllm.request import FinishReason


def sent_by(body: Callable[[StepBuffer], None]) -> list[list[Delta]]:
    """What an step_buffer sends of what `body` puts in within one turn of the loop."""
    steps: list[Step] = []

    async def main() -> None:
        step_buffer = StepBuffer(steps.append, Stats)
        body(step_buffer)
        assert steps == []
        for _ in range(3):
            await asyncio.sleep(0)
        assert step_buffer.sent == len(steps)

    asyncio.run(main())
    return [step.deltas for step in steps]


def test_what_one_wake_up_brings_is_one_message() -> None:
    def body(step_buffer: StepBuffer) -> None:
        for request_id in range(3):
            step_buffer.extend(request_id, [request_id], None)

    assert sent_by(body) == [[Delta(0, [0]), Delta(1, [1]), Delta(2, [2])]]


def test_a_backlog_of_one_request_is_one_delta() -> None:
    def body(step_buffer: StepBuffer) -> None:
        step_buffer.extend(7, [1], [-0.1]).cached_tokens = 4
        step_buffer.extend(7, [2, 3], [-0.2, -0.3])
        step_buffer.extend(7, [], None).finish = FinishReason.LENGTH

    assert sent_by(body) == [[Delta(7, [1, 2, 3], [-0.1, -0.2, -0.3], FinishReason.LENGTH, None, 4)]]


def test_a_source_is_asked_once_when_the_message_is_made() -> None:
    def body(step_buffer: StepBuffer) -> None:
        class Source:
            def collect(self) -> None:
                step_buffer.extend(7, list(waiting), None)

        waiting: list[int] = []
        step_buffer.collect_from(Source())
        waiting += [1, 2]
        step_buffer.extend(8, [3], None)

    assert sent_by(body) == [[Delta(8, [3]), Delta(7, [1, 2])]]


class Waiting:
    """A source with tokens of request 7, once."""

    def __init__(self, step_buffer: StepBuffer, *token_ids: int) -> None:
        self.step_buffer, self.token_ids = step_buffer, list(token_ids)
        self.asked = 0

    def collect(self) -> None:
        self.asked += 1
        if self.token_ids:
            self.step_buffer.extend(7, self.token_ids, None)


def test_sources_alone_make_a_message_if_one_of_them_has_something() -> None:
    assert sent_by(lambda step_buffer: step_buffer.collect_from(Waiting(step_buffer, 1))) == [[Delta(7, [1])]]
    assert sent_by(lambda step_buffer: step_buffer.collect_from(Waiting(step_buffer))) == []


def test_a_flush_has_what_sources_have_and_asks_them_once() -> None:
    steps: list[Step] = []

    async def main() -> None:
        step_buffer = StepBuffer(steps.append, Stats)
        source = Waiting(step_buffer, 1)
        step_buffer.collect_from(source)
        step_buffer.flush()
        assert steps == [Step([Delta(7, [1])], Stats())]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (len(steps), source.asked) == (1, 1)

    asyncio.run(main())


@pytest.mark.parametrize("first", ["source", "tokens"])
def test_a_wake_up_schedules_one_message(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        scheduled: list[object] = []
        monkeypatch.setattr(asyncio.get_running_loop(), "call_soon", scheduled.append, raising=False)
        step_buffer = StepBuffer(lambda step: None, Stats)
        for number in range(3):
            if first == "source":
                step_buffer.collect_from(Waiting(step_buffer))
            step_buffer.extend(number, [1], None)
            step_buffer.collect_from(Waiting(step_buffer))
        monkeypatch.undo()
        assert len(scheduled) == 1

    asyncio.run(main())


def test_a_flush_with_nothing_new_is_a_sign_of_life() -> None:
    steps: list[Step] = []

    async def main() -> None:
        StepBuffer(steps.append, lambda: Stats(running=2)).flush()

    asyncio.run(main())
    assert steps == [Step([], Stats(running=2))]


def test_later_wake_ups_are_later_messages() -> None:
    steps: list[Step] = []

    async def main() -> None:
        step_buffer = StepBuffer(steps.append, Stats)
        for token in range(3):
            step_buffer.extend(1, [token], None)
            await asyncio.sleep(0)

    asyncio.run(main())
    assert [step.deltas[0].token_ids for step in steps] == [[0], [1], [2]]
