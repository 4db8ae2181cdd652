"""A request as TensorRT-LLM gets it, what its samplers honour, and how its result becomes deltas."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from djl_trtllm.backends.json_grammar import any_object, grammar_of, guide_arguments
from djl_trtllm.backends.tensorrt_llm import sampling as module
from djl_trtllm.backends.tensorrt_llm.running_request import Heartbeat, RunningRequest
from djl_trtllm.backends.tensorrt_llm.sampling import Biases, find_sampler, sampling_arguments
from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.executor.process import StepBuffer
from djl_trtllm.executor.protocol import Logprob, Ranked, Stats, Step, Submit
from djl_trtllm.request import FinishReason, Guide, GuideKind, Sampling
from tests.backends.tensorrt_llm.kit import Responses
from tests.support.steps import Delta, deltas_of
from tests.support.tables import by_rows, by_table, table

PLAIN = {"max_tokens": 9, "detokenize": False}
CHOICE = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": None}
BEAMS = {"use_beam_search": True, "n": 3, "best_of": 3, "length_penalty": 1.0, "early_stopping": 0}
KEPT = {"include_stop_str_in_output": True}


@by_table("fields", "added")
def test_every_parameter_is_an_argument_and_neutral_ones_are_none(
    fields: dict[str, Any], added: dict[str, Any]
) -> None:
    sampling = {name: value for name, value in fields.items() if name in Sampling.__struct_fields__}
    others = {name: value for name, value in fields.items() if name not in sampling}
    assert sampling_arguments(Submit(1, [5], Sampling(9, **sampling), **others)) == PLAIN | added


def test_every_field_of_a_request_is_covered_above() -> None:
    cases = table(__file__, "every_parameter_is_an_argument_and_neutral_ones_are_none")
    tried = {name for fields, _ in cases for name in fields} | {"max_new_tokens"}
    assert tried >= set(Sampling.__struct_fields__) - {"n", "best_of"}
    assert tried >= set(Submit.__struct_fields__) - {
        "request_id",
        "prompt_ids",
        "sampling",
        "guide",
        "adapter",
        "origin",
        "client",
        "logit_bias",
        "cache_salt",
        # Only OpenVINO takes these.
        "images",
        "repeated_ids",
        "pooling",
    }


@pytest.mark.parametrize(
    ("guide", "arguments"),
    [
        (Guide(GuideKind.JSON_OBJECT), {"grammar": any_object()}),
        (Guide(GuideKind.JSON_SCHEMA, '{"type": "null"}'), {"grammar": grammar_of('{"type": "null"}').text}),
        (Guide(GuideKind.REGEX, "a+"), {"regex": "a+"}),
        (Guide(GuideKind.GRAMMAR, "root ::= a"), {"grammar": "root ::= a"}),
        (Guide(GuideKind.STRUCTURAL_TAG, "{}"), {"structural_tag": "{}"}),
    ],
)
def test_a_guide_is_one_argument(guide: Guide, arguments: dict[str, Any]) -> None:
    assert guide_arguments(guide, "xgrammar") == arguments
    is_json = guide.kind in (GuideKind.JSON_OBJECT, GuideKind.JSON_SCHEMA)
    assert guide_arguments(guide, "llguidance").keys() == ({"json"} if is_json else arguments.keys())


# -- what a sampler honours -------------------------------------------------------------------------------------------

CPP = {"sampler_type": "TRTLLMSampler"}
TORCH = {"sampler_type": "TorchSampler"}
BEAMS = {"max_beam_width": 2}
ALWAYS = {
    *("max_new_tokens", "min_new_tokens", "do_sample", "temperature", "top_k", "top_p"),
    *("seed", "ignore_eos", "stop_token_ids", "logit_bias"),
}
PENALTIES = {"repetition_penalty", "presence_penalty", "frequency_penalty"}
LATER = {"min_p", "no_repeat_ngram_size", "bad", "repetition_penalty", "presence_penalty", "frequency_penalty"}


@pytest.fixture
def _takes_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SEED_MANAGER", "djl_trtllm.backends.tensorrt_llm.sampling")


@pytest.mark.usefixtures("_takes_seeds")
@by_table("version", "backend", "arguments", "whole")
def test_a_sampler_honours_what_is_named_for_it_and_nothing_else(
    version: str, backend: str, arguments: dict[str, Any], whole: bool
) -> None:
    assert find_sampler(version, backend, arguments, 1).fields == (ALWAYS | LATER if whole else ALWAYS)


@pytest.mark.usefixtures("_takes_seeds")
def test_pytorchs_first_sampler_takes_no_biases() -> None:
    assert find_sampler("1.0.0", "pytorch", {}, 1).fields == ALWAYS - {"logit_bias"}
    assert find_sampler("1.0.0", "tensorrt", {}, 1).fields == ALWAYS | LATER


@pytest.mark.usefixtures("_takes_seeds")
@pytest.mark.parametrize(
    ("version", "settings", "lost"),
    [
        ("1.4.0", {}, {*PENALTIES, "min_p"}),
        ("1.4.0", {"enable_penalty": True}, {"min_p"}),
        ("1.4.0", {"advanced_sampling_mode": "fused"}, PENALTIES),
        ("1.2.1", {}, set()),
    ],
)
def test_penalties_and_min_p_are_honoured_beside_speculation_where_its_settings_allow_them(
    version: str, settings: dict[str, Any], lost: set[str]
) -> None:
    alone = find_sampler(version, "pytorch", {}, 1).fields
    speculating = {"speculative_config": {"class": "MTPDecodingConfig", **settings}}
    assert alone - find_sampler(version, "pytorch", speculating, 1).fields == lost


def test_equal_biases_are_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(zeros=np.zeros, tensor=np.array, float32=np.float32)
    monkeypatch.setitem(sys.modules, "torch", torch)
    biases = Biases(9)
    first = biases.tensor(((2, -100.0), (8, 1.5)))
    assert first.tolist() == [0, 0, -100, 0, 0, 0, 0, 0, 1.5]
    assert biases.tensor(((2, -100.0), (8, 1.5))) is first
    for token in range(64):
        assert biases.tensor(((token % 9, float(token)),)) is not first
    assert biases.tensor(((2, -100.0), (8, 1.5))) is not first  # it is not kept for ever
    with pytest.raises(InvalidRequestError, match=r"token 9.*end at 8"):
        biases.tensor(((2, 1.0), (9, 1.0)))


@by_table("version", "backend", "arguments", "seeded")
def test_a_seed_is_honoured_where_the_sampler_takes_it(
    version: str, backend: str, arguments: dict[str, Any], seeded: bool
) -> None:
    """The version decides nothing: the installed package has seeds of requests, or not."""
    found = find_sampler(version, backend, arguments, 1)
    assert (found.seeded, "seed" in found.fields) == (seeded, seeded)


@pytest.mark.parametrize(
    ("version", "backend", "arguments", "fields"),
    [
        ("1.2.1", "tensorrt", {}, {"beam_width", "length_penalty", "early_stopping", "beam_search_diversity_rate"}),
        ("1.2.1", "pytorch", CPP, {"beam_width", "length_penalty", "early_stopping", "beam_search_diversity_rate"}),
        ("1.3.0", "pytorch", BEAMS, {"beam_width"}),
        ("1.4.0", "pytorch", {}, {"beam_width", "length_penalty", "early_stopping", "beam_search_diversity_rate"}),
    ],
)
def test_beam_search_is_honoured_where_the_engine_has_beams(
    version: str, backend: str, arguments: dict[str, Any], fields: set[str]
) -> None:
    with_beams = find_sampler(version, backend, arguments, 2).fields
    assert with_beams - find_sampler(version, backend, arguments, 1).fields == fields


@by_table("version", "backend", "arguments", "beams", "logprobs")
def test_pytorch_wants_one_number_of_beams_and_its_own_request_for_their_log_probabilities(
    version: str, backend: str, arguments: dict[str, Any], beams: int, logprobs: int | None
) -> None:
    found = find_sampler(version, backend, arguments, 2)
    assert (found.beams, found.beam_logprobs) == (beams, logprobs)
    assert find_sampler(version, backend, {}, 1).beams == 0


END = 2


@dataclass
class Output:
    """As TensorRT-LLM's CompletionOutput."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    request_perf_metrics: Any = None


