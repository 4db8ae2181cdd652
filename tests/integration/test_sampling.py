"""Every sampling parameter changes the result as it should."""

from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.model import Tokenizer
from tests.support import golden
from tests.support.client import Answer, lmi
from tests.support.prompts import DOCUMENT, SHORT, story
from tests.support.server import Server

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


def test_max_new_tokens_is_the_length(server: Server) -> None:
    longer = server.token_ids(DOCUMENT, max_new_tokens=40)
    for count in (1, 7, 39):
        details = server.answer(DOCUMENT, max_new_tokens=count)["details"]
        assert [token["id"] for token in details["tokens"]] == longer[:count]
        assert (details["finish_reason"], details["generated_tokens"]) == ("length", count)


def test_max_new_tokens_is_30_when_not_given(server: Server) -> None:
    assert server.answer(DOCUMENT)["details"]["generated_tokens"] == 30


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


@pytest.mark.parametrize("name", ["stop_sequences", "stop"])
def test_stop_sequences_end_before_the_stop(server: Server, name: str) -> None:
    whole = text(server)
    stop = whole[len(whole) // 2 : len(whole) // 2 + 5]
    for given in ([stop], [stop, "no such text"]):
        answer = server.answer(DOCUMENT, max_new_tokens=40, **{name: given})
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
    answer = server.answer(DOCUMENT, n=3, seed=7, **request)
    several = [answer["generated_text"], *(s["generated_text"] for s in answer["details"]["best_of_sequences"])]
    singles = [server.answer(DOCUMENT, seed=seed, **request)["generated_text"] for seed in (7, 8, 9)]
    assert sorted(several) == sorted(singles)
    assert len(set(several)) == 3


def test_best_of_answers_with_the_likeliest(server: Server) -> None:
    request = {"do_sample": True, "max_new_tokens": 20, "temperature": 1.3}
    best = server.answer(DOCUMENT, best_of=4, seed=7, **request)
    singles = [server.answer(DOCUMENT, seed=seed, **request) for seed in range(7, 11)]
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


@pytest.mark.parametrize("name", golden.PENALTIES)
def test_a_penalty_is_transformers(server: Server, golden_tokens: golden.Tokens, name: str) -> None:
    for prompt, expected in zip(golden.PENALISED, golden_tokens[name], strict=True):
        penalised = server.token_ids(prompt, max_new_tokens=len(expected), **{name: golden.PENALTIES[name]})
        assert penalised == expected
    assert any(
        server.token_ids(prompt, max_new_tokens=len(expected)) != expected
        for prompt, expected in zip(golden.PENALISED, golden_tokens[name], strict=True)
    )


def test_the_prompts_tokens_count_for_the_repetition_penalty(server: Server, tokenizer: Tokenizer) -> None:
    prompt = story(6)
    plain = server.token_ids(prompt, max_new_tokens=1)
    assert plain[0] in tokenizer.encode(prompt)
    assert server.token_ids(prompt, max_new_tokens=1, repetition_penalty=5.0) != plain


# -- seeds in company --------------------------------------------------------------------------------------------------


def test_a_seeded_request_is_the_same_alone_and_among_32(server: Server) -> None:
    def request(seed: int) -> dict[str, Any]:
        prompt = SHORT[seed % len(SHORT)]
        return lmi(prompt, stream=True, max_new_tokens=48, do_sample=True, temperature=1.2, top_p=0.95, seed=seed)

    alone = [server.together([request(seed)])[0].token_ids for seed in range(8)]
    among = [answer.token_ids for answer in server.together([request(seed) for seed in range(32)])]
    assert among[:8] == alone
    assert len(set(map(tuple, among))) == 32
