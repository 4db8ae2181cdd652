"""`LLM.embed` and `LLM.score`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from djl_trtllm.backends.scripted.executor import vector_of
from djl_trtllm.errors import EngineError, InvalidRequestError, UnsupportedTaskError
from djl_trtllm.model import load_tokenizer
from djl_trtllm.offline import LLM
from djl_trtllm.offline.llm import open_offline_model
from tests.support.encoders import QUERY, TEXTS, scripted_encoder

REFUSED: list[tuple[str, Callable[[LLM], object]]] = [
    ("truncate_prompt_tokens is 0", lambda llm: llm.embed("a", truncate_prompt_tokens=0)),
    ("truncate_prompt_tokens is -2", lambda llm: llm.embed("a", truncate_prompt_tokens=-2)),
    ("truncate_prompt_tokens is 515", lambda llm: llm.score("a", "b", truncate_prompt_tokens=515)),
    ("dimensions is 0", lambda llm: llm.embed("a", dimensions=0)),
    ("prompts[1] is 5", lambda llm: llm.embed(["a", 5])),  # type: ignore[list-item]
    ("data_1[0] is None", lambda llm: llm.score([None], "b")),  # type: ignore[list-item]
    ("data_2[1] is b'b'", lambda llm: llm.score("a", ["b", b"b"])),  # type: ignore[list-item]
]


def test_texts_become_vectors_in_their_order_and_one_that_fails_has_an_error(tmp_path: Path) -> None:
    model = scripted_encoder(tmp_path)
    tokenizer = load_tokenizer(model)
    texts = [*TEXTS[:20], " ".join(TEXTS), *TEXTS[20:25]]
    with LLM(model) as llm:
        (whole,) = llm.embed(texts[20], truncate_prompt_tokens=-1, use_tqdm=False)
        for name, refused_call in REFUSED:
            with pytest.raises(InvalidRequestError, match=re.escape(name)):
                refused_call(llm)
        found = llm.embed(texts, dimensions=5, use_tqdm=False)
        (cut,) = llm.embed(texts[20], truncate_prompt_tokens=7, use_tqdm=False)
        (refused,) = llm.score(QUERY, TEXTS[0], use_tqdm=False)
    assert isinstance(refused.error, UnsupportedTaskError)
    assert cut.prompt_tokens == 7
    assert whole.prompt_tokens == 514
    failed = found.pop(20)
    assert (failed.outputs, type(failed.error).__name__) == (None, "PromptTooLongError")
    for text, output in zip([*TEXTS[:25]], found, strict=True):
        ids = tokenizer.encode(text)
        vector = vector_of(ids, 8)[:5]
        assert output.outputs is not None and output.error is None
        assert output.prompt_tokens == len(ids)
        assert np.allclose(output.outputs.embedding, vector / np.linalg.norm(vector), atol=1e-6)


def test_a_model_of_lower_case_texts_needs_a_tokenizer_that_makes_them(tmp_path: Path) -> None:
    model = scripted_encoder(tmp_path)
    (model / "sentence_bert_config.json").write_text('{"max_seq_length": 128, "do_lower_case": true}')
    open_offline_model(model, {}).texts()
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(EngineError, match="do_lower_case"):
        open_offline_model(model, {}).texts()


def test_pairs_become_scores(tmp_path: Path) -> None:
    with LLM(scripted_encoder(tmp_path, labels=1)) as llm:
        one_with_each = llm.score(QUERY, TEXTS[:3], use_tqdm=False)
        pairs = llm.score([QUERY] * 3, TEXTS[:3], use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="data_1"):
            llm.score([QUERY] * 2, TEXTS[:3])
    scores = [output.outputs.score for output in one_with_each if output.outputs is not None]
    assert len(set(scores)) == 3 and all(0 < score < 1 for score in scores)
    assert [output.outputs for output in pairs] == [output.outputs for output in one_with_each]
