from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from djl_trtllm.errors import TokenizerError
from djl_trtllm.model import Layout, inspect
from djl_trtllm.model.vocabulary import load_fitting_tokenizer, outside, require_tokenizer
from tests.model.conftest import byte_level
from tests.model.test_layout import safetensors


def model(path: Path, vocab_size: int | None, tokenizer: tokenizers.Tokenizer | None) -> Layout:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab_size}
    (path / "config.json").write_text(json.dumps(config))
    safetensors(path / "model.safetensors")
    if tokenizer is not None:
        tokenizer.save(str(path / "tokenizer.json"))
    return inspect(path)


def test_a_model_without_a_tokenizer_is_refused_with_what_was_found(tmp_path: Path) -> None:
    layout = model(tmp_path, 400, None)
    with pytest.raises(TokenizerError) as caught:
        load_fitting_tokenizer(layout, trust_remote_code=False)
    assert f"{tmp_path} has no tokenizer: found config.json, model.safetensors; expected" in str(caught.value)
    assert "option.tokenizer" in str(caught.value)


def test_the_tokenizer_may_be_in_the_engine_inside(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "openvino_model.xml").touch()
    layout = model(tmp_path, 400, None)
    require_tokenizer(layout)
    assert load_fitting_tokenizer(layout, trust_remote_code=False) is None


@pytest.mark.parametrize("size", [None, 400, 512])
def test_a_vocabulary_as_large_as_the_models_fits(tmp_path: Path, size: int | None) -> None:
    tokenizer = byte_level()
    assert tokenizer.get_vocab_size() <= 400
    layout = model(tmp_path, size, tokenizer)
    loaded = load_fitting_tokenizer(layout, trust_remote_code=False)
    assert loaded is not None and outside(loaded, layout) is None


def test_a_vocabulary_beyond_the_models_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size() - 1
    with pytest.raises(TokenizerError) as caught:
        load_fitting_tokenizer(model(tmp_path, size, tokenizer), trust_remote_code=False)
    assert f"has ids up to {size}, and the model in {tmp_path} knows ids up to {size - 1} (vocab_size {size} in" in str(
        caught.value
    )


def test_added_tokens_may_be_beyond_the_models(tmp_path: Path) -> None:
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<image>"])
    layout = model(tmp_path, size, tokenizer)
    loaded = load_fitting_tokenizer(layout, trust_remote_code=False)
    assert loaded is not None and outside(loaded, layout) == size


def test_added_tokens_beyond_the_models_may_not_be_in_every_prompt(tmp_path: Path) -> None:
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<start>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<start> $A", special_tokens=[("<start>", size)]
    )
    with pytest.raises(TokenizerError, match=rf"has the id {size} in every prompt"):
        load_fitting_tokenizer(model(tmp_path, size, tokenizer), trust_remote_code=False)
