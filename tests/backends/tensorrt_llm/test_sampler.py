"""What a TensorRT-LLM's sampler honours, and what it wants of requests with beams."""

from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.backends.tensorrt_llm import sampler
from djl_trtllm.backends.tensorrt_llm.sampler import find_sampler

CPP = {"sampler_type": "TRTLLMSampler"}
TORCH = {"sampler_type": "TorchSampler"}
BEAMS = {"max_beam_width": 2}
EVERYTHING = find_sampler("1.2.1", "tensorrt", {}, 1).fields
LACKING = {"min_p", "no_repeat_ngram_size", "bad", "repetition_penalty", "presence_penalty", "frequency_penalty"}


@pytest.fixture
def _takes_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_SEED_MANAGER", "djl_trtllm.backends.tensorrt_llm.sampler")


@pytest.mark.usefixtures("_takes_seeds")
@pytest.mark.parametrize(
    ("version", "backend", "arguments", "whole"),
    [
        ("1.2.1", "tensorrt", {}, True),
        ("1.2.1", "pytorch", {}, False),
        ("1.2.1", "pytorch", TORCH, False),
        ("1.2.1", "pytorch", CPP, True),
        ("1.2.1", "pytorch", {"sampler_type": {"enum": "SamplerType", "name": "TRTLLMSampler"}}, True),
        ("1.2.1", "pytorch", BEAMS, True),
        ("1.2.1", "pytorch", {"max_beam_width": 1}, False),
        ("1.2.1", "pytorch", {"max_beam_width": None}, False),
        ("1.2.1", "pytorch", BEAMS | TORCH, False),
        ("1.3.0rc0", "pytorch", BEAMS, False),
        ("1.3.0", "pytorch", {}, False),
        ("1.4.0rc0", "pytorch", {}, True),
        ("1.4.0", "pytorch", {}, True),
        ("1.4.0", "autodeploy", {}, True),
    ],
)
def test_what_a_sampler_would_ignore_is_not_honoured(
    version: str, backend: str, arguments: dict[str, Any], whole: bool
) -> None:
    assert LACKING < EVERYTHING
    assert find_sampler(version, backend, arguments, 1).fields == (EVERYTHING if whole else EVERYTHING - LACKING)


@pytest.mark.parametrize(
    ("version", "backend", "arguments", "seeded"),
    [
        ("1.2.1", "tensorrt", {}, True),
        ("1.2.1", "pytorch", CPP, True),
        ("1.2.1", "pytorch", BEAMS, True),
        ("1.2.1", "pytorch", {}, False),
        ("1.4.0", "pytorch", {}, False),
        ("1.2.1", "autodeploy", {}, False),
    ],
)
def test_a_seed_is_honoured_where_the_sampler_takes_it(
    version: str, backend: str, arguments: dict[str, Any], seeded: bool
) -> None:
    """The version decides nothing: the installed package has seeds of requests, or not."""
    found = find_sampler(version, backend, arguments, 1)
    assert (found.seeded, "seed" in found.fields) == (seeded, seeded)


@pytest.mark.usefixtures("_takes_seeds")
def test_a_package_with_the_module_of_seeds_takes_them() -> None:
    assert find_sampler("1.2.1", "pytorch", {}, 1).seeded
    assert "seed" in find_sampler("1.2.1", "pytorch", {}, 1).fields


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


@pytest.mark.parametrize(
    ("version", "backend", "arguments", "beams", "logprobs"),
    [
        ("1.2.1", "tensorrt", {}, 0, None),
        ("1.2.1", "pytorch", BEAMS, 2, 1),
        ("1.2.1", "pytorch", BEAMS | TORCH, 2, 1),
        ("1.3.0rc0", "pytorch", BEAMS, 2, 0),
        ("1.3.0", "pytorch", BEAMS | CPP, 2, 1),
        ("1.4.0", "pytorch", BEAMS, 2, 0),
    ],
)
def test_pytorch_wants_one_number_of_beams_and_its_own_request_for_their_log_probabilities(
    version: str, backend: str, arguments: dict[str, Any], beams: int, logprobs: int | None
) -> None:
    found = find_sampler(version, backend, arguments, 2)
    assert (found.beams, found.beam_logprobs) == (beams, logprobs)
    assert find_sampler(version, backend, {}, 1).beams == 0
