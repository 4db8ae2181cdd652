"""Vectors and scores over HTTP: the doors agree, a killed engine process costs nothing, and one guilty text ends alone.

The engine is the scripted one, whose vector of a text follows from its token ids.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from djl_trtllm.backends.scripted.executor import vector_of
from djl_trtllm.model import Tokenizer, load_tokenizer
from tests.support.client import Answer, exchange
from tests.support.encoders import QUERY, TEXTS, scripted_encoder
from tests.support.processes import wait_until
from tests.support.server import Server, serving

pytestmark = pytest.mark.slow

DIMENSIONS = 8


def post(server: Server, path: str, body: Any) -> Answer:
    return asyncio.run(exchange(server.port, body, path=path))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scripted_encoder(tmp_path_factory.mktemp("all") / "encoder")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serving(model) as server:
        yield server


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(scripted_encoder(tmp_path_factory.mktemp("scorer"), labels=1)) as server:
        yield server


@pytest.fixture(scope="module")
def tokens(model: Path) -> Tokenizer:
    return load_tokenizer(model)


def expected(tokens: Tokenizer, text: str, most: int | None = None) -> Any:
    vector = vector_of(tokens.surround(tokens.encode(text, False), None, most)[0], DIMENSIONS)
    return vector / np.linalg.norm(vector)


def score(tokens: Tokenizer, first: str, second: str) -> float:
    ids = tokens.surround(tokens.encode(first, False), tokens.encode(second, False), None)[0]
    return float(1 / (1 + np.exp(-float(vector_of(ids, 1)[0]))))


def test_every_door_gives_the_vectors_of_the_texts_in_their_order(server: Server, tokens: Tokenizer) -> None:
    texts = list(TEXTS[:9])
    vectors = np.array([expected(tokens, text) for text in texts])
    answer = post(server, "/v1/embeddings", {"input": texts, "model": "encoder"}).json
    assert [each["index"] for each in answer["data"]] == list(range(9))
    count = sum(len(tokens.encode(text)) for text in texts)
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    in_base64 = post(server, "/invocations", {"input": texts, "encoding_format": "base64"}).json
    ids = [tokens.encode(text) for text in texts]
    for found in (
        [each["embedding"] for each in answer["data"]],
        [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in in_base64["data"]],
        [each["embedding"] for each in post(server, "/v1/embeddings", {"input": ids}).json["data"]],
        post(server, "/embed", {"inputs": texts}).json,
        post(server, "/invocations", {"inputs": texts}).json,
        post(server, "/predictions/encoder", {"inputs": texts}).json,
    ):
        assert np.allclose(found, vectors, atol=1e-6)
    assert np.allclose(post(server, "/invocations", {"inputs": texts[0]}).json, vectors[0], atol=1e-6)


def test_openais_client_reads_the_vectors(server: Server, tokens: Tokenizer) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    vectors = [expected(tokens, text) for text in TEXTS[:3]]
    in_base64 = client.embeddings.create(model="encoder", input=list(TEXTS[:3]))
    in_numbers = client.embeddings.create(model="encoder", input=list(TEXTS[:3]), encoding_format="float")
    for answer in (in_base64, in_numbers):
        assert np.allclose([each.embedding for each in answer.data], vectors, atol=1e-6)


def test_every_door_gives_the_scores_of_the_documents(scorer: Server, tokens: Tokenizer) -> None:
    texts = list(TEXTS[:9])
    scores = [score(tokens, QUERY, text) for text in texts]
    best = sorted(range(9), key=lambda place: -scores[place])
    ranked = post(scorer, "/v1/rerank", {"query": QUERY, "documents": texts, "top_n": 4}).json["results"]
    assert [each["index"] for each in ranked] == best[:4]
    assert [each["document"]["text"] for each in ranked] == [texts[place] for place in best[:4]]
    assert [each["relevance_score"] for each in ranked] == pytest.approx([scores[place] for place in best[:4]])
    for path in ("/rerank", "/invocations"):
        ranks = post(scorer, path, {"query": QUERY, "texts": texts, "return_text": True}).json
        assert [(each["index"], each["text"]) for each in ranks] == [(place, texts[place]) for place in best]
        assert [each["score"] for each in ranks] == pytest.approx([scores[place] for place in best])
    alone = post(scorer, "/score", {"text_1": QUERY, "text_2": texts}).json["data"]
    assert [each["score"] for each in alone] == pytest.approx(scores)
    raw = post(scorer, "/rerank", {"query": QUERY, "texts": texts[:1], "raw_scores": True}).json[0]["score"]
    assert 1 / (1 + np.exp(-raw)) == pytest.approx(scores[0], abs=1e-6)


def test_a_text_is_cut_where_the_request_says_so_and_refused_otherwise(server: Server, tokens: Tokenizer) -> None:
    long = " ".join(TEXTS)
    assert post(server, "/v1/embeddings", {"input": long}).status == 400
    assert post(server, "/embed", {"inputs": long}).status == 422
    cut = post(server, "/embed", {"inputs": long, "truncate": True}).json[0]
    assert np.allclose(cut, expected(tokens, long, 514), atol=1e-6)
    asked = post(server, "/v1/embeddings", {"input": long, "truncate_prompt_tokens": 5}).json
    assert np.allclose(asked["data"][0]["embedding"], expected(tokens, long, 5), atol=1e-6)
    assert asked["usage"]["prompt_tokens"] == 5


def test_dimensions_are_the_first_ones_and_no_more_than_the_model_has(server: Server, tokens: Tokenizer) -> None:
    few = post(server, "/v1/embeddings", {"input": TEXTS[0], "dimensions": 3}).json["data"][0]["embedding"]
    whole = expected(tokens, TEXTS[0])[:3]
    assert np.allclose(few, whole / np.linalg.norm(whole), atol=1e-6)
    refused = post(server, "/v1/embeddings", {"input": TEXTS[0], "dimensions": DIMENSIONS + 1})
    assert refused.status == 400 and "'dimensions' is 9" in refused.json["error"]["message"]


CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", CHAT, 400),
        ("/v1/completions", {"prompt": "Hello"}, 400),
        ("/v1/messages", CHAT, 400),
        ("/v1/responses", {"input": "Hello"}, 400),
        ("/generate", {"inputs": "Hello"}, 422),
        ("/predict", {"prompt": "Hello"}, 400),
        ("/v2/models/encoder/generate", {"text_input": "Hello", "max_tokens": 2}, 400),
        ("/invocations", CHAT, 424),
        ("/v1/rerank", {"query": "Hello", "documents": ["you"]}, 400),
        ("/score", {"text_1": "Hello", "text_2": "you"}, 400),
    ],
)
def test_what_the_model_is_not_for_is_refused_by_name(server: Server, path: str, body: Any, status: int) -> None:
    answer = post(server, path, body)
    assert (answer.status, b"option.task" in answer.body) == (status, True)


def test_a_model_that_scores_refuses_to_embed(scorer: Server) -> None:
    for path, body, status in (
        ("/v1/embeddings", {"input": "Hello"}, 400),
        ("/embed", {"inputs": "Hello"}, 424),
        ("/invocations", {"inputs": "Hello"}, 424),
    ):
        answer = post(scorer, path, body)
        assert (answer.status, b"option.task" in answer.body) == (status, True)


def test_the_model_says_what_it_is_for(server: Server, scorer: Server) -> None:
    for each, task in ((server, "embed"), (scorer, "score")):
        (listed,) = httpx.get(each.url + "/v1/models", trust_env=False).json()["data"]
        assert listed["task"] == task


def test_the_most_texts_are_answered_and_one_more_is_refused(server: Server) -> None:
    body = {"input": ["Once"] * 2048, "encoding_format": "base64"}
    assert len(post(server, "/v1/embeddings", body).json["data"]) == 2048
    assert post(server, "/v1/embeddings", {"input": ["Once"] * 2049}).status == 400
    assert server.finished("length") >= 2048
    wait_until(server.idle, what="an idle server")


def vectors_of(answers: list[Answer]) -> Any:
    assert [answer.status for answer in answers] == [200] * len(answers)
    return np.array([answer.json["data"][0]["embedding"] for answer in answers])


def test_a_killed_engine_process_costs_32_requests_nothing(tmp_path: Path, tokens: Tokenizer) -> None:
    # Each iteration has one or few texts, so that most of them wait when the process is killed.
    model = scripted_encoder(tmp_path / "model", {"step_seconds": 0.05}, **{"option.max_num_tokens": 64})
    with serving(model) as server:

        async def ask() -> list[Answer]:
            asked = [
                asyncio.create_task(exchange(server.port, {"input": text}, path="/v1/embeddings"))
                for text in TEXTS[:32]
            ]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            server.host().kill()
            return await asyncio.gather(*asked)

        vectors = vectors_of(asyncio.run(ask()))
        assert server.metric("executor_restarts_total") == 1
    assert np.allclose(vectors, [expected(tokens, text) for text in TEXTS[:32]], atol=1e-6)


def test_a_text_that_ends_engine_processes_ends_alone(tmp_path: Path, tokens: Tokenizer) -> None:
    fatal = "[MASK]"
    model = scripted_encoder(tmp_path / "model", {"fatal_token": tokens.raw.token_to_id(fatal)})
    with serving(model) as server:

        async def ask() -> list[Answer]:
            texts = (*TEXTS[:8], fatal, *TEXTS[8:16])
            return list(
                await asyncio.gather(*(exchange(server.port, {"input": text}, path="/v1/embeddings") for text in texts))
            )

        answers = asyncio.run(ask())
        guilty = answers.pop(8)
        assert guilty.status == 500
        assert np.allclose(vectors_of(answers), [expected(tokens, text) for text in TEXTS[:16]], atol=1e-6)
        again = post(server, "/v1/embeddings", {"input": fatal})
        assert 400 <= again.status < 500