class Result:
    """One object that every response changes: `responses` are functions of it, None is a wait for the next wake-up."""

    def __init__(self, *responses: Any, beams: int = 1, cached_tokens: int = 0) -> None:
        self.outputs = [Output() for _ in range(beams)]
        self.cached_tokens = cached_tokens
        self.aqueue = Responses()
        self._rest = list(responses)
        self._left = sum(response is not None and not isinstance(response, Plain) for response in responses)

    @property
    def finished(self) -> bool:
        return not self._left

    async def play(self) -> None:
        while self._rest:
            response = self._rest.pop(0)
            if response is None:
                await asyncio.sleep(0.001)
            else:
                self.aqueue.put(response)
        await asyncio.sleep(0.001)

    def _handle_response(self, respond: Callable[[Result], None]) -> None:
        self._left -= 1
        respond(self)


def say(*tokens: int, end: str | None = None, stop: int | str | None = None, logprobs: Any = ()) -> Any:
    """A step with tokens, the last one with a reason."""

    def step(result: Result) -> None:
        output = result.outputs[0]
        output.token_ids.extend(tokens)
        output.logprobs += logprobs
        output.finish_reason, output.stop_reason = end, stop

    return step


def played(
    act: Callable[[RunningRequest], Awaitable[None]],
    heartbeat: Heartbeat | None = None,
    steps: list[Step] | None = None,
    **fields: Any,
) -> list[list[Delta]]:
    """The messages of a request that something is done with. `fields` are those of Sampling and of Submit."""
    sampling = {name: fields.pop(name) for name in Sampling.__struct_fields__ if name in fields}
    steps = [] if steps is None else steps
    ends: list[Exception | None] = []

    def ended(request: RunningRequest, error: Exception | None) -> None:
        ends.append(error)

    async def main() -> None:
        message = Submit(1, [5, 6], Sampling(99, **sampling), **fields)
        buffer = StepBuffer(steps.append, Stats)
        await act(RunningRequest(message, buffer, heartbeat or Heartbeat(), END, ended))
        await asyncio.sleep(0)

    asyncio.run(main())
    assert len(ends) <= 1, "a request ends once"
    for problem in filter(None, ends):
        raise problem
    return [deltas_of(step) for step in steps]


