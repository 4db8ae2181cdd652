"""Truss's API as a dialect."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from djl_trtllm.api.base import Call, Dialect, ModelContext, ModelStatus, Operation, RawRequest, Reply
from djl_trtllm.api.schemas import STRING, members
from djl_trtllm.api.truss.errors import encode_error
from djl_trtllm.api.truss.parse import FIELDS, parse
from djl_trtllm.config import Options
from djl_trtllm.errors import NotReadyError

_PREDICT = Operation(
    "Generate from a prompt: raw text as it comes, or `text` at the end if `stream` is false",
    responses={"application/octet-stream": STRING, "application/json": members({"text": STRING})},
    example={"prompt": "The wolf", "max_tokens": 16},
)


class Truss(Dialect):
    """`:predict` of a Truss server, and `/predict` of Baseten's gateway. The model's name in a Truss is `model`."""

    paths = ("/v1/models/{model}:predict", "/predict")
    pages = ("/v1/models/{model}/loaded",)
    health = frozenset(pages)
    aliases = frozenset({"model"})
    tables = dict.fromkeys(paths, (FIELDS,))
    descriptions = MappingProxyType(
        {
            **dict.fromkeys(paths, _PREDICT),
            "GET /v1/models/{model}/loaded": Operation(
                "Whether the model is ready", responses={"application/json": members({})}
            ),
        }
    )

    def page(self, request: RawRequest, models: Sequence[ModelStatus]) -> Reply:
        """An empty object when the model is ready."""
        for model in models:
            if not model.ready:
                raise NotReadyError(f"Model with name {model.name} is not ready.")
        return Reply.json({})

    def parse(self, request: RawRequest, model: ModelContext) -> Call:
        return parse(request, model.options)

    def encode_error(self, error: BaseException, options: Options) -> Reply:
        return encode_error(error, options)


TRUSS = Truss()
