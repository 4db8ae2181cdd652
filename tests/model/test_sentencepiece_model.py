from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from djl_trtllm.errors import TokenizerError
from djl_trtllm.model import Tokenizer, load_tokenizer, sentencepiece_model

sentencepiece = pytest.importorskip("sentencepiece")

OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_dummy_prefix": False},
    {"model_type": "unigram"},
    {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
    {"byte_fallback": False},
    {"user_defined_symbols": ["<|im_start|>"]},
]


def load(file: Path, into: Path, **config: Any) -> Tokenizer:
    (into / "tokenizer.model").write_bytes(file.read_bytes())
    (into / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(into)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ids_equal_those_of_sentencepiece(
    options: dict[str, Any], tmp_path: Path, sentencepiece_file: Callable[..., Path]
) -> None:
    file = sentencepiece_file(**options)
    tokenizer = load(file, tmp_path)
    reference = sentencepiece.SentencePieceProcessor(str(file))
    assert tokenizer.vocab_size == reference.get_piece_size()
    ids = (tokenizer.bos_id, tokenizer.end_ids, tokenizer.pad_id)
    assert ids == (reference.bos_id(), frozenset({reference.eos_id()}), None)
    for text in ["the wolf", "  two  spaces ", "Grüße 你好 🙂\n\tx", "", "wolf\n\nwood  ", "Ⅳ ﬁn"]:
        assert tokenizer.encode(text) == [reference.bos_id(), *reference.encode(text)], text
        if reference.unk_id() not in tokenizer.encode(text):  # an unknown token is special here, and " ⁇ " there
            assert tokenizer.decode(tokenizer.encode(text)) == reference.decode(reference.encode(text))


def test_a_user_defined_symbol_is_one_token_that_is_shown(
    tmp_path: Path, sentencepiece_file: Callable[..., Path]
) -> None:
    file = sentencepiece_file(user_defined_symbols=["<|im_start|>"])
    tokenizer = load(file, tmp_path)
    id_ = sentencepiece.SentencePieceProcessor(str(file)).piece_to_id("<|im_start|>")
    assert tokenizer.encode("the wolf<|im_start|>")[-1] == id_
    assert id_ not in tokenizer.special_ids
    assert tokenizer.decode(tokenizer.encode("the wolf<|im_start|>")) == "the wolf<|im_start|>"


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0▁")))
def test_any_text_survives_a_round_trip(text: str, sentencepiece_file: Callable[..., Path]) -> None:
    file = sentencepiece_file()
    tokenizer = _loaded.setdefault(file, sentencepiece_model.read(file, {})[0])
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text
    assert ids == sentencepiece.SentencePieceProcessor(str(file)).encode(text)


_loaded: dict[Path, Any] = {}


def test_text_after_a_special_token_has_a_prefix_only_in_legacy_mode(
    tmp_path: Path, sentencepiece_file: Callable[..., Path]
) -> None:
    legacy = load(sentencepiece_file(), tmp_path)
    assert legacy.decode(legacy.encode("the</s>wolf"), skip_special_tokens=False) == "<s> the</s> wolf"
    modern = load(sentencepiece_file(), tmp_path, legacy=False)
    assert modern.decode(modern.encode("the</s>wolf"), skip_special_tokens=False) == "<s> the</s>wolf"


def test_bos_and_eos_follow_the_configuration(tmp_path: Path, sentencepiece_file: Callable[..., Path]) -> None:
    tokenizer = load(sentencepiece_file(), tmp_path, add_bos_token=False, add_eos_token=True)
    plain = tokenizer.encode("the wolf", add_special_tokens=False)
    assert tokenizer.encode("the wolf") == [*plain, 2]


@pytest.mark.parametrize("content", [b"", b"garbage", b"version https://git-lfs.github.com/spec/v1\noid sha256:1"])
def test_a_damaged_model_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.model \(\d+ bytes\) is not a SentencePiece model"):
        load_tokenizer(tmp_path)


def test_a_conversion_that_disagrees_is_refused(sentencepiece_file: Callable[..., Path]) -> None:
    raw, _ = sentencepiece_model.read(sentencepiece_file(), {})
    with pytest.raises(TokenizerError, match="cannot be converted: 'wolf' is"):
        sentencepiece_model.check(raw, [("wolf", [1, 2, 3])], Path("tokenizer.model"))
