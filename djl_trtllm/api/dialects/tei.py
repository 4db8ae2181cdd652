"""The API of Text Embeddings Inference: `/embed`. Its `/rerank` has the address of vLLM's (`rerank.py`).

Source: `router/src/http/types.rs` and `server.rs`. Clients are LlamaIndex's `TextEmbeddingsInference` and
huggingface_hub's `feature_extraction`.
"""

from types import MappingProxyType

from djl_trtllm import errors
from djl_trtllm.api import base
from djl_trtllm.api import parameters as kinds
from djl_trtllm.api.families import HuggingFaceLike
from djl_trtllm.api.openapi import read_operations
from djl_trtllm.api.parameters import IGNORED, Parameter, Problems, Table, read_object
from djl_trtllm.api.pooling import (
    DIMENSIONS,
    OF_HUGGING_FACE,
    TEXTS,
    VectorsEncoder,
    pooled,
)

FIELDS = Table(
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
    tables = dict.fromkeys(paths, (FIELDS,))
    descriptions = read_operations("tei.toml")

    def parse(self, request: base.RawRequest, model: base.ModelContext) -> base.Call:
        payload, problems = read_object(request, "inputs"), Problems.of(model.options)
        values = FIELDS.read(payload, problems, "field")
        if "texts" not in values and not problems.invalid:
            problems.invalid.append("'inputs' is missing: expected a text or a list of texts")
        requests = pooled("embed", values.get("texts", ()), {"activate": True, **values}, model, problems)
        return base.Call(requests, VectorsEncoder(len(requests)), problems.headers)


TEI = Tei()
