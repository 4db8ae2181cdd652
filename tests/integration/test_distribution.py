"""Sampled tokens are distributed as transformers' are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.client import lmi
from tests.support.prompts import SHORT
from tests.support.server import Server

if TYPE_CHECKING:
    import torch

    from tests.support.reference import Reference

pytestmark = pytest.mark.slow

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
