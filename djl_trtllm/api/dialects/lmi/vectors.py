"""`{"inputs": text or texts}` to a model that embeds: a vector, or a list of them.

As DJL's `TextEmbeddingServingTranslator` answers, which LMI's containers run (Text Embedding User Guide).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from djl_trtllm.api import base
from djl_trtllm.api import parameters as kinds
from djl_trtllm.api.parameters import IGNORED, Parameter, Problems, Table
from djl_trtllm.api.pooling import TEXTS, VectorsEncoder, embeddings

FIELDS = Table(
    (
        Parameter(("inputs",), TEXTS, "texts"),
        Parameter(("parameters",), neutral=({},), advice="embeddings have none"),
        Parameter(("model",), kinds.TEXT, IGNORED),
    ),
    required=("inputs",),
)
"""The body."""


def parse(payload: Mapping[str, Any], model: base.ModelContext) -> base.Call:
    """Read a body. Raises InvalidRequestError."""
    problems = Problems.of(model.options)
    values = FIELDS.read(payload, problems, "field")
    problems.raise_any()
    requests = embeddings(values["texts"])
    encoder = VectorsEncoder(len(requests), single=type(payload["inputs"]) is str)
    return base.Call(requests, encoder, problems.headers)
