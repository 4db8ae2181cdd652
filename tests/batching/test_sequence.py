from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.batching.sequence import OutputSequence
from djl_trtllm.errors import GenerationError
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, OutputChunk, Token


def sequence(
    tokenizer: Tokenizer,
    *stop: str,
    logprobs: bool = False,
    seed: int | None = None,
    stop_ids: dict[int, FinishReason] | None = None,
    shown: dict[int, str] | None = None,
) -> OutputSequence:
    return OutputSequence(
        index=0,
        texts=tokenizer.texts,
        special_ids=tokenizer.special_ids | tokenizer.end_ids,
        shown=shown or {},
        prompt_ids=[5, 6],
        stop=stop,
        stop_ids=stop_ids or {},
        seed=seed,
        logprobs=logprobs,
    )


def texts(update: OutputChunk) -> list[str]:
    return [token.text for token in update.tokens]


def test_a_new_sequence_has_nothing_to_show(tokenizer: Tokenizer) -> None:
    one = sequence(tokenizer, seed=4)
    assert (one.index, one.seed, one.token_ids, one.cumulative_logprob) == (0, 4, [], 0.0)
    assert (one.finished, one.closed) == (None, False)
    assert one.drain() == OutputChunk(0, [], None)


def test_tokens_are_there_as_soon_as_they_are_taken(tokenizer: Tokenizer) -> None:
    one = sequence(tokenizer)
    ids = tokenizer.encode("the wolf", False)
    for token_id in ids:
        assert one.take([token_id], None)
        update = one.drain()
        assert update == OutputChunk(0, [Token(token_id, update.tokens[0].text, None, False)], None)
    assert one.drain().tokens == []


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    one = sequence(tokenizer)
    one.take([*tokenizer.encode("the", False), 2], None)
    one.finish(FinishReason.END_TOKEN)
    update = one.drain()
    assert (texts(update)[-1], update.tokens[-1].special) == ("", True)
    assert update.finished is not None
    assert update.finished.generated_tokens == len(update.tokens)


