"""What a result says becomes deltas; the results here are stand-ins that say what the rule is about."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from djl_trtllm.backends.tensorrt_llm.running_request import Heartbeat, RunningRequest
from djl_trtllm.executor.protocol import Delta, Logprob, Ranked, Stats, Step, Submit
from djl_trtllm.executor.step_buffer import StepBuffer
from djl_trtllm.request import FinishReason, Sampling

END = 2


@dataclass
class Output:
    """As TensorRT-LLM's CompletionOutput."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Result:
    """One object that every step changes: `steps` are functions of it, None is a wait for the next wake-up."""

    def __init__(self, *steps: Any, beams: int = 1, cached_tokens: int = 0) -> None:
        self.outputs = [Output() for _ in range(beams)]
        self.cached_tokens = cached_tokens
        self._steps = iter(steps)

    def __aiter__(self) -> Result:
        return self

    async def __anext__(self) -> Result:
        for step in self._steps:
            if step is None:
                await asyncio.sleep(0.001)
                continue
            step(self)
            return self
        raise StopAsyncIteration


def say(*tokens: int, end: str | None = None, stop: int | str | None = None, logprobs: Any = ()) -> Any:
    """A step with tokens, the last one with a reason."""

    def step(result: Result) -> None:
        output = result.outputs[0]
        output.token_ids.extend(tokens)
        output.logprobs += logprobs
        output.finish_reason, output.stop_reason = end, stop

    return step


def fail(error: Exception) -> Any:
    def step(result: Result) -> None:
        raise error

    return step


def played(act: Callable[[RunningRequest], Awaitable[None]], result: Any, **fields: Any) -> list[list[Delta]]:
    """The messages that come of a request with a result. `fields` are those of Sampling and of Submit."""
    sampling = {name: fields.pop(name) for name in Sampling.__struct_fields__ if name in fields}
    steps: list[Step] = []

    async def main() -> None:
        message = Submit(1, [5, 6], Sampling(99, **sampling), **fields)
        await act(RunningRequest(message, result, StepBuffer(steps.append, Stats), Heartbeat(), END))
        await asyncio.sleep(0)

    asyncio.run(main())
    return [step.deltas for step in steps]


def followed(result: Result, *, muted: bool = False, **fields: Any) -> list[list[Delta]]:
    """The messages that come of following a result."""

    async def follow(request: RunningRequest) -> None:
        assert not request.muted
        request.muted = muted
        await request.follow()

    return played(follow, result, **fields)


def test_deltas_carry_what_is_new_and_the_last_one_the_end() -> None:
    result = Result(say(5), None, say(6, 7), None, say(8, end="length"))
    assert followed(result) == [[Delta(1, [5])], [Delta(1, [6, 7])], [Delta(1, [8], None, FinishReason.LENGTH)]]


def test_a_backlog_of_responses_is_one_delta() -> None:
    assert followed(Result(*[say(token) for token in range(4)], say(4, end="length"))) == [
        [Delta(1, [0, 1, 2, 3, 4], None, FinishReason.LENGTH)]
    ]


def test_of_a_backlog_the_buffer_asks_once() -> None:
    asked: list[int] = []

    class Counted(RunningRequest):
        def collect(self) -> None:
            asked.append(len(self.result.outputs[0].token_ids))
            super().collect()

    async def main() -> None:
        result = Result(say(5), say(6), None, say(7), say(8), None, say(9, end="length"))
        await Counted(Submit(1, [5], Sampling(9)), result, StepBuffer(lambda _: None, Stats), Heartbeat(), END).follow()

    asyncio.run(main())
    assert asked[:2] == [2, 4]


def test_responses_and_statistics_are_signs_of_life() -> None:
    heartbeat = Heartbeat()
    heartbeat.responses, heartbeat.iterations = 3, 4
    assert heartbeat.beats == 7


def test_responses_without_tokens_are_no_deltas() -> None:
    assert followed(Result(say(), None, say(), None, say(5, end="length"))) == [
        [Delta(1, [5], None, FinishReason.LENGTH)]
    ]


def test_cached_tokens_come_with_the_first_delta_only() -> None:
    (first, second) = followed(Result(say(5), None, say(6, end="length"), cached_tokens=64))
    assert (first[0].cached_tokens, second[0].cached_tokens) == (64, 0)


