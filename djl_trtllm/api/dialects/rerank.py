"""Reranking and scores of pairs: Cohere's, Jina's and vLLM's `rerank`, the one of Text Embeddings Inference, and vLLM's
`score`.

Sources: `vllm/entrypoints/pooling/scoring/protocol.py`; `router/src/http/types.rs` of Text Embeddings Inference, whose
`/rerank` has the same path as vLLM's: a body with `texts` is for this API. The best documents come first.
"""

import time
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import orjson

from djl_trtllm.api import base, parameters as kinds
from djl_trtllm.api.families import OpenAiLike
from djl_trtllm.api.openapi import read_operations
from djl_trtllm.api.parameters import IGNORED, Kind, Parameter, Problems, Table, read_object
from djl_trtllm.api.pooling import (
    COMMON,
    MOST_TEXTS,
    OF_HUGGING_FACE,
    TEXT_LIST,
    TEXTS,
    PooledEncoder,
    pooled,
    read_texts,
)
from djl_trtllm.request import new_hex_id


def _read_documents(value: Any) -> list[str]:
    """Texts, or Cohere's objects with a text."""
    if type(value) is not list or not 0 < len(value) <= MOST_TEXTS:
        raise ValueError("")
    return read_texts([item.get("text") if type(item) is dict else item for item in value])


_OBJECT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
_DOCUMENT = {"anyOf": [{"type": "string"}, _OBJECT]}
_DOCUMENTS = Kind(
    f'a list of up to {MOST_TEXTS} texts or objects {{"text": string}}',
    _read_documents,
    {"type": "array", "items": _DOCUMENT, "minItems": 1, "maxItems": MOST_TEXTS},
)
_ACTIVATE = Parameter(("use_activation", "activation"), kinds.BOOLEAN, "activate")

RERANK_FIELDS = Table(
    COMMON,
    (
        Parameter(("query",), kinds.TEXT, "query"),
        Parameter(("documents",), _DOCUMENTS, "documents"),
        Parameter(("top_n",), kinds.integer(0, 2**31 - 1), "top_n"),
        Parameter(("return_documents",), kinds.BOOLEAN, "return_documents"),
        _ACTIVATE,
        Parameter(("max_tokens_per_doc",), advice="send 'truncate_prompt_tokens', which counts the query too"),
    ),
    elsewhere={"text_1": "to /score", "text_2": "to /score"},
    required=("query", "documents"),
)
"""The body of `/v1/rerank`."""

TEXTS_FIELDS = Table(
    OF_HUGGING_FACE,
    (
        Parameter(("query",), kinds.TEXT, "query"),
        Parameter(("texts",), TEXT_LIST, "documents"),
        Parameter(("raw_scores",), kinds.BOOLEAN, "raw"),
        Parameter(("return_text",), kinds.BOOLEAN, "return_documents"),
        Parameter(("model",), kinds.TEXT, IGNORED),
    ),
    required=("query", "texts"),
)
"""The body of `/rerank` of Text Embeddings Inference."""

SCORE_FIELDS = Table(
    COMMON,
    (
        Parameter(("text_1", "queries", "data_1"), TEXTS, "first"),
        Parameter(("text_2", "documents", "items", "data_2"), TEXTS, "second"),
        _ACTIVATE,
        Parameter(("encoding_format",), neutral=("float",)),
    ),
    elsewhere={"query": "to /rerank"},
)
"""The body of `/score`."""


