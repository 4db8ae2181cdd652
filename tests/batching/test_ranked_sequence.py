from __future__ import annotations

from djl_trtllm.batching.ranked_sequence import RankedSequence
from djl_trtllm.executor.protocol import Ranked
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import Alternative, FinishReason, RankedToken, Token


def sequence(tokenizer: Tokenizer, *stop: str) -> RankedSequence:
    return RankedSequence(
        text_of=lambda id_: f"<{id_}>",
        index=0,
        texts=tokenizer.texts,
        special_ids=tokenizer.special_ids | tokenizer.end_ids,
        shown={},
        prompt_ids=[5, 6],
        stop=stop,
        seed=None,
        logprobs=True,
    )


def ranks(tokens: list[Token]) -> list[list[int]]:
    return [[each.id for each in token.top] for token in tokens if isinstance(token, RankedToken)]


def test_each_token_has_the_most_likely_ones_at_its_position(tokenizer: Tokenizer) -> None:
    one = sequence(tokenizer)
    assert one.take([70, 71], [Ranked(-0.5, [70, 8], [-0.5, -2.0]), Ranked(None, [9], [-1.0])])
    first, second = one.drain().tokens
    assert isinstance(first, RankedToken)
    assert first.top == [Alternative(70, first.text, -0.5), Alternative(8, "<8>", -2.0)]
    assert (first.logprob, second.logprob, one.cumulative_logprob) == (-0.5, None, -0.5)
    assert ranks([second]) == [[9]]
    assert one.take([72], [-0.25])
    assert (ranks(one.drain().tokens), one.drain().tokens) == ([[]], [])


def test_a_token_that_is_held_back_keeps_its_own(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the little wolf ran", False)
    one = sequence(tokenizer, "wolf sat")
    found = []
    for number, id_ in enumerate(ids):
        one.take([id_], [Ranked(-1.0, [number], [-1.0])])
        found += ranks(one.drain().tokens)
    one.finish(FinishReason.LENGTH)
    assert found + ranks(one.drain().tokens) == [[number] for number in range(len(ids))]


def test_an_engine_may_report_nothing(tokenizer: Tokenizer) -> None:
    one = sequence(tokenizer)
    one.take([70, 71], None)
    tokens = one.drain().tokens
    assert (ranks(tokens), [token.logprob for token in tokens]) == ([[], []], [None, None])