def followed(result: Result, *, muted: bool = False, **fields: Any) -> list[list[Delta]]:
    """The messages that come of following a result."""

    async def follow(request: RunningRequest) -> None:
        assert not request.muted
        request.muted = muted
        request.follow(result)
        await result.play()

    return played(follow, **fields)


def entry(*pairs: tuple[int, float]) -> dict[int, Any]:
    return {token: SimpleNamespace(logprob=logprob) for token, logprob in pairs}


@pytest.mark.parametrize(
    ("given", "most", "scores"),
    [
        # The last entry is that of the first token of the output.
        ([entry((6, -0.5), (9, -0.1)), entry((7, -0.7))], 0, [None, -0.5]),
        ([entry((6, -0.5), (9, -0.1)), entry((7, -0.7))], 1, [None, Ranked(-0.5, [9], [-0.1])]),
        ([entry((9, -0.1)), entry((7, -0.7))], 1, None),
        ([], 0, None),
    ],
)
def test_a_prompts_log_probabilities_come_with_its_first_token(given: Any, most: int, scores: Any) -> None:
    def first(result: Result) -> None:
        result.outputs[0].prompt_logprobs = given
        result.outputs[0].token_ids.append(7)

    async def follow(request: RunningRequest) -> None:
        result = Result(first, None, say(8, end="length"))
        request.follow(result)
        await result.play()

    if scores is None:  # this TensorRT-LLM does not give them
        with pytest.raises(ValueError, match="log-probabilities"):
            played(follow, prompt_logprobs=most)
        return
    steps: list[Step] = []
    played(follow, steps=steps, prompt_logprobs=most)
    assert [step.prompts for step in steps] == [{1: scores}, {}]
    assert [step.tokens for step in steps] == [[7], [8]]


def last_only(result: Result) -> None:
    """A response that has the log-probabilities of its own tokens only."""
    result.outputs[0].token_ids.append(6)
    result.outputs[0].logprobs, result.outputs[0].finish_reason = [-0.6], "length"


LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP
LIKELIEST = [entry((5, -0.5), (8, -2.0), (9, -1.0)), entry((8, -0.1), (9, -0.2)), -0.25]
RANKED: list[Logprob] = [Ranked(-0.5, [5, 9], [-0.5, -1.0]), Ranked(None, [8, 9], [-0.1, -0.2]), Ranked(-0.25, [], [])]