@pytest.mark.parametrize("stop", [(), ("xyz",)])
def test_special_tokens_that_are_to_be_shown_have_their_text(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    one = sequence(tokenizer, *stop, shown={3: "<call>"})
    one.take([3, *tokenizer.encode("the", False), 3, 1], None)
    one.finish(FinishReason.LENGTH)
    tokens = one.drain().tokens
    assert "".join(token.text for token in tokens).replace(" ", "") == "<call>the<call>"
    assert (tokens[0], tokens[-1].text) == (Token(3, "<call>", None, True), "")


def test_a_character_that_a_shown_token_cuts_off_stands_before_it(tokenizer: Tokenizer) -> None:
    one = sequence(tokenizer, shown={3: "<call>"})
    one.take([*tokenizer.encode("😀", False)[:-1], 3], None)
    one.finish(FinishReason.LENGTH)
    assert "".join(texts(one.drain())).strip().endswith("\ufffd<call>")


@pytest.mark.parametrize("stop", [(), ("wolf",)])
def test_tokens_of_an_unfinished_character_are_held_back(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    one = sequence(tokenizer, *stop)
    ids = tokenizer.encode("😀", False)
    assert len(ids) > 1
    one.take(ids[:-1], None)
    assert one.drain().tokens == []
    one.take(ids[-1:], None)
    assert texts(one.drain()) == [""] * (len(ids) - 1) + ["😀"]


@pytest.mark.parametrize("stop", [(), ("wolf",)])
def test_tokens_keep_their_order_around_a_character_of_several(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    """What follows the character may not overtake the tokens that were held back for it."""
    ids = tokenizer.encode("the 😀 big 😀 wood", False)
    for portion in (1, len(ids)):
        one, seen = sequence(tokenizer, *stop), []
        for start in range(0, len(ids), portion):
            one.take(ids[start : start + portion], None)
            seen += [token.id for token in one.drain().tokens]
        assert seen == ids


def test_an_unfinished_character_is_let_go_with_the_last_token_that_has_text(tokenizer: Tokenizer) -> None:
    one = sequence(tokenizer)
    ids = [*tokenizer.encode("the", False), *tokenizer.encode("😀", False)[:2], 2]
    one.take(ids, None)
    one.finish(FinishReason.END_TOKEN)
    update = one.drain()
    assert [token.id for token in update.tokens] == ids
    assert texts(update)[-3:] == ["", "�", ""]
    assert "".join(texts(update)) == "the�"
    assert update.tokens[-1].special


def test_what_may_become_a_stop_is_held_back_and_let_go_when_it_does_not(tokenizer: Tokenizer) -> None:
    one = sequence(tokenizer, " the wolf ran")
    ids = tokenizer.encode("so the wolf sat", False)
    one.take(ids[:-1], None)
    held = one.drain()
    assert "".join(texts(held)) == "so"
    one.take(ids[-1:], None)
    assert "".join(texts(one.drain())) == " the wolf sat"


def test_what_is_held_at_the_end_is_let_go(tokenizer: Tokenizer) -> None:
    one = sequence(tokenizer, "wolf ran")
    one.take(tokenizer.encode("the wolf", False), None)
    one.finish(FinishReason.LENGTH)
    assert "".join(texts(one.drain())) == "the wolf"


def test_a_stop_cuts_the_text_and_keeps_the_tokens(tokenizer: Tokenizer) -> None:
    one = sequence(tokenizer, "olf")
    ids = tokenizer.encode("the wolf ran", False)
    upto = len(tokenizer.encode("the wolf", False))
    assert not one.take(ids, None)
    update = one.drain()
    assert "".join(texts(update)) == "the w"
    assert [token.id for token in update.tokens] == ids[:upto]
    assert update.finished is not None
    assert (update.finished.reason, update.finished.stop_sequence) == (FinishReason.STOP, "olf")
    assert update.finished.generated_tokens == upto


def test_a_token_that_lies_wholly_inside_a_stop_has_no_text(tokenizer: Tokenizer) -> None:
    one = sequence(tokenizer, "a wolf")
    assert not one.take(tokenizer.encode("saw a wolf", False), None)
    assert texts(one.drain()) == ["s", "a", "w", " ", ""]


def test_log_probabilities_add_up_and_are_reported_only_when_asked_for(tokenizer: Tokenizer) -> None:
    told, silent = sequence(tokenizer, logprobs=True, seed=4), sequence(tokenizer)
    for one, logprobs in ((told, [-1.0, -0.5]), (silent, None)):
        one.take(tokenizer.encode("the wolf", False)[:2], logprobs)
        one.finish(FinishReason.LENGTH)
    assert [token.logprob for token in told.drain().tokens] == [-1.0, -0.5]
    assert told.finished is not None and silent.finished is not None
    assert (told.finished.cumulative_logprob, told.finished.seed) == (-1.5, 4)
    assert (silent.finished.cumulative_logprob, silent.finished.seed) == (None, None)


def test_a_token_without_a_log_probability_adds_nothing_to_the_sum(tokenizer: Tokenizer) -> None:
    one = sequence(tokenizer, logprobs=True)
    one.take(tokenizer.encode("the wolf", False)[:2], [-1.0, None])
    one.finish(FinishReason.LENGTH)
    assert [token.logprob for token in one.drain().tokens] == [-1.0, None]
    assert one.finished is not None and one.finished.cumulative_logprob == -1.0


def test_an_error_comes_with_the_tokens_before_it(tokenizer: Tokenizer) -> None:
    one, error = sequence(tokenizer), GenerationError("gone")
    one.take(tokenizer.encode("the", False), None)
    one.finish(FinishReason.ERROR, error)
    update = one.drain()
    assert "".join(texts(update)) == "the"
    assert update.finished is not None
    assert update.finished.error is error


@pytest.mark.parametrize("stops", [[], ["wolf"], [" ", "x"], ["é", "😀!"]])
@given(st.data())
def test_any_tokens_in_any_portions_join_to_the_text_before_the_stop(
    tokenizer: Tokenizer, stops: list[str], data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=25))
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6))), len(ids)]
    one = sequence(tokenizer, *stops)
    updates = []
    for start, end in pairwise(cuts):
        going = one.take(ids[start:end], None)
        updates.append(one.drain())
        if not going:
            break
    else:
        one.finish(FinishReason.LENGTH)
        updates.append(one.drain())
    text = "".join(text for update in updates for text in texts(update))
    assert one.finished is not None
    assert [token.id for update in updates for token in update.tokens] == ids[: one.finished.generated_tokens]
    plain = [token_id for token_id in ids if token_id not in tokenizer.special_ids | tokenizer.end_ids]
    before = tokenizer.decode([5, 6])
    whole = tokenizer.decode([5, 6, *plain])[len(before) :]
    if one.finished.stop_sequence is None:
        assert text == whole
    else:
        assert whole.startswith(text + one.finished.stop_sequence)
        assert not any(stop in text for stop in stops)


@pytest.mark.parametrize("stop", [(), ("wolf",)])
@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.END_TOKEN])
def test_a_stop_id_that_the_engine_does_not_know_ends_the_sequence_and_is_its_last(
    tokenizer: Tokenizer, stop: tuple[str, ...], reason: FinishReason
) -> None:
    one = sequence(tokenizer, *stop, stop_ids={40: reason}, logprobs=True)
    assert one.take([5, 6], [-1.0, -1.0])
    assert not one.take([7, 40, 8], [-1.0, -1.0, -1.0])
    update = one.drain()
    assert [token.id for token in update.tokens] == [5, 6, 7, 40]
    assert update.finished is not None
    finished = update.finished
    assert (finished.reason, finished.generated_tokens, finished.cumulative_logprob) == (reason, 4, -4.0)


def test_a_stop_string_that_ends_with_a_stop_id_comes_first(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("wolf", False)
    one = sequence(tokenizer, "wolf", stop_ids={ids[-1]: FinishReason.END_TOKEN})
    assert not one.take(ids, None)
    assert one.finished is not None
    assert (one.finished.reason, one.finished.stop_sequence) == (FinishReason.STOP, "wolf")
