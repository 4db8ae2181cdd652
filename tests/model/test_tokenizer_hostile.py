"""Tokenizers that fail, and configurations that no tokenizer can follow."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from djl_trtllm.errors import InvalidRequestError, PromptTooLongError, TokenizerError
from djl_trtllm.model import Tokenizer, load_tokenizer

PARTS = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def folder(tiny_stories: Path, tmp_path: Path) -> Path:
    for name in PARTS:
        shutil.copy(tiny_stories / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("id_", [2**31, 10**40, int("9" * 4000)])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_id_that_no_token_has_is_refused_at_load(folder: Path, file: str, id_: int) -> None:
    (folder / file).write_text(json.dumps({"eos_token_id": [2, id_]}))
    with pytest.raises(TokenizerError, match=r"eos_token_id of the model's configuration is .*: expected a token's id"):
        load_tokenizer(folder)


@pytest.mark.parametrize("id_", ["4294967296", "9" * 40, "9" * 5000])
def test_an_added_token_of_such_an_id_is_refused_at_load(folder: Path, id_: str) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {id_: {"content": "<x>"}}}))
    with pytest.raises(TokenizerError, match=r"added_tokens_decoder has the id [0-9]{10,40}: expected a token's id"):
        load_tokenizer(folder)


def test_a_number_that_python_does_not_read_is_refused_at_load(folder: Path) -> None:
    (folder / "config.json").write_text('{"eos_token_id": %s}' % ("9" * 5000))
    with pytest.raises(TokenizerError, match="is not valid JSON"):
        load_tokenizer(folder)


@pytest.fixture
def catastrophic() -> Tokenizer:
    """Its regular expression takes more steps than there may be on a row of letters."""
    raw = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"^(a+)+$(?<!b)|(a|aa)+$"), "isolated")
    return Tokenizer(raw, special_tokens={}, end_ids=(), templates={}, origin=Path("here"))


@pytest.mark.parametrize("length", [40, 2000])
def test_a_regular_expression_without_end_ends_the_request(catastrophic: Tokenizer, length: int) -> None:
    assert catastrophic.encode("b") == [1]
    with pytest.raises(InvalidRequestError, match="the model's tokenizer fails on this text"):
        catastrophic.encode("a" * length + "b")
    assert catastrophic.encode("b") == [1]


class Panicking:
    """In the place of the tokenizer of Rust."""

    def encode(self, *_: Any, **__: Any) -> Any:
        raise type("PanicException", (BaseException,), {})("called `Result::unwrap()`")

    encode_batch_fast = encode


@pytest.mark.parametrize("text", ["a", "a" * 5000])
def test_a_panic_ends_the_request(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(tokenizer, "raw", Panicking())
    with pytest.raises(InvalidRequestError, match="the model's tokenizer fails on this text"):
        tokenizer.encode(text)


def test_more_tokens_than_there_may_be_are_counted_and_not_listed(tokenizer: Tokenizer) -> None:
    text = "the wolf " * 1000
    count = len(tokenizer.encode(text))
    assert len(tokenizer.encode(text, most=count)) == count
    with pytest.raises(PromptTooLongError, match=f"the prompt has {count} tokens, max_input_len is {count - 1}"):
        tokenizer.encode(text, most=count - 1)
