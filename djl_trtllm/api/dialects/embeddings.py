"""Vectors of texts: OpenAI's `/v1/embeddings`, and `/embed` of Text Embeddings Inference.

OpenAI's has the parameters that vLLM adds (`vllm/entrypoints/pooling/embed/protocol.py`). The source of the other is
`router/src/http/types.rs` and `server.rs`; its clients are LlamaIndex's `TextEmbeddingsInference` and huggingface_hub's
`feature_extraction`. Its `/rerank` has the address of vLLM's (`rerank.py`).
"""

from base64 import b64encode
from collections.abc import Sequence
from types import MappingProxyType

import orjson

from djl_trtllm import errors
from djl_trtllm.api import base, parameters as kinds
from djl_trtllm.api.families import OPENAI_PREFIXES, HuggingFaceLike, OpenAiLike
from djl_trtllm.api.openapi import read_operations
from djl_trtllm.api.parameters import IGNORED, Parameter, Problems, Table, read_object
from djl_trtllm.api.pooling import (
    COMMON,
    DIMENSIONS,
    MOST_TEXTS,
    OF_HUGGING_FACE,
    TEXTS,
    PooledEncoder,
    VectorsEncoder,
    joined,
    pooled,
    vector_json,
)

_INPUT = kinds.TextsOrIds("input", MOST_TEXTS, empty=True)


FIELDS = Table(
    COMMON,
    (
        Parameter(("input",), _INPUT.kind, IGNORED),
        Parameter(("encoding_format",), kinds.one_of('"float" or "base64"', "float", "base64"), "format"),
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


class EmbeddingsEncoder(PooledEncoder):
    """OpenAI's response: `format` is float or base64 (of little-endian float32)."""

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


class Embeddings(OpenAiLike):
    """`/v1/embeddings`."""

    title = "OpenAI embeddings"
    paths = tuple(f"{prefix}/embeddings" for prefix in OPENAI_PREFIXES)
    tables = MappingProxyType(dict.fromkeys(paths, (FIELDS,)))
    descriptions = MappingProxyType(dict.fromkeys(paths, read_operations("embeddings.toml")["embed"]))

    def parse(self, request: base.RawRequest, model: base.ModelContext) -> base.Call:
        payload, problems = read_object(request, "input"), Problems.of(model.options)
        values = FIELDS.read(payload, problems, "field")
        texts = _INPUT.read(payload, model.tokenizer.vocab_size, problems)
        requests = pooled("embed", texts, values, model, problems)
        encoder = EmbeddingsEncoder(len(requests), model.name, values.get("format", "float"))
        return base.Call(requests, encoder, problems.headers)


EMBEDDINGS = Embeddings()


TEI_FIELDS = Table(
    OF_HUGGING_FACE,
    (
        Parameter(("inputs",), TEXTS, "texts"),
        Parameter(("normalize",), kinds.BOOLEAN, "activate"),
        DIMENSIONS,
        Parameter(("prompt_name",), advice="put the prompt before the text"),
        Parameter(("model",), kinds.TEXT, IGNORED),
    ),
    required=("inputs",),
)
"""The body of `/embed`."""


class Tei(HuggingFaceLike):
    """`/embed`."""

    title = "Text Embeddings Inference (TEI)"
    paths = ("/embed",)
    statuses = MappingProxyType({**HuggingFaceLike.statuses, errors.UnsupportedTaskError: 424})
    tables = dict.fromkeys(paths, (TEI_FIELDS,))
    descriptions = read_operations("tei.toml")

    def parse(self, request: base.RawRequest, model: base.ModelContext) -> base.Call:
        payload, problems = read_object(request, "inputs"), Problems.of(model.options)
        values = TEI_FIELDS.read(payload, problems, "field")
        if "texts" not in values and not problems.invalid:
            problems.invalid.append("'inputs' is missing: expected a text or a list of texts")
        requests = pooled("embed", values.get("texts", ()), {"activate": True, **values}, model, problems)
        return base.Call(requests, VectorsEncoder(len(requests)), problems.headers)


TEI = Tei()
