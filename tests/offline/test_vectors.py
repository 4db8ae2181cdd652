"""`LLM.embed` and `LLM.score`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from djl_trtllm.backends.scripted.pooling_executor import vector_of
from djl_trtllm.errors import InvalidRequestError, UnsupportedTaskError
from djl_trtllm.model import load_tokenizer
from djl_trtllm.offline import LLM
from tests.support.encoders import QUERY, TEXTS, scripted_encoder


def test_texts_become_vectors_in_their_order_and_one_that_fails_has_an_error(tmp_path: Path) -> None:
    model = scripted_encoder(tmp_path)
    tokenizer = load_tokenizer(model)
    texts = [*TEXTS[:20], " ".join(TEXTS), *TEXTS[20:25]]
    with LLM(model) as llm:
        found = llm.embed(texts, dimensions=5, use_tqdm=False)
        (cut,) = llm.embed(texts[20], truncate_prompt_tokens=7, use_tqdm=False)
        (refused,) = llm.score(QUERY, TEXTS[0], use_tqdm=False)
    assert isinstance(refused.error, UnsupportedTaskError)
    assert cut.prompt_tokens == 7
    failed = found.pop(20)
    assert (failed.outputs, type(failed.error).__name__) == (None, "PromptTooLongError")
    for text, output in zip([*TEXTS[:25]], found, strict=True):
        ids = tokenizer.encode(text)
        vector = vector_of(ids, 8)[:5]
        assert output.outputs is not None and output.error is None
        assert output.prompt_tokens == len(ids)
        assert np.allclose(output.outputs.embedding, vector / np.linalg.norm(vector), atol=1e-6)


def test_pairs_become_scores(tmp_path: Path) -> None:
    with LLM(scripted_encoder(tmp_path, labels=1)) as llm:
        one_with_each = llm.score(QUERY, TEXTS[:3], use_tqdm=False)
        pairs = llm.score([QUERY] * 3, TEXTS[:3], use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="data_1"):
            llm.score([QUERY] * 2, TEXTS[:3])
    scores = [output.outputs.score for output in one_with_each if output.outputs is not None]
    assert len(set(scores)) == 3 and all(0 < score < 1 for score in scores)
    assert [output.outputs for output in pairs] == [output.outputs for output in one_with_each]
