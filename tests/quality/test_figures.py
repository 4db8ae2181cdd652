"""The figures of two sides beside values that were computed by hand."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest

from djl_trtllm.quality.figures import (
    Comparison,
    Continuation,
    Position,
    Thresholds,
    compare,
    divergence_bound,
    perplexity,
)
from tests.support.tables import by_table


def logs(**probabilities: float) -> dict[str, float]:
    return {token: math.log(value) for token, value in probabilities.items()}


def said(text: str, *logprobs: dict[str, float], prompt: list[float] | None = None) -> Continuation:
    """A continuation whose tokens are the words of a text, of a prompt whose tokens have these log-probabilities."""
    given = [*logprobs, *[{}] * len(text.split())]
    positions = [Position(token, given[at]) for at, token in enumerate(text.split())]
    return Continuation(positions, None if prompt is None else [Position("p", {"p": each}) for each in prompt])


@by_table("p", "q", "nats")
def test_the_divergence_is_that_of_the_known_tokens_and_all_others_together(
    p: dict[str, float], q: dict[str, float], nats: float | None
) -> None:
    bound = divergence_bound(logs(**p), logs(**q))
    assert bound == (None if nats is None else pytest.approx(nats, abs=1e-5))


def test_the_bound_is_never_above_the_divergence() -> None:
    """Of random pairs over 12 tokens, with as many of the likeliest known as a server gives."""
    chance = random.Random(5)
    tightest = 1.0
    for known, own, _ in product((1, 2, 5, 11), (None, 3), range(300)):
        sides = []
        for _ in range(2):
            weights = [chance.expovariate(1) ** 3 + 1e-9 for _ in range(12)]
            sides.append([weight / sum(weights) for weight in weights])
        whole = sum(p * math.log(p / q) for p, q in zip(*sides, strict=True))
        top = [
            {f"t{at}": math.log(side[at]) for at in sorted(range(12), key=side.__getitem__)[-known:]} for side in sides
        ]
        if own is not None:  # a token of a prompt, which need not be among the likeliest
            for given, side in zip(top, sides, strict=True):
                given[f"t{own}"] = math.log(side[own])
        bound = divergence_bound(top[0], top[1], None if own is None else f"t{own}")
        assert bound is not None and 0 <= bound <= whole + 1e-6
        tightest = min(tightest, 1 - bound / whole)
    assert tightest < 0.01


def test_parts_of_characters_are_no_tokens_of_their_own() -> None:
    """Different tokens have this text, so it counts among the others."""
    for text in ("", "\ufffd"):
        assert divergence_bound({text: math.log(0.9)}, {text: math.log(0.1)}) == pytest.approx(0)


def test_the_perplexity_is_the_exponential_of_the_mean() -> None:
    assert perplexity([math.log(1 / 2), math.log(1 / 8)]) == pytest.approx(4)


@pytest.mark.parametrize("least", [-9999.0, -math.inf])
def test_a_broken_engine_has_a_perplexity_that_is_compared(least: float) -> None:
    a, b = [said("x", prompt=[-1.0])], [said("x", prompt=[least])]
    assert any("perplexity" in reason for reason in Comparison(a, b).reasons())
    assert perplexity([least]) == pytest.approx(math.exp(300))


def test_answers_are_compared_up_to_their_first_difference() -> None:
    found = compare(
        said("a b c d", logs(a=1 / 2), logs(b=1 / 2), logs(c=0.5, x=0.25)),
        said("a b x d e", logs(a=1 / 2), logs(b=1 / 4), logs(x=0.5, c=0.25), logs(d=1.0)),
    )
    assert (found.tokens, found.common, found.first) == (5, 2, ("c", "x"))
    assert found.gap == pytest.approx(math.log(2))
    known = [0, 0.5 * math.log(2) + 0.5 * math.log(2 / 3), 0.25 * math.log(2)]
    assert found.divergences == pytest.approx(known)


@by_table("a", "b", "common", "first")
def test_an_answer_that_ends_first_differs_there(a: str, b: str, common: int, first: list[str] | None) -> None:
    found = compare(said(a), said(b))
    assert (found.common, found.first) == (common, None if first is None else tuple(first))


def test_the_agreement_counts_tokens_after_the_same_text() -> None:
    found = Comparison([said("a b c d"), said("a b")], [said("a b x y"), said("a b")])
    assert (found.agreement, found.compared) == (1 - 1 / 5, 5)
    assert (found.equal_share, found.tokens) == (4 / 6, 6)
    assert found.first_differences == [3]
    assert [share for _, share in found.agreeing()] == [1, 1, 1, 0.5, 0.5]


def test_nothing_generated_is_no_difference() -> None:
    found = Comparison([said("")], [said("")])
    assert (found.agreement, found.equal_share, list(found.reasons())) == (1, 1, [])


def test_the_prompt_counts_where_both_sides_cut_it_into_the_same_tokens() -> None:
    kl = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    a, b = said("x", prompt=[math.log(0.5)]), said("x", prompt=[math.log(0.25)])
    assert Comparison([a], [b]).divergences == [pytest.approx(kl)]
    other = Continuation(b.positions, [Position("q", {"q": math.log(0.25)})])
    assert Comparison([a], [other]).divergences == []


def test_the_divergence_by_position_is_the_mean_of_the_prompts_that_get_there() -> None:
    a = [said("a b", logs(a=0.5), logs(b=0.5)), said("a", logs(a=0.5))]
    b = [said("a b", logs(a=0.25), logs(b=0.5)), said("a", logs(a=0.5))]
    kl = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert dict(Comparison(a, b).by_position()) == pytest.approx({1: kl / 2, 2: 0})


def test_perplexities_are_of_all_prompts_that_both_sides_have() -> None:
    half, eighth = math.log(1 / 2), math.log(1 / 8)
    a = [said("x", prompt=[half, eighth]), said("x", prompt=[half]), said("x")]
    b = [said("x", prompt=[half, half]), said("x"), said("x", prompt=[half])]
    assert Comparison(a, b).perplexities == pytest.approx((4, 2))
    other_tokens = [said("x", prompt=[half]), said("x"), said("x")]
    assert Comparison(a, other_tokens).perplexities is None


@by_table("thresholds", "reasons")
def test_a_figure_beyond_its_threshold_is_a_reason_to_differ(thresholds: dict[str, float], reasons: list[str]) -> None:
    """Agreement 3/4, divergences of ln 2 / 2 and 0.144, perplexities 2 and 4."""
    a = [said("a b c d", logs(a=0.5, z=0.5), {}, {}, {}, prompt=[math.log(1 / 2)])]
    b = [said("a b c x", logs(a=0.5, z=0.25), {}, {}, {}, prompt=[math.log(1 / 4)])]
    found = Comparison(a, b, Thresholds(**thresholds))
    assert [reason.split()[0] for reason in found.reasons()] == reasons
    assert found.as_json()["verdict"] == ("differs" if reasons else "agrees")


def test_a_prompt_that_fails_on_one_side_is_a_difference_and_on_both_it_is_none() -> None:
    failed = Continuation(error="too long")
    both = Comparison([said("a"), failed], [said("a"), failed])
    assert (both.failed_on_one, both.failed_on_both, list(both.reasons())) == (0, 1, [])
    one = Comparison([failed, said("a b")], [said("a"), said("a c")])
    assert [number for number, _ in one.by_prompt()] == [2]
    assert next(one.reasons()) == "1 prompts failed on one side only"
