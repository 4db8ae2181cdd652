"""Vectors and scores of the installed vLLM are those of transformers on the same checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from djl_trtllm.backends.vllm.names import installed_version
from tests.integration.test_embeddings import CLOSE, together
from tests.support.encoders import QUERY, TEXTS, embeddings, scores, write_encoder, write_modules
from tests.support.server import Server, running
from tests.vllm.conftest import ON_CPU, START_SECONDS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(installed_version() is None, reason="vLLM is not installed: scripts/test-vllm has it"),
]

HEADS: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2}
"""vLLM's attention on CPUs has heads of 32 numbers and more."""


@contextmanager
def served(checkpoint: Path) -> Iterator[Server]:
    options = {"backend": "vllm", "dtype": "fp32", "enforce_eager": True, "model_loading_timeout": START_SECONDS}
    lines = [f"option.{name}={value}\n" for name, value in options.items()]
    (checkpoint / "serving.properties").write_text("".join(lines))
    with running(Server(checkpoint, ON_CPU, checkpoint.parent), START_SECONDS) as server:
        yield server


@pytest.mark.parametrize(
    ("model_type", "mode", "normalize", "changes"),
    [
        ("bert", "mean_tokens", True, {}),
        # vLLM reads the field, which files of the hub have and those of today's transformers do not.
        ("xlm-roberta", "cls_token", False, {"position_embedding_type": "absolute"}),
        ("llama", "lasttoken", True, {"num_key_value_heads": 1}),
    ],
    ids=["bert", "xlm-roberta", "a decoder"],
)
def test_64_requests_of_mixed_lengths_at_once_have_the_vectors_of_transformers(
    model_type: str, mode: str, normalize: bool, changes: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = write_encoder(tmp_path / "model", model_type, **HEADS, **changes)
    write_modules(checkpoint, mode=mode, normalize=normalize)
    expected = embeddings(checkpoint, TEXTS, mode=mode, normalize=normalize)
    with served(checkpoint) as server:
        answers = together(server, "/v1/embeddings", [{"input": text} for text in TEXTS])
        one = together(server, "/v1/embeddings", [{"input": list(TEXTS)}])[0]
    for data in ([answer["data"][0] for answer in answers], one["data"]):
        assert np.allclose([each["embedding"] for each in data], expected, atol=CLOSE)


def test_64_requests_of_mixed_lengths_at_once_have_the_scores_of_transformers(tmp_path: Path) -> None:
    checkpoint = write_encoder(tmp_path / "model", labels=1, **HEADS)
    expected = scores(checkpoint, QUERY, TEXTS)
    assert np.ptp(expected) > 100 * CLOSE
    with served(checkpoint) as server:
        answers = together(server, "/score", [{"text_1": QUERY, "text_2": text} for text in TEXTS])
        (ranked,) = together(server, "/v1/rerank", [{"query": QUERY, "documents": list(TEXTS)}])
    assert np.allclose([answer["data"][0]["score"] for answer in answers], expected, atol=CLOSE)
    by_place = {each["index"]: each["relevance_score"] for each in ranked["results"]}
    assert np.allclose([by_place[place] for place in range(len(TEXTS))], expected, atol=CLOSE)
