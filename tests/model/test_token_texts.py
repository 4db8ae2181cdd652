from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Regex, decoders, models
from tokenizers import Tokenizer as RawTokenizer

from djl_trtllm.model import Tokenizer, TokenTexts

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["a", "▁", "▁wolf", "wolf", "##s", "\ufffd", "é"]
REPLACE, STRIP = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)


def raw_tokenizer(decoder: Any, *pieces: str) -> RawTokenizer:
    """A tokenizer whose ids are bytes and then pieces."""
    vocabulary = {piece: id_ for id_, piece in enumerate([*BYTES, *(pieces or PIECES)])}
    raw = RawTokenizer(models.WordLevel(vocabulary, unk_token="a"))
    if decoder is not None:
        raw.decoder = decoder
    return raw


def known(decoder: Any) -> dict[str, str]:
    """The texts that are known, by piece."""
    texts = TokenTexts(raw_tokenizer(decoder))
    found = {piece: texts[texts.raw.token_to_id(piece)] for piece in PIECES}
    return {piece: text for piece, text in found.items() if text is not None}


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        decoders.Sequence([REPLACE, decoders.ByteFallback(), decoders.Fuse(), STRIP]),
        decoders.Sequence([REPLACE, decoders.ByteFallback(), decoders.Fuse()]),
    ],
)
def test_pieces_have_their_text_after_the_first_token(decoder: Any) -> None:
    assert known(decoder) == {"a": "a", "▁": " ", "▁wolf": " wolf", "wolf": "wolf", "##s": "##s", "é": "é"}


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.ByteFallback(),
        decoders.Sequence([REPLACE, decoders.ByteFallback()]),
        decoders.Sequence([decoders.Fuse(), REPLACE]),
        decoders.Sequence([decoders.Replace(Regex("▁"), " "), decoders.Fuse()]),
        decoders.Sequence([STRIP, decoders.Fuse()]),
        decoders.Sequence([REPLACE, decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.WordPiece(), decoders.Fuse()]),
    ],
)
def test_nothing_is_known_of_other_decoders(decoder: Any) -> None:
    assert known(decoder) == {}


def test_a_byte_may_be_part_of_a_character_or_make_others_invalid() -> None:
    texts = TokenTexts(raw_tokenizer(decoders.Sequence([REPLACE, decoders.ByteFallback(), decoders.Fuse()])))
    assert [texts[id_] for id_ in range(256)] == [None] * 256


def test_of_byte_level_tokens_whole_characters_are_known(tokenizer: Tokenizer) -> None:
    (word,) = tokenizer.encode(" the", False)
    parts = tokenizer.encode("😀", False)
    assert tokenizer.texts[word] == " the"
    assert len(parts) > 1
    assert [tokenizer.texts[part] for part in parts] == [None] * len(parts)


def test_without_a_token_to_begin_with_nothing_is_known() -> None:
    texts = TokenTexts(raw_tokenizer(decoders.Metaspace(), "b", "▁wolf"))
    assert texts[texts.raw.token_to_id("▁wolf")] is None


def test_ids_that_are_no_tokens_and_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.texts[tokenizer.vocab_size + 1] is None
    assert [tokenizer.texts[id_] for id_ in tokenizer.special_ids] == [None] * len(tokenizer.special_ids)


def test_a_text_is_found_out_once(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer.raw)
    (word,) = tokenizer.encode(" the", False)
    assert word not in texts
    assert texts[word] == texts.get(word) == " the"