@by_rows(
    ("steps", "fields", "messages"),
    [
        # Deltas carry what is new, and the last one the end; a backlog of responses is one delta.
        ([say(5), None, say(6, 7), None, say(8, end="length")], {}, [[5], [6, 7], [8]]),
        ([*[say(token) for token in range(4)], say(4, end="length")], {}, [[0, 1, 2, 3, 4]]),
        ([say(), None, say(), None, say(5, end="length", logprobs=[-0.5])], {}, [[5]]),
        # Log-probabilities are those of the chosen tokens, alone or among the likeliest; None where it is not there.
        (
            [say(5, logprobs=[entry((9, -0.1), (5, -0.5))]), None, say(6, end="length", logprobs=[entry((7, -0.7))])],
            {"logprobs": True},
            [([5], [-0.5]), ([6], [None])],
        ),
        ([say(5, logprobs=[-0.5]), None, last_only], {"logprobs": True}, [([5], [-0.5]), ([6], [-0.6])]),
        ([say(5, logprobs=[-0.5]), last_only], {"logprobs": True}, [([5, 6], [-0.5, -0.6])]),
        (
            [say(5, 6, 7, logprobs=LIKELIEST, end="length")],
            {"logprobs": True, "top_logprobs": 2},
            [([5, 6, 7], RANKED)],
        ),
    ],
)
def test_tokens_come_in_deltas_with_what_was_asked_for(steps: Any, fields: dict[str, Any], messages: list[Any]) -> None:
    found = [delta for deltas in followed(Result(*steps), **fields) for delta in deltas]
    wanted: list[Any] = [message if isinstance(message, tuple) else (message, None) for message in messages]
    assert found[:-1] == [Delta(1, *message) for message in wanted[:-1]]
    tokens, logprobs = wanted[-1]
    assert found[-1:] == [Delta(1, tokens, logprobs, LENGTH)]


def test_cached_tokens_come_with_the_first_delta_only() -> None:
    (first, second) = followed(Result(say(5), None, say(6, end="length"), cached_tokens=64))
    assert (first[0].cached_tokens, second[0].cached_tokens) == (64, 0)


@by_rows(
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
    assert deltas == [Delta(1, tokens, None, STOP)]


def test_an_end_that_was_left_out_has_a_log_probability() -> None:
    (deltas,) = followed(Result(say(5, end="stop", logprobs=[-1.0])), logprobs=True)
    assert deltas == [Delta(1, [5, END], [-1.0, None], STOP)]


@pytest.mark.parametrize(("reason", "finish"), [("length", LENGTH), ("cancelled", FinishReason.CANCELLED)])
def test_every_finish_reason_is_an_end(reason: str, finish: FinishReason) -> None:
    assert followed(Result(say(5, end=reason))) == [[Delta(1, [5], None, finish)]]
    error = "TensorRT-LLM ended the request with 'timeout'"
    assert followed(Result(say(5, end="timeout"))) == [[Delta(1, [5], None, FinishReason.ERROR, error)]]


def test_too_few_log_probabilities_are_an_error_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="gave 1 log-probabilities for 2 tokens"):
        followed(Result(say(5, 6, logprobs=[-0.5]), None, say(7, end="length")), logprobs=True)


@pytest.mark.parametrize("reason", ["cancelled", "length", "stop"])
def test_a_muted_request_sends_its_ends_and_nothing_else(reason: str) -> None:
    result = Result(say(5), None, say(6), None, say(7, end=reason))
    assert followed(result, muted=True) == [[Delta(1, [], None, FinishReason.CANCELLED)]]
    (ends,) = followed(Result(grow([5], [6], end=reason), beams=2), beam_width=2, muted=True)
    assert ends == [Delta(number, [], None, FinishReason.CANCELLED) for number in (1, 2)]


class Plain:
    """A response of the engine that has tokens and nothing else: PyTorch's are serialised."""

    def __init__(self, *tokens: int, serialised: bool = False, last: bool = False) -> None:
        self.result = SimpleNamespace(is_final=last, output_token_ids=[list(tokens)])
        if serialised:
            self.result = SimpleNamespace(is_final=False, _result=b"", deserialize=self._deserialize, tokens=tokens)

    def has_error(self) -> bool:
        return False

    def _deserialize(self) -> None:
        self.result.output_token_ids = [list(self.result.tokens)]


def test_the_tokens_of_plain_responses_are_read_without_the_result_and_the_last_response_by_it() -> None:
    class Reading(Result):
        read = 0

        def _handle_response(self, respond: Callable[[Result], None]) -> None:
            self.read += 1
            super()._handle_response(respond)

    plain = [Plain(6), None, Plain(7, 8, serialised=True), Plain(9, serialised=True), None]
    result = Reading(say(5, logprobs=[-0.5]), None, *plain, say(10, END, end="stop"))
    assert followed(result) == [
        [Delta(1, [5])],
        [Delta(1, [6])],
        [Delta(1, [7, 8, 9])],
        [Delta(1, [10, END], None, STOP)],
    ]
    assert result.read == 2


@pytest.mark.parametrize("beams", [1, 2])
def test_the_last_response_of_a_cancelled_request_with_log_probabilities_is_not_read(beams: int) -> None:
    """Before a first token PyTorch's has no `cum_log_probs`, which the result would log with a trace."""
    (deltas,) = followed(Result(Plain(last=True), beams=beams), muted=True, logprobs=True, beam_width=beams)
    assert deltas == [Delta(1 + beam, [], None, FinishReason.CANCELLED) for beam in range(beams)]


