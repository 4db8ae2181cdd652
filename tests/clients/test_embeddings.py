"""Clients of embeddings and reranking, as published, in an environment that `scripts/test-clients` makes."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np

from tests.clients.test_harnesses import PROGRAMS, ROOT, loops
from tests.support.encoders import scripted_encoder
from tests.support.server import serving

TEXTS = ["The wolf", "A little girl", "The grandmother was ill in bed"]
"""The texts of `embedding_clients.py`."""


def test_each_client_gets_the_same_vectors_and_ranks(tmp_path: Path) -> None:
    python = ROOT / ".venv-embeddings" / "bin" / "python"
    with (
        serving(scripted_encoder(tmp_path / "encoder")) as embedding,
        serving(scripted_encoder(tmp_path / "reranker", labels=1)) as reranking,
    ):
        found = loops(python, PROGRAMS / "embedding_clients.py", embedding.url, reranking.url, folder=tmp_path)
        vectors = httpx.post(embedding.url + "/embed", json={"inputs": TEXTS}, trust_env=False).json()
        body = {"query": "Who?", "texts": TEXTS}
        ranks = httpx.post(reranking.url + "/rerank", json=body, trust_env=False).json()
    cohere = found.pop()
    assert cohere["found"] == [each["index"] for each in ranks]
    assert len(found) == 5
    for client in found:
        assert np.allclose(client["found"], vectors, atol=1e-6), client["client"]
