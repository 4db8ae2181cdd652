"""The bundled model's files hold what its card says, and its grammar is a function of its seed."""

from __future__ import annotations

import importlib
import json
import math
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

SERVING = Path(__file__).resolve().parents[2] / "serving"
MODEL = SERVING / "models" / "tiny-stories"
UNICODE = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def grammar() -> Any:
    """The module that told the stories; those that it imports lie beside it."""
    sys.path.insert(0, str(SERVING / "tiny_stories"))
    try:
        return importlib.import_module("grammar")
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def auto_tokenizer() -> Any:
    """As transformers loads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((MODEL / name).read_text(encoding="utf-8"))
    return loaded


def tensors() -> dict[str, dict[str, Any]]:
    with (MODEL / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


RAW = Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@given(UNICODE)
def test_the_tokenizer_writes_down_any_text(text: str) -> None:
    ids = RAW.encode(text).ids
    assert ids[0] == 1
    assert RAW.decode(ids[1:], skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["🐺🏠", "👩‍👩‍👧 e\u0301", "  two  spaces \n\n\tand a tab ", "Ünïcödé 狼と少女", ""])
def test_auto_tokenizer_round_trips(auto_tokenizer: Any, text: str) -> None:
    ids = auto_tokenizer(text)["input_ids"]
    assert ids[0] == 1 and 2 not in ids
    assert auto_tokenizer.decode(ids, skip_special_tokens=True) == text


def test_special_ids(auto_tokenizer: Any) -> None:
    assert (auto_tokenizer.unk_token_id, auto_tokenizer.bos_token_id, auto_tokenizer.eos_token_id) == (0, 1, 2)
    assert auto_tokenizer.pad_token_id == 0
    roles = ["<|system|>", "<|user|>", "<|assistant|>"]
    assert auto_tokenizer.convert_tokens_to_ids(roles) == [3, 4, 5]
    assert RAW.encode("".join(roles)).ids == [1, 3, 4, 5]


def test_the_chat_template_renders(auto_tokenizer: Any) -> None:
    chat = [
        {"role": "system", "content": "You are a storyteller."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": [{"type": "text", "text": "Tell me a story"}]},
    ]
    text = auto_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<s><|system|>You are a storyteller.<|user|>Hello<|assistant|>Hello!</s><|user|>Tell me a story<|assistant|>"
    )
    without = auto_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=False)
    assert without + "<|assistant|>" == text
    ids = auto_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[:2] == [1, 3] and ids[-1] == 5 and ids.count(2) == 1
    with pytest.raises(Exception, match="roles"):
        auto_tokenizer.apply_chat_template([{"role": "wolf", "content": "Let me in"}], tokenize=False)


def test_the_weights_are_small_and_of_half_precision_and_their_configuration_fits() -> None:
    held = tensors()
    assert sum(math.prod(entry["shape"]) for entry in held.values()) <= 5_000_000
    assert {entry["dtype"] for entry in held.values()} == {"F16"}
    assert sum(path.stat().st_size for path in MODEL.iterdir() if path.is_file()) <= 11_000_000
    expected = {"architectures": ["LlamaForCausalLM"], "dtype": "float16", "max_position_embeddings": 4096}
    expected |= {"vocab_size": RAW.get_vocab_size(), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    assert expected.items() <= load("config.json").items()
    assert load("generation_config.json")["eos_token_id"] == 2


def test_a_seed_is_a_corpus(grammar: Any) -> None:
    def corpus(seed: int) -> list[Any]:
        rng = random.Random(seed)
        return [grammar.document(rng) for _ in range(30)]

    assert corpus(1) == corpus(1)
    assert corpus(1) != corpus(2)


@given(seed=st.integers(min_value=0, max_value=2**32))
def test_stories_are_short_and_finished(grammar: Any, seed: int) -> None:
    told = grammar.story(random.Random(seed))
    assert 60 <= len(told.text.split()) <= 250
    assert not re.search(r"[\[\]{}|]|  |\ba [aeio]", told.text)
    assert told.text[0].isupper() and told.text.endswith((".", "!", '"'))
    assert told.subjects


def test_every_plot_can_be_reported(grammar: Any) -> None:
    rng = random.Random(0)
    beginnings = {grammar.story(rng).text[:200] for _ in range(400)}
    assert len(beginnings) > 300
    assert len(grammar.PLOTS) >= 15
