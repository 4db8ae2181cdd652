"""The output of a request: text, stop strings, and what reaches its consumer."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer as RawTokenizer, decoders, models, pre_tokenizers

from djl_trtllm.batching.sequence import (
    Detokenizer,
    OutputSequence,
    RankedSequence,
    RequestState,
    StopMatcher,
)
from djl_trtllm.batching.statistics import RequestRecord
from djl_trtllm.executor.protocol import Ranked
from djl_trtllm.model import Tokenizer, TokenTexts
from djl_trtllm.request import Alternative, FinishReason, OutputChunk, RankedToken, RequestOrigin, Sampling, Token
from tests.batching.helpers import Recorder, take
from tests.support.tables import by_table

short_text = st.text(alphabet="ab\n", max_size=20)


def feed(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """The text that was ever safe to show, and the stop string that follows it."""
    matcher = StopMatcher(stops)
    whole = ""
    for piece in pieces:
        whole += piece
        match = matcher.feed(piece)
        if match is not None:
            return whole[: matcher.safe], match
    return whole[: matcher.safe], None


@by_table("stops", "pieces", "safe", "stop")
def test_the_stop_that_begins_first_wins_and_its_beginning_is_held_back(
    stops: list[str], pieces: list[str], safe: str, stop: str | None
) -> None:
    assert feed(stops, pieces) == (safe, stop)


@given(
    st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(short_text, max_size=8)
)
def test_any_split_gives_what_a_search_of_the_whole_text_gives(stops: list[str], pieces: list[str]) -> None:
    whole = "".join(pieces)
    shown, match = feed(stops, pieces)
    found = [whole.find(stop) for stop in stops if stop in whole]
    if not found:
        assert match is None
        assert whole.startswith(shown)
        held = whole[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    else:
        # Fed in pieces, a stop that completes early can beat a longer one that begins before it and completes later.
        assert match is not None
        assert whole.startswith(shown + match)
        assert not any(stop in shown for stop in stops)


any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def sentencepiece_like() -> RawTokenizer:
    """A tokenizer of Llama 2's kind: spaces as U+2581, bytes as a fallback, the first space of a text stripped."""
    words = ["▁", "▁the", "▁wolf", "a", "b", "e", "t", "h", "th", "the"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for piece in [*(f"<0x{byte:02X}>" for byte in range(256)), *words]:
        vocabulary[piece] = len(vocabulary)
    raw = RawTokenizer(models.BPE(vocabulary, [("t", "h"), ("th", "e")], unk_token="<unk>", byte_fallback=True))
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return raw


def piece_ids(raw: RawTokenizer, *pieces: str | int) -> list[int]:
    """Ids of pieces; numbers are bytes."""
    names = (f"<0x{piece:02X}>" if isinstance(piece, int) else piece for piece in pieces)
    return [raw.token_to_id(name) for name in names]


def detokenize(raw: RawTokenizer, prompt: list[int], ids: list[int]) -> str:
    detokenizer = Detokenizer(TokenTexts(raw), prompt)
    return "".join([detokenizer.step(token_id) for token_id in ids]) + detokenizer.flush()


@given(any_text, any_text)
def test_steps_join_to_the_whole_text(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    ids = tokenizer.encode(text, False)
    assert detokenize(tokenizer.raw, tokenizer.encode(prompt), ids) == text


@given(st.data())
def test_any_ids_join_to_their_decoding(tokenizer: Tokenizer, data: st.DataObject) -> None:
    plain = st.integers(0, tokenizer.vocab_size - 1).filter(lambda token_id: token_id not in tokenizer.special_ids)
    ids = data.draw(st.lists(plain, max_size=30))
    assert detokenize(tokenizer.raw, [1], ids) == tokenizer.decode(ids)


@given(any_text.map(lambda text: text.replace("▁", "")))
def test_steps_of_a_byte_fallback_tokenizer_join_to_the_whole_text(sentencepiece_like: RawTokenizer, text: str) -> None:
    prompt = [1, *piece_ids(sentencepiece_like, "▁the")]
    ids = sentencepiece_like.encode(text, add_special_tokens=False).ids
    whole = sentencepiece_like.decode(prompt + ids)
    assert detokenize(sentencepiece_like, prompt, ids) == whole[len("the") :]


@given(st.data())
def test_invalid_bytes_are_replaced_and_do_no_harm_to_what_follows(
    sentencepiece_like: RawTokenizer, data: st.DataObject
) -> None:
    invalid = data.draw(st.lists(st.integers(3, 258), max_size=12))
    after = piece_ids(sentencepiece_like, "a", "▁wolf", "b")
    assert detokenize(sentencepiece_like, [1], invalid + after).endswith("a wolfb")


def test_known_texts_and_decoded_ones_join_in_any_order(sentencepiece_like: RawTokenizer) -> None:
    pieces: list[str | int] = ["▁", "▁the", 0xE2, 0x96, 0x81, "▁wolf", 0xF0, 0x9F, "a", "▁the", "▁wolf"]
    pieces += [*"abeth" * 3, 0xC3, 0xA9, "e", 0xC3]
    ids = piece_ids(sentencepiece_like, *pieces)
    for first in range(len(ids)):
        assert detokenize(sentencepiece_like, [1], ids[first:]) == sentencepiece_like.decode([1, *ids[first:]])


def test_only_the_first_token_is_decoded_where_the_others_are_known(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer.raw)
    detokenizer = Detokenizer(texts, [1])
    words = [tokenizer.encode(word, False)[0] for word in (" the", " big", " dog")]
    assert [detokenizer.step(word) for word in words] == [" the", " big", " dog"]
    assert {id_ for id_, text in texts.items() if text is not None} == set(words[1:])
    texts.update(dict.fromkeys(words, "?"))
    assert detokenizer.step(words[0]) == "?"


def test_behind_a_text_of_the_prompt_the_first_token_is_looked_up_too(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer.raw)
    words = [tokenizer.encode(word, False)[0] for word in (" the", " big", " dog")]
    detokenizer = Detokenizer(texts, [1, words[0]])
    assert [detokenizer.step(word) for word in words[1:]] == [" big", " dog"]
    assert set(texts) == set(words)


def test_only_an_unfinished_character_is_pending(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀x", False)
    detokenizer = Detokenizer(tokenizer.texts, [1])
    pending = [detokenizer.pending]
    for token_id in ids:
        detokenizer.step(token_id)
        pending.append(detokenizer.pending)
    assert pending == [False] + [True] * (len(ids) - 2) + [False, False]
    assert detokenizer.flush() == ""
    detokenizer.step(ids[0])
    assert (detokenizer.flush(), detokenizer.pending, detokenizer.flush()) == ("\ufffd", False, "")


def test_text_that_the_decoder_takes_back_stays_and_the_rest_follows_it(sentencepiece_like: RawTokenizer) -> None:
    detokenizer = Detokenizer(TokenTexts(sentencepiece_like), [1, *piece_ids(sentencepiece_like, "▁the")])
    # 0xFF makes the two bytes of the "é" invalid as well.
    ids = piece_ids(sentencepiece_like, 0xC3, 0xA9, 0xFF, "a", "▁wolf", 0xE2)
    steps, pending = [], []
    for token_id in ids:
        steps.append(detokenizer.step(token_id))
        pending.append(detokenizer.pending)
    assert steps == ["", "é", "", "a", " wolf", ""]
    assert pending == [True, False, True, False, False, True]
    assert detokenizer.flush() == "�"


def fields(tokenizer: Tokenizer, *stop: str, **others: Any) -> dict[str, Any]:
    """Those of a sequence."""
    special_ids = tokenizer.special_ids | tokenizer.end_ids
    neutral = {"index": 0, "shown": {}, "stop_ids": {}, "seed": None, "logprobs": False, "prompt_ids": [5, 6]}
    return {"texts": tokenizer.texts, "special_ids": special_ids, "stop": stop, **neutral, **others}


def sequence(tokenizer: Tokenizer, *stop: str, **others: Any) -> OutputSequence:
    return OutputSequence(**fields(tokenizer, *stop, **others))


def texts(update: OutputChunk) -> list[str]:
    return [token.text for token in update.tokens]


def test_tokens_are_there_as_soon_as_they_are_taken(tokenizer: Tokenizer) -> None:
    one = sequence(tokenizer)
    ids = tokenizer.encode("the wolf", False)
    for token_id in ids:
        assert take(one, [token_id])
        update = one.drain()
        assert update == OutputChunk(0, [Token(token_id, update.tokens[0].text, None, False)], None)
    assert one.drain().tokens == []


@pytest.mark.parametrize("stop", [(), ("xyz",)])
def test_special_tokens_that_are_to_be_shown_have_their_text(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    one = sequence(tokenizer, *stop, shown={3: "<call>"})
    take(one, [3, *tokenizer.encode("the", False), 3, 1])
    one.finish(FinishReason.LENGTH)
    tokens = one.drain().tokens
    assert "".join(token.text for token in tokens).replace(" ", "") == "<call>the<call>"
    assert (tokens[0], tokens[-1].text) == (Token(3, "<call>", None, True), "")


def test_a_character_that_a_shown_token_cuts_off_stands_before_it(tokenizer: Tokenizer) -> None:
    one = sequence(tokenizer, shown={3: "<call>"})
    take(one, [*tokenizer.encode("😀", False)[:-1], 3])
    one.finish(FinishReason.LENGTH)
    assert "".join(texts(one.drain())).strip().endswith("\ufffd<call>")


@pytest.mark.parametrize("stop", [(), ("wolf",)])
def test_tokens_of_an_unfinished_character_are_held_back(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    one = sequence(tokenizer, *stop)
    ids = tokenizer.encode("😀", False)
    assert len(ids) > 1
    take(one, ids[:-1])
    assert one.drain().tokens == []
    take(one, ids[-1:])
    assert texts(one.drain()) == [""] * (len(ids) - 1) + ["😀"]


def test_an_unfinished_character_is_let_go_with_the_last_token_that_has_text(tokenizer: Tokenizer) -> None:
    one = sequence(tokenizer)
    ids = [*tokenizer.encode("the", False), *tokenizer.encode("😀", False)[:2], 2]
    take(one, ids)
    one.finish(FinishReason.END_TOKEN)
    update = one.drain()
    assert [token.id for token in update.tokens] == ids
    assert texts(update)[-3:] == ["", "�", ""]
    assert "".join(texts(update)) == "the�"
    assert update.tokens[-1].special


def test_what_may_become_a_stop_is_held_back_and_let_go_when_it_does_not(tokenizer: Tokenizer) -> None:
    one = sequence(tokenizer, " the wolf ran")
    ids = tokenizer.encode("so the wolf sat", False)
    take(one, ids[:-1])
    held = one.drain()
    assert "".join(texts(held)) == "so"
    take(one, ids[-1:])
    assert "".join(texts(one.drain())) == " the wolf sat"


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
        going = take(one, ids[start:end])
        updates.append(one.drain())
        if not going:
            break
    else:
        one.finish(FinishReason.LENGTH)
        updates.append(one.drain())
    text = "".join(text for update in updates for text in texts(update))
    assert one.finished is not None
    assert [token.id for update in updates for token in update.tokens] == ids[: one.finished.generated_tokens]
    special = tokenizer.special_ids | tokenizer.end_ids
    assert all(token.special is (token.id in special) for update in updates for token in update.tokens)
    assert not any(token.text for update in updates for token in update.tokens if token.special)
    plain = [token_id for token_id in ids if token_id not in special]
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
    assert take(one, [5, 6], [-1.0, -1.0])
    assert not take(one, [7, 40, 8], [-1.0, -1.0, -1.0])
    update = one.drain()
    assert [token.id for token in update.tokens] == [5, 6, 7, 40]
    assert update.finished is not None
    finished = update.finished
    assert (finished.reason, finished.generated_tokens, finished.cumulative_logprob) == (reason, 4, -4.0)


def test_a_stop_string_that_ends_with_a_stop_id_comes_first(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("wolf", False)
    one = sequence(tokenizer, "wolf", stop_ids={ids[-1]: FinishReason.END_TOKEN})
    assert not take(one, ids)
    assert one.finished is not None
    assert (one.finished.reason, one.finished.stop_sequence) == (FinishReason.STOP, "wolf")


def ranked(tokenizer: Tokenizer, *stop: str) -> RankedSequence:
    return RankedSequence(text_of=lambda id_: f"<{id_}>", **fields(tokenizer, *stop, logprobs=True))


def ranks(tokens: list[Token]) -> list[list[int]]:
    return [[each.id for each in token.top] for token in tokens if isinstance(token, RankedToken)]


def test_each_token_has_the_most_likely_ones_at_its_position(tokenizer: Tokenizer) -> None:
    one = ranked(tokenizer)
    assert take(one, [70, 71], [Ranked(-0.5, [70, 8], [-0.5, -2.0]), Ranked(None, [9], [-1.0])])
    first, second = one.drain().tokens
    assert isinstance(first, RankedToken)
    assert first.top == [Alternative(70, first.text, -0.5), Alternative(8, "<8>", -2.0)]
    assert (first.logprob, second.logprob, one.cumulative_logprob) == (-0.5, None, -0.5)
    assert ranks([second]) == [[9]]
    assert take(one, [72], [-0.25])
    assert (ranks(one.drain().tokens), one.drain().tokens) == ([[]], [])


def test_a_token_that_is_held_back_keeps_its_own(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the little wolf ran", False)
    one = ranked(tokenizer, "wolf sat")
    found = []
    for number, id_ in enumerate(ids):
        take(one, [id_], [Ranked(-1.0, [number], [-1.0])])
        found += ranks(one.drain().tokens)
    one.finish(FinishReason.LENGTH)
    assert found + ranks(one.drain().tokens) == [[number] for number in range(len(ids))]


def test_an_engine_may_report_nothing(tokenizer: Tokenizer) -> None:
    one = ranked(tokenizer)
    take(one, [70, 71])
    tokens = one.drain().tokens
    assert (ranks(tokens), [token.logprob for token in tokens]) == ([[], []], [None, None])


LENGTH, CANCELLED, ERROR = FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.ERROR


class Script:
    """A request whose sequences are played by hand."""

    def __init__(self, tokenizer: Tokenizer, **sampling: object) -> None:
        parameters = Sampling(**sampling)  # type: ignore[arg-type]
        self.consumer = Recorder()
        self.sequences = [
            sequence(tokenizer, index=index, special_ids=frozenset(), prompt_ids=[5], logprobs=True)
            for index in range(parameters.sequences)
        ]
        record = RequestRecord(RequestOrigin(), 7.5, 3, len(self.sequences))
        self.generation = RequestState(parameters, list(self.sequences), self.consumer, record)

    def say(self, number: int, *token_ids: int, logprob: float = -1.0, end: FinishReason | None = None) -> list[int]:
        """New tokens of a sequence, and perhaps its end; the ids of what was delivered."""
        before = len(self.consumer.updates)
        sequence = self.sequences[number]
        take(sequence, token_ids, [logprob] * len(token_ids))
        if end is not None:
            sequence.finish(end)
        self.generation.deliver(sequence)
        return [token.id for update in self.consumer.updates[before:] for token in update.tokens]

    @property
    def delivered(self) -> list[tuple[int, list[int], bool]]:
        return [
            (update.index, [token.id for token in update.tokens], update.finished is not None)
            for update in self.consumer.updates
        ]


def test_an_end_says_how_long_its_request_waited(tokenizer: Tokenizer) -> None:
    script = Script(tokenizer, n=2)
    script.say(0, end=CANCELLED)
    script.generation.record.started = 9.75
    script.say(1, end=LENGTH)
    waited = [update.finished.queue_seconds for update in script.consumer.updates if update.finished]
    assert waited == [0.0, 2.25]


@pytest.mark.parametrize("best_of", [1, 3])
def test_with_best_of_nothing_is_delivered_before_all_have_ended(tokenizer: Tokenizer, best_of: int) -> None:
    script = Script(tokenizer, n=1, best_of=best_of)
    assert script.say(0, 10) == []
    for number in range(1, best_of):
        assert script.say(number, 20, end=LENGTH) == []
    assert script.delivered == []
    script.say(0, 11, end=LENGTH)
    assert len(script.delivered) == 1


def test_best_of_delivers_the_best_first_with_new_indices_and_the_others_not_at_all(tokenizer: Tokenizer) -> None:
    script = Script(tokenizer, n=2, best_of=3)
    script.say(0, 10, logprob=-3.0, end=LENGTH)
    script.say(1, 11, logprob=-1.0, end=LENGTH)
    assert script.say(2, 12, logprob=-2.0, end=LENGTH) == [11, 12]
    assert script.delivered == [(0, [11], True), (1, [12], True)]
    assert [sequence.index for sequence in script.sequences[1:]] == [0, 1]


@pytest.mark.parametrize("reason", [CANCELLED, ERROR])
def test_what_was_cut_short_ranks_last_whatever_its_log_probability(tokenizer: Tokenizer, reason: FinishReason) -> None:
    script = Script(tokenizer, n=1, best_of=2)
    script.say(0, end=reason)
    script.say(1, 11, logprob=-9.0, end=LENGTH)
    assert script.delivered == [(0, [11], True)]


def test_an_abandoned_request_calls_its_consumer_no_more(tokenizer: Tokenizer) -> None:
    script = Script(tokenizer)
    script.say(0, 10)
    script.generation.abandon()
    script.say(0, 11, end=LENGTH)
    assert script.delivered == [(0, [10], False)]
    assert script.generation.done


@pytest.mark.parametrize("best_of", [None, 2])
def test_the_consumer_of_a_request_that_has_ended_waits_for_no_garbage_collector(
    tokenizer: Tokenizer, best_of: int | None
) -> None:
    script = Script(tokenizer, n=1, best_of=best_of)
    script.consumer.request = script.generation  # type: ignore[attr-defined]
    consumer = weakref.ref(script.consumer)
    for number in range(best_of or 1):
        assert not script.generation.done and not script.sequences[number].closed
        script.say(number, 10, end=LENGTH)
        assert script.sequences[number].closed
    assert script.generation.done
    assert script.delivered == [(0, [10], True)]
    gc.disable()
    try:
        del script
        assert consumer() is None
    finally:
        gc.enable()
