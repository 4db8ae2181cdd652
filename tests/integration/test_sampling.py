"""Every sampling parameter changes the result as it should, and sampled tokens are distributed as transformers' are."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.integration.test_load import kill_under, requests
from tests.support import reference as golden
from tests.support.client import lmi
from tests.support.processes import wait_until
from tests.support.reference import DOCUMENT, SHORT, check_that_a_client_may_leave, said
from tests.support.server import Server, serving
from tests.support.tables import by_table, table

pytestmark = pytest.mark.slow

END = 2


def text(server: Server, **parameters: Any) -> str:
    result: str = server.answer(DOCUMENT, **{"max_new_tokens": 40, **parameters})["generated_text"]
    return result


def sampled(server: Server, **parameters: Any) -> str:
    return text(server, **{"do_sample": True, "seed": 5, **parameters})


@pytest.fixture(scope="module")
def ending(server: Server) -> str:
    """A prompt after which the model soon ends its story."""
    story = server.answer(DOCUMENT, max_new_tokens=500, return_full_text=True)
    assert story["details"]["finish_reason"] == "eos_token", "the model tells the document's story to its end"
    return str(story["generated_text"])[:-40]


# -- one by one --------------------------------------------------------------------------------------------------------


def test_sampling_that_leaves_no_choice_is_greedy(server: Server) -> None:
    greedy = text(server)
    assert text(server, do_sample=False, seed=5) == greedy
    hot = {"temperature": 1.5}
    for parameters in ({"temperature": 0.001}, {**hot, "top_k": 1}, {**hot, "top_p": 0.001}):
        assert sampled(server, **parameters) == greedy
    assert sampled(server) != greedy != sampled(server, **hot)


def test_seed_decides_the_result(server: Server) -> None:
    assert sampled(server, seed=1) == sampled(server, seed=1)
    assert len({sampled(server, seed=seed) for seed in range(4)}) == 4


def test_unseeded_requests_differ(server: Server) -> None:
    # Hot enough that two equal answers are out of the question.
    request = {"do_sample": True, "temperature": 3.0}
    assert len({text(server, **request) for _ in range(4)}) == 4


@pytest.mark.parametrize("name", ["min_length", "min_new_tokens"])
def test_min_length_holds_the_end_token_back(server: Server, ending: str, name: str) -> None:
    alone = server.answer(ending, max_new_tokens=60)["details"]
    assert alone["finish_reason"] == "eos_token"
    least = alone["generated_tokens"] + 10
    held = server.token_ids(ending, max_new_tokens=60, **{name: least})
    assert len(held) >= least
    before_the_end = [token["id"] for token in alone["tokens"][:-1]]
    assert held[: len(before_the_end)] == before_the_end
    assert END not in held[:least]


def test_ignore_eos_generates_on(server: Server, ending: str) -> None:
    alone = server.answer(ending, max_new_tokens=60)["details"]
    assert alone["tokens"][-1]["id"] == END
    assert alone["tokens"][-1]["special_token"] is True
    details = server.answer(ending, max_new_tokens=60, ignore_eos=True)["details"]
    assert (details["finish_reason"], details["generated_tokens"]) == ("length", 60)
    tokens = [token["id"] for token in details["tokens"]]
    assert tokens[: alone["generated_tokens"]] == [token["id"] for token in alone["tokens"]]


# -- penalties ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", golden.PENALTIES)
def test_a_penalty_is_transformers(server: Server, golden_tokens: golden.Tokens, name: str) -> None:
    for prompt, expected in zip(golden.PENALISED, golden_tokens[name], strict=True):
        penalised = server.token_ids(prompt, max_new_tokens=len(expected), **{name: golden.PENALTIES[name]})
        assert penalised == expected
    assert any(
        server.token_ids(prompt, max_new_tokens=len(expected)) != expected
        for prompt, expected in zip(golden.PENALISED, golden_tokens[name], strict=True)
    )


# -- seeds in company --------------------------------------------------------------------------------------------------


def test_a_seeded_request_is_the_same_alone_and_among_32(server: Server) -> None:
    def request(seed: int) -> dict[str, Any]:
        prompt = SHORT[seed % len(SHORT)]
        return lmi(prompt, stream=True, max_new_tokens=48, do_sample=True, temperature=1.2, top_p=0.95, seed=seed)

    alone = [server.together([request(seed)])[0].token_ids for seed in range(8)]
    among = [answer.token_ids for answer in server.together([request(seed) for seed in range(32)])]
    assert among[:8] == alone
    assert len(set(map(tuple, among))) == 32


# -- guided decoding over HTTP with the bundled model: OpenAI's client and LMI's parameters, beside plain requests -----

SCHEMA: dict[str, Any] = table(__file__, "SCHEMA")
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me a story"}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def generate(server: Server, **parameters: Any) -> httpx.Response:
    body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 100, **parameters}}
    return server.http.post("/invocations", json=body)


def fits(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["animal", "age", "name"]
        and value["animal"] in ("wolf", "cat")
        and 0 <= value["age"] <= 99
        and len(value["name"]) <= 20
    )


def test_response_format_gives_json_of_the_schema_whole_and_streamed(client: openai.OpenAI) -> None:
    for seed in range(4):
        arguments: dict[str, Any] = {
            "model": "",
            "messages": MESSAGES,
            "max_tokens": 400,
            "seed": seed,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "animal", "strict": True, "schema": SCHEMA},
            },
        }
        whole = client.chat.completions.create(**arguments).choices[0]
        assert whole.finish_reason == "stop"
        assert fits(whole.message.content)
        chunks = client.chat.completions.create(**arguments, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content


@by_table("parameters", "expected", apart=True)
def test_the_guides_of_lmi_work(server: Server, parameters: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert generate(server, **parameters).json()["generated_text"] in expected


def test_plain_requests_beside_guides_are_the_same_and_no_engine_ends(server: Server) -> None:
    plain = generate(server).json()
    guides = ["(", "[z-a]", "(a|b){3}", "(?<=a)b", "x{1,400}", "a\0b", "beside (this|that)"]
    with ThreadPoolExecutor(8) as pool:
        guided = [pool.submit(generate, server, guided_regex=text) for text in guides * 3]
        beside = [pool.submit(generate, server) for _ in range(12)]
        assert all(answer.result().json() == plain for answer in beside)
        assert {answer.result().status_code for answer in guided} == {200, 424}
    assert server.metric("executor_restarts_total") == 0


# -- Sampled tokens are distributed as transformers' are ---------------------------------------------------------------

if TYPE_CHECKING:
    import openai
    import torch

    from tests.support.reference import Reference

DRAWS = 480
CLASS_DRAWS = 25
"""Expected draws of a class of unlikely tokens."""


@pytest.fixture(scope="module")
def open_prompt(reference: Reference) -> str:
    """The prompt that leaves most to chance."""
    import torch

    def entropy(prompt: str) -> float:
        return float(torch.distributions.Categorical(logits=reference.logits(reference.ids(prompt))[0]).entropy())

    return max((*SHORT, *(f"{prompt} and the" for prompt in SHORT)), key=entropy)


def probabilities(reference: Reference, prompt: str, **parameters: Any) -> torch.Tensor:
    """Transformers' distribution of the first token; its warpers in its order: temperature, top_k, top_p."""
    import torch
    from transformers import (
        LogitsProcessorList,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

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


@functools.cache
def first_tokens(server: Server, prompt: str, **parameters: Any) -> list[int]:
    """The first token with each of the seeds 0 to DRAWS - 1."""
    requests = [
        lmi(prompt, max_new_tokens=1, details=True, do_sample=True, seed=seed, **parameters) for seed in range(DRAWS)
    ]
    return [answer.token_ids[0] for answer in server.together(requests)]


def p_value(drawn: list[int], expected: torch.Tensor) -> float:
    """Chi-square of what was drawn, over classes of tokens: likely ones alone, others together with their like."""
    import torch

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
    statistic = sum((seen - mean * scale) ** 2 / (mean * scale) for seen, mean in zip(observed, means, strict=True))
    half_of = [torch.tensor(value / 2, dtype=torch.float64) for value in (len(means) - 1, statistic)]
    return float(torch.special.gammaincc(*half_of))


@pytest.mark.parametrize(
    "parameters",
    [
        {},
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


# -- servers that speculate answer as one that does not, and say how many tokens drafts proposed ----------------------


WAYS = {
    "prompt lookup": {"OPTION_SPECULATIVE_CONFIG": '{"method": "ngram", "num_speculative_tokens": 3}'},
    "draft model": {"OPTION_SPECULATIVE_DRAFT_MODEL": "engine", "OPTION_SPECULATIVE_LENGTH": "3"},
}


@pytest.fixture(scope="module", params=["prompt lookup", "draft model"])
def speculating(request: pytest.FixtureRequest, model: Path, scratch: Path) -> Iterator[Server]:
    # The checkpoint is as large as its engine.
    with serving(model, scratch, OPTION_MAX_ROLLING_BATCH_SIZE="16", **WAYS[request.param]) as started:
        yield started


def test_answers_are_those_without_speculation_alone_and_together(server: Server, speculating: Server) -> None:
    asked = [
        lmi(text, max_new_tokens=40, details=True, stop_sequences=stop)
        for text in SHORT[:8]
        for stop in ([" the", "zzz"], ["er "])
    ]
    expected = [said(answer) for answer in server.together(asked)]
    assert {details["finish_reason"] for *_, details in expected} >= {"stop_sequence"}
    assert [said(answer) for answer in speculating.together(asked)] == expected
    assert [said(answer) for answer in speculating.together(asked[:4], at_once=1)] == expected[:4]


def test_what_drafts_proposed_is_in_the_usage_the_log_and_the_metrics(speculating: Server) -> None:
    before = speculating.metric("accepted_draft_tokens_total")
    text = "Tom and Sue saw a dog. Tom and Sue saw a cat. Tom and Sue saw a"
    body = {"prompt": text, "max_tokens": 30, "temperature": 0, "n": 2, "stop": ["zzz"]}
    answer = speculating.http.post("/v1/completions", json=body).json()
    accepted = answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert len({choice["text"] for choice in answer["choices"]}) == 1
    assert 0 < accepted < answer["usage"]["completion_tokens"]
    assert speculating.metric("accepted_draft_tokens_total") == before + accepted
    page = speculating.http.get("/metrics").text
    for name in ("trtllm_spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"):
        assert re.search(rf"^{name}{{.*}} {before + accepted:.1f}$", page, re.MULTILINE)
    # OpenVINO does not say what was proposed.
    assert "num_draft_tokens" not in page
    wait_until(lambda: speculating.says(f"accepted_tokens={accepted} "))


def test_a_client_that_leaves_ends_its_sequence_and_no_other(server: Server, speculating: Server) -> None:
    check_that_a_client_may_leave(speculating, server)


def test_streams_go_on_in_another_engine_process_with_the_same_tokens(speculating: Server) -> None:
    asked = requests("openvino", 8)
    quiet = speculating.together(asked)
    answers = asyncio.run(kill_under(speculating, asked, 1))
    for before, after in zip(quiet, answers, strict=True):
        assert (after.status, after.complete, after.token_ids) == (200, True, before.token_ids)
