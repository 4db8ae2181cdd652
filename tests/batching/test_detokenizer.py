from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from djl_trtllm.batching.detokenizer import Detokenizer
from djl_trtllm.model import Tokenizer

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


def detokenize(raw: RawTokenizer, prompt: list[int], ids: list[int]) -> str:
    detokenizer = Detokenizer(raw, prompt)
    return "".join([detokenizer.step(token_id) for token_id in ids]) + detokenizer.flush()


@given(any_text, any_text)
@settings(max_examples=300)
def test_steps_join_to_the_whole_text(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    ids = tokenizer.encode(text, False)
    assert detokenize(tokenizer.raw, tokenizer.encode(prompt), ids) == text


@given(st.data())
@settings(max_examples=300)
def test_any_ids_join_to_their_decoding(tokenizer: Tokenizer, data: st.DataObject) -> None:
    plain = st.integers(0, tokenizer.vocab_size - 1).filter(lambda token_id: token_id not in tokenizer.special_ids)
    ids = data.draw(st.lists(plain, max_size=30))
    assert detokenize(tokenizer.raw, [1], ids) == tokenizer.decode(ids)


@given(any_text.map(lambda text: text.replace("▁", "")))
@settings(max_examples=300)
def test_steps_of_a_byte_fallback_tokenizer_join_to_the_whole_text(sentencepiece_like: RawTokenizer, text: str) -> None:
    prompt = [1, sentencepiece_like.token_to_id("▁the")]
    ids = sentencepiece_like.encode(text, add_special_tokens=False).ids
    whole = sentencepiece_like.decode(prompt + ids)
    assert detokenize(sentencepiece_like, prompt, ids) == whole[len("the") :]


@given(st.data())
@settings(max_examples=300)
def test_invalid_bytes_are_replaced_and_do_no_harm_to_what_follows(
    sentencepiece_like: RawTokenizer, data: st.DataObject
) -> None:
    invalid = data.draw(st.lists(st.integers(3, 258), max_size=12))
    after = [sentencepiece_like.token_to_id(piece) for piece in ("a", "▁wolf", "b")]
    assert detokenize(sentencepiece_like, [1], invalid + after).endswith("a wolfb")


def test_a_character_is_never_split(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer.raw, [1])
    steps = [detokenizer.step(token_id) for token_id in tokenizer.encode("😀é", False)]
    assert [step for step in steps if step] == ["😀", "é"]


def test_the_first_token_keeps_its_space_after_a_prompt(sentencepiece_like: RawTokenizer) -> None:
    the, wolf = (sentencepiece_like.token_to_id(piece) for piece in ("▁the", "▁wolf"))
    assert detokenize(sentencepiece_like, [1, the], [wolf]) == " wolf"


def test_an_unfinished_character_ends_as_a_replacement_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x😀", False)[:-1]
    assert detokenize(tokenizer.raw, [1], ids) == "x�"
