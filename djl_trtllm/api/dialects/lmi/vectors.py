"""`{"inputs": text or texts}` to a model that embeds: a vector, or a list of them.

As DJL's `TextEmbeddingServingTranslator` answers, which LMI's containers run (Text Embedding User Guide).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from djl_trtllm.api import base
from djl_trtllm.api import parameters as kinds
from djl_trtllm.api.parameters import IGNORED, Parameter, Problems, Table
from djl_trtllm.api.pooling import TEXTS, PooledEncoder, embeddings, joined, vector_json

FIELDS = Table(
    (
        Parameter(("inputs",), TEXTS, "texts"),
        Parameter(("parameters",), neutral=({},), advice="embeddings have none"),
        Parameter(("model",), kinds.TEXT, IGNORED),
    ),
    required=("inputs",),
)
"""The body."""


class VectorsEncoder(PooledEncoder[bytes]):
    """The vectors; `single`: the only one, without a list around it."""

    def __init__(self, count: int, *, single: bool) -> None:
        super().__init__(count)
        self._single = single

    def read(self, vector: bytes, number: int) -> bytes:
        return vector_json(vector)

    def body(self, results: Sequence[bytes]) -> bytes:
        return results[0] if self._single else joined(b"[", results, b"]")


def parse(payload: Mapping[str, Any], model: base.ModelContext) -> base.Call:
    """Read a body. Raises InvalidRequestError."""
    problems = Problems.of(model.options)
    values = FIELDS.read(payload, problems, "field")
    problems.raise_any()
    requests = embeddings(values["texts"])
    encoder = VectorsEncoder(len(requests), single=type(payload["inputs"]) is str)
    return base.Call(requests, encoder, problems.headers)
