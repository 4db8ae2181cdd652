"""Every sampling parameter changes the result as it should, and sampled tokens are distributed as transformers' are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.support.harness import Answer, Server, body
from tests.support.prompts import DOCUMENT, SHORT, story
from tests.support.reference import Reference

DRAWS = 480
CLASS_DRAWS = 25
"""Expected draws of a class of unlikely tokens."""


def text(server: Server, **parameters: Any) -> str:
    result: str = server.generate(DOCUMENT, **{"max_new_tokens": 40, **parameters})["generated_text"]
    return result


def sampled(server: Server, **parameters: Any) -> str:
    return text(server, **{"do_sample": True, "seed": 5, **parameters})


@pytest.fixture(scope="module")
def ending(server: Server) -> str:
    """A prompt after which the model soon ends its story."""
    story = server.generate(DOCUMENT, max_new_tokens=500, return_full_text=True)
    assert story["details"]["finish_reason"] == "eos_token", "the model tells the document's story to its end"
    return str(story["generated_text"])[:-40]


# -- one by one --------------------------------------------------------------------------------------------------------


def test_do_sample_leaves_the_greedy_path(server: Server) -> None:
    assert text(server, do_sample=False, seed=5) == text(server)
    assert sampled(server) != text(server)


def test_temperature_changes_a_seeded_result(server: Server) -> None:
    assert len({sampled(server, temperature=temperature) for temperature in (0.5, 1.0, 2.0)}) == 3


def test_a_temperature_near_zero_is_greedy(server: Server) -> None:
    assert sampled(server, temperature=0.001) == text(server)


def test_top_k_one_is_greedy(server: Server) -> None:
    assert sampled(server, temperature=1.5, top_k=1) == text(server)
    assert sampled(server, temperature=1.5) != text(server)


def test_a_small_top_p_is_greedy(server: Server) -> None:
    assert sampled(server, temperature=1.5, top_p=0.001) == text(server)


def test_seed_decides_the_result(server: Server) -> None:
    assert sampled(server, seed=1) == sampled(server, seed=1)
    assert len({sampled(server, seed=seed) for seed in range(4)}) == 4


def test_unseeded_requests_differ(server: Server) -> None:
    # Hot enough that two equal answers are out of the question.
    request = {"do_sample": True, "temperature": 3.0}
    assert len({text(server, **request) for _ in range(4)}) == 4


def test_max_new_tokens_is_the_length(server: Server, reference: Reference) -> None:
    longer = server.token_ids(DOCUMENT, max_new_tokens=40)
    for count in (1, 7, 39):
        details = server.generate(DOCUMENT, max_new_tokens=count)["details"]
        assert [token["id"] for token in details["tokens"]] == longer[:count]
        assert (details["finish_reason"], details["generated_tokens"]) == ("length", count)


def test_max_new_tokens_is_30_when_not_given(server: Server) -> None:
    assert server.generate(DOCUMENT)["details"]["generated_tokens"] == 30


@pytest.mark.parametrize("name", ["min_length", "min_new_tokens"])
def test_min_length_holds_the_end_token_back(server: Server, reference: Reference, ending: str, name: str) -> None:
    alone = server.generate(ending, max_new_tokens=60)["details"]
    assert alone["finish_reason"] == "eos_token"
    least = alone["generated_tokens"] + 10
    held = server.token_ids(ending, max_new_tokens=60, **{name: least})
    assert len(held) >= least
    assert held == reference.greedy(reference.ids(ending), 60, min_new_tokens=least)


def test_ignore_eos_generates_on(server: Server, ending: str) -> None:
    alone = server.generate(ending, max_new_tokens=60)["details"]
    assert alone["tokens"][-1]["id"] == 2
    assert alone["tokens"][-1]["special_token"] is True
    details = server.generate(ending, max_new_tokens=60, ignore_eos=True)["details"]
    assert (details["finish_reason"], details["generated_tokens"]) == ("length", 60)
    tokens = [token["id"] for token in details["tokens"]]
    assert tokens[: alone["generated_tokens"]] == [token["id"] for token in alone["tokens"]]


@pytest.mark.parametrize("name", ["stop_sequences", "stop"])
def test_stop_sequences_end_before_the_stop(server: Server, name: str) -> None:
    whole = text(server)
    stop = whole[len(whole) // 2 : len(whole) // 2 + 5]
    for given in ([stop], [stop, "no such text"]):
        answer = server.generate(DOCUMENT, max_new_tokens=40, **{name: given})
        assert answer["generated_text"] == whole[: whole.index(stop)]
        assert answer["details"]["finish_reason"] == "stop_sequence"


def test_a_stream_never_shows_the_beginning_of_a_stop(server: Server) -> None:
    whole = text(server)
    stop = whole[len(whole) // 2 : len(whole) // 2 + 9]
    answer = server.post(DOCUMENT, stream=True, max_new_tokens=40, stop_sequences=[stop])
    lines = [line["token"]["text"] for line in Answer(body=answer.content).lines]
    assert "".join(lines) == whole[: whole.index(stop)]


def test_n_answers_with_the_sequences_of_the_following_seeds(server: Server) -> None:
    request = {"do_sample": True, "max_new_tokens": 20, "temperature": 1.3}
    answer = server.generate(DOCUMENT, n=3, seed=7, **request)
    several = [answer["generated_text"], *(s["generated_text"] for s in answer["details"]["best_of_sequences"])]
    singles = [server.generate(DOCUMENT, seed=seed, **request)["generated_text"] for seed in (7, 8, 9)]
    assert sorted(several) == sorted(singles)
    assert len(set(several)) == 3


def test_best_of_answers_with_the_likeliest(server: Server) -> None:
    request = {"do_sample": True, "max_new_tokens": 20, "temperature": 1.3}
    best = server.generate(DOCUMENT, best_of=4, seed=7, **request)
    singles = [server.generate(DOCUMENT, seed=seed, **request) for seed in range(7, 11)]
    likeliest = max(singles, key=lambda answer: sum(token["log_prob"] for token in answer["details"]["tokens"]))
    assert best["generated_text"] == likeliest["generated_text"]
    assert best["generated_text"] != singles[0]["generated_text"] or likeliest is singles[0]


def test_bad_sequences_are_refused_by_name(server: Server) -> None:
    answer = server.post(DOCUMENT, bad_sequences=["wolf"])
    assert answer.status_code == 424
    assert "bad_sequences" in answer.json()["error"]
    assert "not supported" in answer.json()["error"]
    assert server.post(DOCUMENT, bad_sequences=[], max_new_tokens=1).status_code == 200


# -- penalties ---------------------------------------------------------------------------------------------------------


def greedy_with(
    reference: Reference, prompt: str, count: int, penalise: Callable[[torch.Tensor, list[int], list[int]], None]
) -> list[int]:
    """Greedy output where `penalise(logits, prompt_ids, output_ids)` changes the logits before each choice."""
    prompt_ids, output = reference.ids(prompt), list[int]()
    while len(output) < count and output[-1:] != [2]:
        logits = reference.logits(prompt_ids + output)[0].clone()
        penalise(logits, prompt_ids, output)
        output.append(int(logits.argmax()))
    return output


def test_repetition_penalty_is_transformers_prompt_included(server: Server, reference: Reference) -> None:
    changed = 0
    for prompt in (*SHORT[:4], story(6)):
        ids = reference.ids(prompt)
        expected = reference.greedy(ids, 40, repetition_penalty=1.4)
        given = server.token_ids(prompt, max_new_tokens=40, repetition_penalty=1.4)
        assert given == expected
        changed += given != server.token_ids(prompt, max_new_tokens=40)
    assert changed


def test_the_prompts_tokens_count_for_the_repetition_penalty(server: Server, reference: Reference) -> None:
    prompt = story(6)
    plain = server.token_ids(prompt, max_new_tokens=1)
    assert plain[0] in reference.ids(prompt)
    assert server.token_ids(prompt, max_new_tokens=1, repetition_penalty=5.0) != plain


def test_presence_penalty_counts_generated_tokens_once(server: Server, reference: Reference) -> None:
    def penalise(logits: torch.Tensor, _: list[int], output: list[int]) -> None:
        for token in set(output):
            logits[token] -= 1.5

    given = server.token_ids(DOCUMENT, max_new_tokens=60, presence_penalty=1.5)
    assert given == greedy_with(reference, DOCUMENT, 60, penalise)
    assert given != server.token_ids(DOCUMENT, max_new_tokens=60)


def test_frequency_penalty_counts_generated_tokens_each_time(server: Server, reference: Reference) -> None:
    def penalise(logits: torch.Tensor, _: list[int], output: list[int]) -> None:
        for token, count in Counter(output).items():
            logits[token] -= 0.7 * count

    given = server.token_ids(DOCUMENT, max_new_tokens=60, frequency_penalty=0.7)
    assert given == greedy_with(reference, DOCUMENT, 60, penalise)
    assert given != server.token_ids(DOCUMENT, max_new_tokens=60)


# -- distribution ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def open_prompt(reference: Reference) -> str:
    """The prompt that leaves most to chance."""

    def entropy(prompt: str) -> float:
        return float(torch.distributions.Categorical(logits=reference.logits(reference.ids(prompt))[0]).entropy())

    return max((*SHORT, *(f"{prompt} and the" for prompt in SHORT)), key=entropy)


def probabilities(reference: Reference, prompt: str, **parameters: Any) -> torch.Tensor:
    """Transformers' distribution of the first token; its warpers in its order: temperature, top_k, top_p."""
    chain = LogitsProcessorList()
    if "repetition_penalty" in parameters:
        chain.append(RepetitionPenaltyLogitsProcessor(parameters["repetition_penalty"]))
    if "temperature" in parameters:
        chain.append(TemperatureLogitsWarper(parameters["temperature"]))
    if "top_k" in parameters:
        chain.append(TopKLogitsWarper(parameters["top_k"]))
    if "top_p" in parameters:
        chain.append(TopPLogitsWarper(parameters["top_p"]))
    ids = reference.ids(prompt)
    return torch.softmax(chain(torch.tensor([ids]), reference.logits(ids))[0], -1)


