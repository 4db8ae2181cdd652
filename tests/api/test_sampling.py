from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.api.parameters import Problems, Table
from djl_trtllm.api.sampling import (
    ADAPTER,
    NOT_HONOURED,
    SAMPLING,
    generation_request,
    read_sampling,
    refuse_ranked_stream,
)
from djl_trtllm.request import GenerationRequest, Sampling
from tests.api.tables import check_rows

TABLE = Table(SAMPLING, ADAPTER, NOT_HONOURED)


def read(given: dict[str, Any], *, ranked: bool = False) -> tuple[Sampling, Problems]:
    problems = Problems()
    values = TABLE.read(given, problems, "field")
    return read_sampling(values, problems, ranked=ranked), problems


def test_nothing_asks_for_one_greedy_sequence() -> None:
    assert read({})[0] == Sampling()


@pytest.mark.parametrize(
    ("given", "samples"),
    [({"top_k": 2}, True), ({"top_k": 1}, False), ({"top_p": 0.9}, True), ({"top_p": 1}, False), ({"seed": 1}, False)],
)
def test_what_narrows_the_choice_samples_and_a_seed_alone_does_not(given: dict[str, Any], samples: bool) -> None:
    assert read(given)[0].do_sample is samples


def test_temperature_0_is_greedy_and_no_division() -> None:
    values = {"temperature": 0.0, "do_sample": True}
    assert read_sampling(values, Problems()) == Sampling()
    assert values == {"temperature": 0.0, "do_sample": True}


@pytest.mark.parametrize(
    ("given", "ranked", "best_of"),
    [({"n": 2}, False, None), ({"n": 2}, True, 2), ({"n": 2, "best_of": 3}, False, 3), ({"best_of": 1}, True, None)],
)
def test_sequences_are_ranked_where_the_best_is_wanted(given: dict[str, Any], ranked: bool, best_of: int) -> None:
    assert read(given, ranked=ranked)[0].best_of == best_of


def test_more_sequences_than_one_request_may_have_are_refused_by_name() -> None:
    for name in ("n", "best_of", "num_beams"):
        sampling, problems = read({name: 17})
        assert problems.invalid == [f"'{name}' is 17: expected at most 16"]
        assert sampling.sequences == 1
        assert not read({name: 16})[1].invalid


def test_a_request_has_every_value_that_was_read() -> None:
    given = {"stop": ["a"], "stop_token_ids": [3], "truncate": 5, "bad_words": ["b"], "adapters": "french"}
    values = TABLE.read(given, Problems(), "field") | {"default_new_tokens": 30}
    assert generation_request(values, Sampling(n=2), False, prompt="x") == GenerationRequest(
        prompt="x",
        sampling=Sampling(n=2),
        stop=("a",),
        stop_token_ids=(3,),
        truncate=5,
        bad=("b",),
        adapter="french",
        default_new_tokens=30,
    )


def test_ranking_needs_log_probabilities_and_so_does_a_client_that_asks_for_them() -> None:
    assert generation_request({}, Sampling(best_of=2), True).needs_logprobs
    assert generation_request({"logprobs": True}, Sampling(), True).needs_logprobs
    request = generation_request({"details": True}, Sampling(), True)
    assert (request.logprobs, request.asks_logprobs, request.needs_logprobs) == (True, True, False)


def test_the_rows() -> None:
    check_rows("shared", (*SAMPLING, *ADAPTER, *NOT_HONOURED))


def test_the_name_that_is_wrong_is_the_one_of_the_larger_number() -> None:
    assert read({"n": 2, "best_of": 17})[1].invalid == ["'best_of' is 17: expected at most 16"]
    assert read({"n": 17, "best_of": 17})[1].invalid == ["'n' is 17: expected at most 16"]


def test_the_least_number_of_tokens_is_within_the_default() -> None:
    problems = Problems()
    read_sampling({"min_new_tokens": 31, "default_new_tokens": 30}, problems)
    (problem,) = problems.invalid
    assert problem.endswith("is 31: expected at most 'max_new_tokens', which is 30 by default")
    read_sampling({"min_new_tokens": 30, "default_new_tokens": 30}, problems)
    assert len(problems.invalid) == 1


def test_an_adapter_is_one() -> None:
    assert TABLE.read({"adapters": ["a"]}, Problems(), "field") == {"adapter": "a"}
    problems = Problems()
    TABLE.read({"adapters": ["a", "b"]}, problems, "field")
    assert "a request is one prompt, and has one adapter" in problems.invalid[0]


def test_stop_strings_of_both_names_are_joined() -> None:
    assert TABLE.read({"stop": "a", "stop_sequences": ["b"]}, Problems(), "field") == {"stop": ("a", "b")}


@pytest.mark.parametrize(("given", "refused"), [({"best_of": 3}, True), ({"n": 2}, False), ({}, False)])
def test_a_stream_cannot_choose_the_best_sequences(given: dict[str, Any], refused: bool) -> None:
    sampling, problems = read({"do_sample": True, **given})
    refuse_ranked_stream(sampling, "beams", problems)
    expected = "'best_of' or 'beams' is 3, 'n' 1 and 'stream' true: which sequences are the best"
    assert [message.startswith(expected) for message in problems.invalid] == [True] * refused
