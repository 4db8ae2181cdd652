from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

TEXT = "the wolf and little red riding hood went into a deep dark wood to see her grandmother who lived far away"
WORDS = TEXT.split()
CHATML = (
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def sentences(count: int = 300) -> list[str]:
    draw = random.Random(0)
    return [" ".join(draw.choice(WORDS) for _ in range(12)) for _ in range(count)]


def byte_level() -> tokenizers.Tokenizer:
    """A BPE over bytes with `<s>` (0), `</s>` (1), `<pad>` (2) and `<|end|>` (3), which puts `<s>` before a text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        sentences(),
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<s>", "</s>", "<pad>", "<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s>:0 $A:0", pair="<s>:0 $A:0 <s>:1 $B:1", special_tokens=[("<s>", 0)]
    )
    return tokenizer


MakeModel = Callable[..., Path]


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Writes a model directory with the byte-level tokenizer and files by name: objects as JSON, text as it is."""

    def make(**files: Any) -> Path:
        path = tmp_path / "model"
        path.mkdir(exist_ok=True)
        byte_level().save(str(path / "tokenizer.json"))
        for name, content in files.items():
            (path / name.replace("__", "/")).parent.mkdir(parents=True, exist_ok=True)
            (path / name.replace("__", "/")).write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return make


@pytest.fixture(scope="session")
def sentencepiece_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Trains a SentencePiece model with the given trainer options, once for each set of options."""
    trained: dict[str, Path] = {}

    def train(**options: Any) -> Path:
        key = json.dumps(options, sort_keys=True)
        if key not in trained:
            sentencepiece = pytest.importorskip("sentencepiece")
            file = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
            settings = {
                "vocab_size": 400, "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
                "remove_extra_whitespaces": False, "character_coverage": 1.0, "hard_vocab_limit": False,
                "minloglevel": 2, "num_threads": 1,
            }  # fmt: skip
            with file.open("wb") as sink:
                sentencepiece.SentencePieceTrainer.train(
                    sentence_iterator=iter(sentences()), model_writer=sink, **{**settings, **options}
                )
            trained[key] = file
        return trained[key]

    return train
