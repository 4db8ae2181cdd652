"""Speculation with prompt lookup and with a draft model: the output of the model alone, in fewer iterations."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.backends.openvino.executor import OpenVinoExecutor
from djl_trtllm.executor.protocol import Submit
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, Guide, GuideKind, Sampling
from tests.backends.openvino import executor_options

TEXT = "Tom and Sue went to the park. Tom and Sue saw a dog. The dog ran to Tom and Sue. Once upon a time there was a"
TOKENS = 24
Outputs = dict[int, tuple[list[int], list[Any], int]]


@pytest.fixture(scope="module")
def plain(tiny_stories: Path) -> Iterator[OpenVinoExecutor]:
    executor = OpenVinoExecutor(**executor_options(tiny_stories / "engine", num_kv_blocks=200, max_sequences=16))
    yield executor
    executor.close()


@pytest.fixture(scope="module", params=["prompt lookup", "draft model"])
def speculating(request: pytest.FixtureRequest, tiny_stories: Path) -> Iterator[OpenVinoExecutor]:
    engine = tiny_stories / "engine"
    way: dict[str, Any] = {"lookup_ngram": 2} if request.param == "prompt lookup" else {"draft_dir": str(engine)}
    # With a draft model, 16 prompts do not fit into a step together: each is read as a whole, in a step with room.
    way["max_num_batched_tokens"] = 64 if request.param == "prompt lookup" else 160
    executor = OpenVinoExecutor(**executor_options(engine, num_kv_blocks=200, max_sequences=16, draft_tokens=4, **way))
    yield executor
    executor.close()


def run(executor: OpenVinoExecutor, requests: list[Submit]) -> tuple[Outputs, int]:
    """What came of the requests (tokens, log-probabilities, tokens of drafts), and in how many iterations."""
    found: Outputs = {request.request_id: ([], [], 0) for request in requests}
    iterations = 0
    for request in requests:
        executor.submit(request)
    while executor.busy:
        step = executor.step()
        iterations += 1
        assert not [end.error for end in step.ends if end.error]
        for request_id, ids, logprobs in step.rows():
            found[request_id][0].extend(ids)
            found[request_id][1].extend(logprobs or ())
        for request_id, tokens in step.accepted.items():
            ids, values, accepted = found[request_id]
            found[request_id] = ids, values, accepted + tokens
    return found, iterations


def prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    words, chance = TEXT.split(), random.Random(5)
    return [tokenizer.encode(" ".join(chance.choices(words, k=4 + number % 30))) for number in range(count)]


@pytest.mark.parametrize("streams", [1, 16])
def test_greedy_output_and_its_log_probabilities_are_those_of_the_model_alone(
    plain: OpenVinoExecutor, speculating: OpenVinoExecutor, tokenizer: Tokenizer, streams: int
) -> None:
    asked = [
        Submit(number, ids, Sampling(TOKENS), [2], logprobs=True)
        for number, ids in enumerate(prompts(tokenizer, 16 if streams > 1 else 4))
    ]
    guessed = 0
    for first in range(0, len(asked), streams):
        group = asked[first : first + streams]
        alone, iterations = run(plain, group)
        drafted, fewer = run(speculating, group)
        assert fewer <= iterations or streams > 1
        for request_id, (ids, logprobs, accepted) in drafted.items():
            assert ids == alone[request_id][0] and accepted < len(ids)
            guessed += accepted
            assert len(logprobs) == len(ids)
            for value, expected in zip(logprobs, alone[request_id][1], strict=True):
                assert value is not None and expected is not None and math.isclose(value, expected, abs_tol=0.03)
        if streams == 1:
            ((ids, _, accepted),) = drafted.values()
            # An iteration brings one token that is no draft's; the last one may only bring the end.
            assert accepted in (len(ids) - fewer, len(ids) - fewer + 1)
    assert guessed


def test_a_draft_that_is_the_model_itself_is_always_right(plain: OpenVinoExecutor, tiny_stories: Path) -> None:
    engine = tiny_stories / "engine"
    executor = OpenVinoExecutor(
        **executor_options(engine, num_kv_blocks=100, draft_tokens=4, draft_dir=str(engine), max_num_batched_tokens=160)
    )
    outputs, iterations = run(executor, [Submit(0, [1, 300, 301], Sampling(21))])
    executor.close()
    # The first token comes with the prompt, and then five in each iteration.
    assert (iterations, outputs[0][2]) == (5, 16)
    outputs, _ = run(plain, [Submit(0, [1, 300, 301], Sampling(21))])
    assert outputs[0][2] == 0


@pytest.mark.parametrize(
    "change",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"min_new_tokens": 20},
        {"ignore_eos": True},
        {"max_new_tokens": 1},
    ],
    ids=str,
)
def test_what_a_request_asks_for_is_done_as_without(
    plain: OpenVinoExecutor, speculating: OpenVinoExecutor, tokenizer: Tokenizer, change: dict[str, Any]
) -> None:
    asked = [Submit(0, tokenizer.encode(TEXT), Sampling(**{"max_new_tokens": TOKENS, **change}), [2])]
    assert run(speculating, asked)[0][0][0] == run(plain, asked)[0][0][0]


def test_a_guide_is_followed_and_a_seed_repeats_where_the_engine_says_so(
    speculating: OpenVinoExecutor, tokenizer: Tokenizer
) -> None:
    guide = Guide(GuideKind.REGEX, "(ab|cd){5,20}x")
    outputs, _ = run(speculating, [Submit(0, tokenizer.encode(TEXT), Sampling(60), [2], guide=guide)])
    assert tokenizer.decode(outputs[0][0]).strip().endswith("x")
    sampled = [Submit(0, tokenizer.encode(TEXT), Sampling(TOKENS, do_sample=True, temperature=1.0, seed=7))]
    again = [run(speculating, sampled)[0][0][0] for _ in range(2)]
    assert again[0] == again[1] or not speculating.limits.seeded


def test_a_full_cache_and_cancelled_requests_lose_nobody(
    plain: OpenVinoExecutor, speculating: OpenVinoExecutor, tokenizer: Tokenizer
) -> None:
    """As many as admission lets in, a part of which is cancelled at once or under way."""
    chance, left = random.Random(3), prompts(tokenizer, 120)
    running, found = dict[int, int](), dict[int, list[int]]()
    limits, number, ends = speculating.limits, 0, dict[int, FinishReason]()
    asked = dict(enumerate(left))

    def blocks(ids: list[int]) -> int:
        return math.ceil((len(ids) + TOKENS + limits.draft_tokens) / limits.block_size) + 1

    while running or number < len(left) or speculating.busy:
        while number < len(left) and sum(running.values()) + blocks(left[number]) <= 24:
            speculating.submit(Submit(number, left[number], Sampling(TOKENS, ignore_eos=True)))
            running[number], found[number] = blocks(left[number]), []
            if chance.random() < 0.2:
                speculating.cancel(number)
            number += 1
        step = speculating.step()
        for request_id, ids, _ in step.rows():
            found[request_id] += ids
        for end in step.ends:
            ends[end.request_id] = end.finish
            del running[end.request_id]
        if running and chance.random() < 0.1:
            speculating.cancel(chance.choice(list(running)))
    assert set(ends.values()) == {FinishReason.LENGTH, FinishReason.CANCELLED} and len(ends) == len(left)
    whole = [request_id for request_id, finish in ends.items() if finish is FinishReason.LENGTH][:8]
    alone, _ = run(plain, [Submit(each, asked[each], Sampling(TOKENS, ignore_eos=True)) for each in whole])
    assert {each: found[each] for each in whole} == {each: alone[each][0] for each in whole}
