"""Vectors and scores of OpenVINO are those of transformers on the same checkpoint, whatever shares an iteration."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from djl_trtllm.backends.planning import compile_checkpoint
from tests.engines.helpers import configured
from tests.support.client import Answer, exchange
from tests.support.encoders import QUERY, TEXTS, embeddings, scores, write_encoder, write_modules
from tests.support.server import Server, serving

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_here")]

CLOSE = 1e-4


def together(server: Server, path: str, bodies: list[dict[str, Any]]) -> list[Any]:
    """The answers to requests that are sent at the same time."""

    async def send() -> list[Answer]:
        return list(await asyncio.gather(*(exchange(server.port, body, path=path) for body in bodies)))

    answers = asyncio.run(send())
    assert [answer.status for answer in answers] == [200] * len(bodies)
    return [answer.json for answer in answers]


@contextmanager
def served(checkpoint: Path) -> Iterator[Server]:
    engine = checkpoint.with_name("engine")
    compile_checkpoint(configured(), checkpoint, engine)
    with serving(engine) as server:
        yield server


@pytest.mark.parametrize(
    ("model_type", "mode", "normalize"),
    [("bert", "mean_tokens", True), ("bert", "cls_token", False), ("xlm-roberta", "lasttoken", True)],
)
def test_64_requests_of_mixed_lengths_at_once_have_the_vectors_of_transformers(
    model_type: str, mode: str, normalize: bool, tmp_path: Path
) -> None:
    checkpoint = write_modules(write_encoder(tmp_path / "model", model_type), mode=mode, normalize=normalize)
    expected = embeddings(checkpoint, TEXTS, mode=mode, normalize=normalize)
    with served(checkpoint) as server:
        answers = together(server, "/v1/embeddings", [{"input": text} for text in TEXTS])
        one = together(server, "/v1/embeddings", [{"input": list(TEXTS)}])[0]
    for data in ([answer["data"][0] for answer in answers], one["data"]):
        assert np.allclose([each["embedding"] for each in data], expected, atol=CLOSE)


def test_64_requests_of_mixed_lengths_at_once_have_the_scores_of_transformers(tmp_path: Path) -> None:
    checkpoint = write_encoder(tmp_path / "model", labels=1)
    expected = scores(checkpoint, QUERY, TEXTS)
    assert np.ptp(expected) > 100 * CLOSE
    cut = scores(checkpoint, " ".join(TEXTS), TEXTS[:4], max_length=64)
    with served(checkpoint) as server:
        answers = together(server, "/score", [{"text_1": QUERY, "text_2": text} for text in TEXTS])
        assert np.allclose([answer["data"][0]["score"] for answer in answers], expected, atol=CLOSE)
        (ranked,) = together(server, "/v1/rerank", [{"query": QUERY, "documents": list(TEXTS)}])
        by_place = {each["index"]: each["relevance_score"] for each in ranked["results"]}
        assert np.allclose([by_place[place] for place in range(len(TEXTS))], expected, atol=CLOSE)
        body = {"text_1": " ".join(TEXTS), "text_2": list(TEXTS[:4]), "truncate_prompt_tokens": 64}
        (answer,) = together(server, "/score", [body])
        assert np.allclose([each["score"] for each in answer["data"]], cut, atol=CLOSE)