def first_tokens(server: Server, prompt: str, **parameters: Any) -> list[int]:
    """The first token with each of the seeds 0 to DRAWS - 1."""
    requests = [
        body(prompt, max_new_tokens=1, details=True, do_sample=True, seed=seed, **parameters) for seed in range(DRAWS)
    ]
    return [answer.token_ids[0] for answer in server.together(requests)]


def p_value(drawn: list[int], expected: torch.Tensor) -> float:
    """Chi-square of what was drawn, over classes of tokens: likely ones alone, others together with their like."""
    probability, order = expected.sort(descending=True)
    class_of = (probability.cumsum(0) * len(drawn) / CLASS_DRAWS).floor()
    counts = torch.bincount(torch.tensor(drawn), minlength=len(expected))[order]
    means, observed = [], []
    for number in class_of.unique():
        means.append(float(probability[class_of == number].sum()) * len(drawn))
        observed.append(int(counts[class_of == number].sum()))
    while means[-1] < 5:
        last_mean, last_observed = means.pop(), observed.pop()
        means[-1] += last_mean
        observed[-1] += last_observed
    assert len(means) >= 3, "the prompt leaves enough to choose from"
    scale = len(drawn) / sum(means)
    return float(chisquare(observed, [mean * scale for mean in means]).pvalue)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.8},
        {"top_k": 5},
        {"top_p": 0.8},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.3, "repetition_penalty": 1.5},
    ],
    ids=lambda parameters: "-".join(f"{name}={value}" for name, value in parameters.items()) or "plain",
)
def test_the_first_token_is_distributed_as_in_transformers(
    server: Server, reference: Reference, open_prompt: str, parameters: dict[str, Any]
) -> None:
    expected = probabilities(reference, open_prompt, **parameters)
    drawn = first_tokens(server, open_prompt, **parameters)
    outside = {token for token in drawn if expected[token] == 0}
    assert not outside
    assert p_value(drawn, expected) > 1e-4


def test_the_distribution_test_sees_a_wrong_temperature(server: Server, reference: Reference, open_prompt: str) -> None:
    drawn = first_tokens(server, open_prompt)
    assert p_value(drawn, probabilities(reference, open_prompt, temperature=0.7)) < 1e-4


# -- seeds in company --------------------------------------------------------------------------------------------------


def test_a_seeded_request_is_the_same_alone_and_among_32(server: Server) -> None:
    def request(seed: int) -> dict[str, Any]:
        prompt = SHORT[seed % len(SHORT)]
        return body(prompt, stream=True, max_new_tokens=48, do_sample=True, temperature=1.2, top_p=0.95, seed=seed)

    alone = [server.together([request(seed)])[0].token_ids for seed in range(8)]
    among = [answer.token_ids for answer in server.together([request(seed) for seed in range(32)])]
    assert among[:8] == alone
    assert len(set(map(tuple, among))) == 32