@pytest.mark.parametrize(
    ("last", "tokens"),
    [
        (say(6, END, end="stop"), [5, 6, END]),  # the PyTorch backend
        (say(6, end="stop"), [5, 6, END]),  # the engine backend leaves the end id out
        (say(6, 40, end="stop", stop=40), [5, 6, 40]),
        (say(6, end="stop", stop=40), [5, 6, 40]),  # taken off
        (say(6, 7, end="stop", stop="wolf"), [5, 6, 7]),
        (say(END, end="stop", stop=END), [5, END]),  # end id and stop id at once
    ],
)
def test_the_id_that_ended_it_is_the_last(last: Any, tokens: list[int]) -> None:
    (deltas,) = followed(Result(say(5), last), stop_token_ids=[END, 40])
    assert deltas == [Delta(1, tokens, None, FinishReason.STOP)]


def test_an_end_that_was_left_out_has_a_log_probability() -> None:
    (deltas,) = followed(Result(say(5, end="stop", logprobs=[-1.0])), logprobs=True)
    assert deltas == [Delta(1, [5, END], [-1.0, None], FinishReason.STOP)]


@pytest.mark.parametrize(
    ("reason", "finish", "error"),
    [
        ("length", FinishReason.LENGTH, None),
        ("cancelled", FinishReason.CANCELLED, None),
        ("timeout", FinishReason.ERROR, "TensorRT-LLM ended the request with 'timeout'"),
        (None, FinishReason.ERROR, "TensorRT-LLM ended the request with None"),
    ],
)
def test_every_finish_reason_is_an_end(reason: str | None, finish: FinishReason, error: str | None) -> None:
    assert followed(Result(say(5, end=reason))) == [[Delta(1, [5], None, finish, error)]]


def with_others(token: int, logprob: float) -> dict[int, Any]:
    return {9000: SimpleNamespace(logprob=-0.01), token: SimpleNamespace(logprob=logprob)}


def test_the_likeliest_tokens_come_with_each_when_asked_for() -> None:
    def entry(*pairs: tuple[int, float]) -> dict[int, Any]:
        return {token: SimpleNamespace(logprob=logprob) for token, logprob in pairs}

    entries = [entry((5, -0.5), (8, -2.0), (9, -1.0)), entry((8, -0.1), (9, -0.2)), -0.25]
    ((delta,),) = followed(Result(say(5, 6, 7, logprobs=entries, end="length")), logprobs=True, top_logprobs=2)
    assert delta.logprobs == [
        Ranked(-0.5, [5, 9], [-0.5, -1.0]),
        Ranked(None, [8, 9], [-0.1, -0.2]),
        Ranked(-0.25, [], []),
    ]


def test_log_probabilities_are_those_of_the_chosen_tokens() -> None:
    result = Result(
        say(5, logprobs=[with_others(5, -0.5)]),
        None,
        say(6, 7, end="length", logprobs=[with_others(6, -0.6), with_others(7, -0.7)]),
    )
    assert followed(result, logprobs=True) == [
        [Delta(1, [5], [-0.5])],
        [Delta(1, [6, 7], [-0.6, -0.7], FinishReason.LENGTH)],
    ]


def test_a_sampled_token_that_is_not_among_the_likeliest_has_no_log_probability() -> None:
    result = Result(say(5, 6, end="length", logprobs=[with_others(7, -0.5), with_others(6, -0.6)]))
    assert followed(result, logprobs=True) == [[Delta(1, [5, 6], [None, -0.6], FinishReason.LENGTH)]]


def test_log_probabilities_may_be_plain_numbers_or_those_of_the_last_response_only() -> None:
    def last_only(result: Result) -> None:
        result.outputs[0].token_ids.append(6)
        result.outputs[0].logprobs = [-0.6]
        result.outputs[0].finish_reason = "length"

    result = Result(say(5, logprobs=[-0.5]), None, last_only)
    assert [deltas[0].logprobs for deltas in followed(result, logprobs=True)] == [[-0.5], [-0.6]]
    backlog = Result(say(5, logprobs=[-0.5]), last_only)
    assert [deltas[0].logprobs for deltas in followed(backlog, logprobs=True)] == [[-0.5, -0.6]]


