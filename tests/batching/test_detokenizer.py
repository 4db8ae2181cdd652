from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from djl_trtllm.batching.detokenizer import Detokenizer
from djl_trtllm.model import Tokenizer, TokenTexts

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
    pieces = [
        "▁",
        "▁the",
        0xE2,
        0x96,
        0x81,
        "▁wolf",
        0xF0,
        0x9F,
        "a",
        "▁the",
        "▁wolf",
        *"abeth" * 3,
        0xC3,
        0xA9,
        "e",
        0xC3,
    ]
    ids = piece_ids(sentencepiece_like, *pieces)
    for first in range(len(ids)):
        assert detokenize(sentencepiece_like, [1], ids[first:]) == sentencepiece_like.decode([1, *ids[first:]])


def test_only_the_first_token_is_decoded_where_the_others_are_known(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer.raw)
    detokenizer = Detokenizer(texts, [1])
    words = [tokenizer.encode(word, False)[0] for word in (" the", " big", " dog")]
    assert [detokenizer.step(word) for word in words] == [" the", " big", " dog"]
    assert set(texts) == set(words[1:])
    texts.update(dict.fromkeys(words, "?"))
    assert detokenizer.step(words[0]) == "?"


def test_a_character_is_never_split(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer.texts, [1])
    steps = [detokenizer.step(token_id) for token_id in tokenizer.encode("😀é", False)]
    assert [step for step in steps if step] == ["😀", "é"]


def test_only_an_unfinished_character_is_pending(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀x", False)
    detokenizer = Detokenizer(tokenizer.texts, [1])
    pending = [detokenizer.pending]
    for token_id in ids:
        detokenizer.step(token_id)
        pending.append(detokenizer.pending)
    assert pending == [False] + [True] * (len(ids) - 2) + [False, False]
    assert detokenizer.flush() == ""


def test_what_is_flushed_is_pending_no_more(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer.texts, [1])
    detokenizer.step(tokenizer.encode("😀", False)[0])
    assert (detokenizer.flush(), detokenizer.pending, detokenizer.flush()) == ("�", False, "")


def test_the_first_token_keeps_its_space_after_a_prompt(sentencepiece_like: RawTokenizer) -> None:
    the, wolf = piece_ids(sentencepiece_like, "▁the", "▁wolf")
    assert detokenize(sentencepiece_like, [1, the], [wolf]) == " wolf"


def test_special_tokens_of_the_prompt_have_no_text(sentencepiece_like: RawTokenizer) -> None:
    """After them a text begins, so the first space goes."""
    the, broken = piece_ids(sentencepiece_like, "▁the", 0xE2)
    assert detokenize(sentencepiece_like, [1], [the]) == "the"
    assert detokenize(sentencepiece_like, [1], [the, broken]) == "the�"


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


def test_an_unfinished_character_after_a_restart_is_flushed_whole(sentencepiece_like: RawTokenizer) -> None:
    ids = piece_ids(sentencepiece_like, 0xC3, 0xA9, 0xFF, "▁wolf", 0xE2)
    assert detokenize(sentencepiece_like, [1, *piece_ids(sentencepiece_like, "▁the")], ids) == "é wolf�"


def test_an_unfinished_character_ends_as_a_replacement_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x😀", False)[:-1]
    assert detokenize(tokenizer.raw, [1], ids) == "x�"