def grow(*beams: list[int], end: str | None = None, logprobs: Any = ()) -> Any:
    """A step that gives each beam its tokens."""

    def step(result: Result) -> None:
        for output, tokens in zip(result.outputs, beams, strict=True):
            output.token_ids, output.finish_reason, output.logprobs = tokens, end, list(logprobs)

    return step


def test_beams_are_sequences_of_their_own_delivered_at_the_end() -> None:
    result = Result(grow([5], [6]), None, grow([5, 7], [6, 8, 9], end="length"), beams=2)
    assert followed(result, beam_width=2) == [[Delta(1, [5, 7], None, LENGTH), Delta(2, [6, 8, 9], None, LENGTH)]]


@pytest.mark.parametrize(("given", "asked", "sent"), [([-0.5], True, [-0.5]), ([-0.5], False, None), ([], True, None)])
def test_beams_have_log_probabilities_where_they_are_asked_for_and_given(given: Any, asked: bool, sent: Any) -> None:
    result = Result(grow([5], [5], end="length", logprobs=given), beams=2)
    (deltas,) = followed(result, beam_width=2, logprobs=asked)
    assert [delta.logprobs for delta in deltas] == [sent, sent]


def test_log_probabilities_of_a_later_beam_that_do_not_fit_are_an_error_before_any_end() -> None:
    def last(result: Result) -> None:
        grow([5, 7], [6, 8], end="length", logprobs=[-0.5, -0.6])(result)
        del result.outputs[1].logprobs[0]

    found: list[Step] = []

    async def follow(request: RunningRequest) -> None:
        request.follow(result)
        await result.play()

    result = Result(last, beams=2)
    with pytest.raises(ValueError, match="gave 1 log-probabilities for 2 tokens"):
        played(follow, steps=found, beam_width=2, logprobs=True)
    assert [end for step in found for end in step.ends] == []


@pytest.mark.parametrize("beams", [1, 2])
def test_every_response_is_a_sign_of_life(beams: int) -> None:
    heartbeat = Heartbeat()
    seen: list[tuple[int, bool]] = []

    async def follow(request: RunningRequest) -> None:
        seen.append((heartbeat.beats, request.responded))
        request.follow(result)
        await result.play()
        seen.append((heartbeat.beats, request.responded))

    result = Result(say(5), None, say(), grow(*[[5]] * beams, end="length"), beams=beams)
    played(follow, heartbeat, beam_width=beams)
    assert seen == [(0, False), (3, True)]


@pytest.mark.parametrize("beams", [1, 3])
def test_a_request_may_be_ended_from_outside(beams: int) -> None:
    async def end(request: RunningRequest) -> None:
        assert request.aborted_for is None
        request.end(FinishReason.ERROR, "no room")

    (deltas,) = played(end, beam_width=beams)
    assert deltas == [Delta(1 + number, [], None, FinishReason.ERROR, "no room") for number in range(beams)]


@pytest.mark.parametrize(("muted", "accepted"), [(False, [{}, {}, {1: 2}]), (True, [{1: 0}])])
def test_tokens_beyond_the_iterations_of_a_request_are_those_of_drafts(
    muted: bool, accepted: list[dict[int, int]]
) -> None:
    steps: list[Step] = []

    async def follow(request: RunningRequest) -> None:
        request.speculates, request.muted = True, muted
        result: Any = Result(say(7), None, say(8, 9, 10), None, say(11, end="length"))
        result.decoding_iter = 3
        request.follow(result)
        await result.play()

    played(follow, steps=steps)
    assert [step.accepted for step in steps] == accepted


@pytest.mark.parametrize(
    ("speculates", "counted", "drafted"),
    [
        (True, 12, 12),
        (True, 0, None),  # as PyTorch's sampler says of all requests until July 2026
        (True, None, None),
        (False, 12, None),
    ],
)
def test_what_drafts_proposed_is_said_at_the_end_of_a_request_where_it_is_counted(
    speculates: bool, counted: int | None, drafted: int | None
) -> None:
    steps: list[Step] = []

    async def follow(request: RunningRequest) -> None:
        request.speculates = speculates
        result: Any = Result(say(7), say(8, 9, end="length"))
        result.decoding_iter = 2
        if counted is not None:
            figures = SimpleNamespace(total_draft_tokens=counted)
            result.outputs[0].request_perf_metrics = SimpleNamespace(speculative_decoding=figures)
        request.follow(result)
        await result.play()

    played(follow, steps=steps)
    assert [end.drafted for step in steps for end in step.ends] == [drafted]