def test_too_few_log_probabilities_are_an_error_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="gave 1 log-probabilities for 2 tokens"):
        followed(Result(say(5, 6, logprobs=[-0.5])), logprobs=True)


def test_unasked_log_probabilities_are_not_sent() -> None:
    assert followed(Result(say(5, end="length", logprobs=[-0.5]))) == [[Delta(1, [5], None, FinishReason.LENGTH)]]


@pytest.mark.parametrize("reason", ["cancelled", "length", "stop"])
def test_a_muted_request_sends_its_end_and_nothing_else(reason: str) -> None:
    result = Result(say(5), None, say(6), None, say(7, end=reason))
    assert followed(result, muted=True) == [[Delta(1, [], None, FinishReason.CANCELLED)]]


def test_beams_are_sequences_of_their_own_delivered_at_the_end() -> None:
    def grow(*beams: list[int], end: str | None = None) -> Any:
        def step(result: Result) -> None:
            for output, tokens in zip(result.outputs, beams, strict=True):
                output.token_ids, output.finish_reason = tokens, end

        return step

    result = Result(grow([5], [6]), None, grow([5, 7], [6, 8, 9], end="length"), beams=2)
    assert followed(result, beam_width=2) == [
        [Delta(1, [5, 7], None, FinishReason.LENGTH), Delta(2, [6, 8, 9], None, FinishReason.LENGTH)]
    ]


def test_what_a_step_raises_comes_out() -> None:
    with pytest.raises(RuntimeError, match="no such token"):
        followed(Result(say(5), fail(RuntimeError("no such token"))))


def test_tokens_of_a_prompt_that_were_cached_are_0_where_the_result_does_not_say() -> None:
    result = Result(say(5, end="length"))
    del result.cached_tokens
    ((delta,),) = followed(result)
    assert delta.cached_tokens == 0


@pytest.mark.parametrize("beams", [1, 2])
def test_every_response_is_a_sign_of_life(beams: int) -> None:
    seen: list[tuple[int, bool]] = []

    async def follow(request: RunningRequest) -> None:
        heartbeat = request._heartbeat
        seen.append((heartbeat.beats, request.responded))
        await request.follow()
        seen.append((heartbeat.beats, request.responded))

    def finish(result: Result) -> None:
        for output in result.outputs:
            output.finish_reason = "length"

    played(follow, Result(say(5), None, say(), finish, beams=beams), beam_width=beams)
    assert seen == [(0, False), (3, True)]


@pytest.mark.parametrize("beams", [1, 3])
def test_a_request_may_be_ended_from_outside(beams: int) -> None:
    async def end(request: RunningRequest) -> None:
        assert request.aborted_for is None
        request.end(FinishReason.ERROR, "no room")

    (deltas,) = played(end, None, beam_width=beams)
    assert deltas == [Delta(1 + number, [], None, FinishReason.ERROR, "no room") for number in range(beams)]


def test_beams_have_log_probabilities_where_they_are_asked_for_and_given() -> None:
    def finish(logprobs: list[Any]) -> Any:
        def step(result: Result) -> None:
            for output in result.outputs:
                output.token_ids, output.logprobs, output.finish_reason = [5], list(logprobs), "length"

        return step

    def of(logprobs: list[Any], asked: bool) -> list[list[Logprob] | None]:
        (deltas,) = followed(Result(finish(logprobs), beams=2), beam_width=2, logprobs=asked)
        return [delta.logprobs for delta in deltas]

    assert of([-0.5], asked=True) == [[-0.5], [-0.5]]
    assert of([-0.5], asked=False) == of([], asked=True) == [None, None]


def test_muted_beams_send_their_ends_and_nothing_else() -> None:
    def finish(result: Result) -> None:
        for output in result.outputs:
            output.token_ids, output.finish_reason = [5], "stop"

    (deltas,) = followed(Result(finish, beams=2), beam_width=2, muted=True)
    assert deltas == [Delta(1, [], None, FinishReason.CANCELLED), Delta(2, [], None, FinishReason.CANCELLED)]


def test_a_beam_that_is_missing_is_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        followed(Result(say(5, end="length"), beams=1), beam_width=2)