class RankEncoder(PooledEncoder):
    """Cohere's and vLLM's response: the best `top_n` documents, all if that is 0."""

    def __init__(self, documents: Sequence[str], model: str, top_n: int, *, shown: bool) -> None:
        super().__init__(len(documents))
        self._documents = documents
        self._model = model
        self._top_n = top_n or len(documents)
        self._shown = shown

    def ranked(self, results: Sequence[float]) -> list[int]:
        """The places of the best documents."""
        return sorted(range(len(results)), key=lambda place: -results[place])[: self._top_n]

    def body(self, results: Sequence[float]) -> bytes:
        found = [
            {"index": place, "relevance_score": results[place]}
            | ({"document": {"text": self._documents[place]}} if self._shown else {})
            for place in self.ranked(results)
        ]
        identifier = f"rerank-{new_hex_id()}"
        return orjson.dumps({"id": identifier, "model": self._model, "usage": self.usage, "results": found})


class TextRankEncoder(RankEncoder):
    """The response of Text Embeddings Inference: a list."""

    def body(self, results: Sequence[float]) -> bytes:
        return orjson.dumps(
            [
                {"index": place, "score": results[place]} | ({"text": self._documents[place]} if self._shown else {})
                for place in self.ranked(results)
            ]
        )


class ScoreEncoder(PooledEncoder):
    """vLLM's response to `/score`."""

    def __init__(self, count: int, model: str, created: int) -> None:
        super().__init__(count)
        self._model = model
        self._created = created

    def body(self, results: Sequence[float]) -> bytes:
        data = [{"index": place, "object": "score", "score": score} for place, score in enumerate(results)]
        head = {"id": f"score-{new_hex_id()}", "object": "list", "created": self._created}
        return orjson.dumps(head | {"model": self._model, "data": data, "usage": self.usage})


class Rerank(OpenAiLike):
    """`/v1/rerank`, `/v2/rerank` and `/rerank`, `/score` and `/v1/score`."""

    title = "Rerank and score"
    paths = ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score")
    tables = MappingProxyType(
        {
            **dict.fromkeys(("/v1/rerank", "/v2/rerank"), (RERANK_FIELDS,)),
            "/rerank": (RERANK_FIELDS, TEXTS_FIELDS),
            **dict.fromkeys(("/v1/score", "/score"), (SCORE_FIELDS,)),
        }
    )
    descriptions = read_operations("rerank.toml")

    def parse(self, request: base.RawRequest, model: base.ModelContext) -> base.Call:
        payload, problems = read_object(request, "query"), Problems.of(model.options)
        if request.path.endswith("/score"):
            return _parse_score(payload, model, problems)
        texts = request.path == "/rerank" and "documents" not in payload and "texts" in payload
        values = (TEXTS_FIELDS if texts else RERANK_FIELDS).read(payload, problems, "field")
        name = "texts" if texts else "documents"
        for needed, target in (("query", "query"), (name, "documents")):
            if target not in values and not problems.invalid:
                problems.invalid.append(f"'{needed}' is missing: expected a text as 'query', and '{name}'")
        if texts:  # scores are between 0 and 1 there, whatever the model's config.json says of others
            values["activate"] = not values.get("raw", False)
        documents: list[str] = values.get("documents", [])
        pairs = ((values["query"], each) for each in documents)
        requests = pooled("score", pairs, values, model, problems)
        kind = TextRankEncoder if texts else RankEncoder
        shown = values.get("return_documents", not texts)
        return base.Call(requests, kind(documents, model.name, values.get("top_n", 0), shown=shown), problems.headers)


def _parse_score(payload: dict[str, Any], model: base.ModelContext, problems: Problems) -> base.Call:
    values = SCORE_FIELDS.read(payload, problems, "field")
    first, second = values.get("first", []), values.get("second", [])
    if not problems.invalid and (not first or not second or len(first) not in (1, len(second))):
        problems.invalid.append(
            f"'text_1' has {len(first)} texts and 'text_2' {len(second)}: expected one as 'text_1', or as many as "
            "'text_2' has"
        )
    pairs = zip(first * len(second) if len(first) == 1 else first, second, strict=True)
    requests = pooled("score", pairs, values, model, problems)
    return base.Call(requests, ScoreEncoder(len(requests), model.name, int(time.time())), problems.headers)


RERANK = Rerank()
