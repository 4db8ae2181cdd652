"""OpenAI's embeddings, with the parameters that vLLM adds (`vllm/entrypoints/pooling/embed/protocol.py`)."""

from base64 import b64encode
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import orjson

from djl_trtllm.api import base
from djl_trtllm.api import parameters as kinds
from djl_trtllm.api.choices import OpenAiLike
from djl_trtllm.api.front_end import OPENAI_PREFIXES
from djl_trtllm.api.openapi import read_operations
from djl_trtllm.api.parameters import IGNORED, Kind, Parameter, Problems, Table, found, read_object, show
from djl_trtllm.api.pooling import (
    COMMON,
    DIMENSIONS,
    MOST_TEXTS,
    PooledEncoder,
    embeddings,
    joined,
    kept_tokens,
    vector_json,
)

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_INPUT = Kind(
    f"a text, a list of token ids, or a list of up to {MOST_TEXTS} of either",
    lambda value: value,
    {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MOST_TEXTS},
            _IDS,
            {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MOST_TEXTS},
        ]
    },
)


def _format(value: Any) -> str:
    if value not in ("float", "base64"):
        raise ValueError("")
    return str(value)


FIELDS = Table(
    COMMON,
    (
        Parameter(("input",), _INPUT, IGNORED),
        Parameter(("encoding_format",), Kind('"float" or "base64"', _format, {"enum": ["float", "base64"]}), "format"),
        DIMENSIONS,
        # vLLM's present name and its earlier one.
        Parameter(("use_activation", "normalize"), kinds.BOOLEAN, "activate"),
        Parameter(("embed_dtype",), neutral=("float32",)),
        Parameter(("endianness",), neutral=("native", "little")),
    ),
    elsewhere={"messages": "to a model that generates text"},
    required=("input",),
)
"""The body of `/v1/embeddings`."""


class EmbeddingsEncoder(PooledEncoder[bytes]):
    """OpenAI's response: `format` is float or base64 (of float32, in the order of bytes of x86 and Arm)."""

    def __init__(self, count: int, model: str, format_: str) -> None:
        super().__init__(count)
        self._model = model
        self._base64 = format_ == "base64"

    def read(self, vector: bytes, number: int) -> bytes:
        shown = b'"%b"' % b64encode(vector) if self._base64 else vector_json(vector)
        return b'{"object":"embedding","index":%d,"embedding":%b}' % (number, shown)

    def body(self, results: Sequence[bytes]) -> bytes:
        rest = orjson.dumps({"model": self._model, "usage": self.usage})
        return joined(b'{"object":"list","data":[', results, b"]," + rest[1:])


def _read_texts(value: Any, model: base.ModelContext, problems: Problems) -> list[str | list[int]]:
    """One text or several, each as text or as token ids."""
    expected = f"expected a text, a list of token ids, or a list of up to {MOST_TEXTS} of either"
    items = [value] if type(value) is str or (type(value) is list and value and type(value[0]) is int) else value
    if type(items) is not list or not 0 < len(items) <= MOST_TEXTS:
        problems.invalid.append(f"'input' {found(value)}: {expected}")
        return []
    size = model.tokenizer.vocab_size
    for item in items:
        if type(item) is str:
            continue
        if type(item) is not list or not item or not all(type(id_) is int and 0 <= id_ < size for id_ in item):
            problems.invalid.append(f"'input' has {show(item)}: {expected}, with ids of 0 to {size - 1}")
            return []
    return items


class Embeddings(OpenAiLike):
    """`/v1/embeddings`."""

    title = "OpenAI embeddings"
    paths = tuple(f"{prefix}/embeddings" for prefix in OPENAI_PREFIXES)
    tables = MappingProxyType(dict.fromkeys(paths, (FIELDS,)))
    descriptions = MappingProxyType(dict.fromkeys(paths, read_operations("embeddings.toml")["embed"]))

    def parse(self, request: base.RawRequest, model: base.ModelContext) -> base.Call:
        payload, problems = read_object(request, "input"), Problems.of(model.options)
        values = FIELDS.read(payload, problems, "field")
        texts = _read_texts(payload.get("input"), model, problems)
        truncate = kept_tokens(values, model, problems)
        problems.raise_any()
        requests = embeddings(
            texts, truncate=truncate, activate=values.get("activate"), dimensions=values.get("dimensions")
        )
        encoder = EmbeddingsEncoder(len(requests), model.name, values.get("format", "float"))
        return base.Call(requests, encoder, problems.headers)


EMBEDDINGS = Embeddings()
