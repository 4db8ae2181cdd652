"""TGI's API as a dialect."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from djl_trtllm.api.base import Call, Dialect, ModelContext, ModelStatus, Operation, RawRequest, Reply
from djl_trtllm.api.schemas import EVENTS, INTEGER, NULL, STRING, list_of, members
from djl_trtllm.api.tgi.errors import encode_error
from djl_trtllm.api.tgi.parse import FIELDS, parse
from djl_trtllm.config import Options
from djl_trtllm.errors import NotReadyError, UnknownModelError
from djl_trtllm.version import __version__

_GENERATED = members({"generated_text": STRING}, optional={"details": {"type": "object"}})
_EXAMPLE = {"inputs": "The wolf", "parameters": {"max_new_tokens": 16}}
_INFO = members(
    {
        "model_id": STRING,
        "model_sha": NULL,
        "model_pipeline_tag": STRING,
        "max_concurrent_requests": INTEGER,
        "max_best_of": INTEGER,
        "max_stop_sequences": INTEGER,
        "max_input_tokens": INTEGER,
        "max_total_tokens": INTEGER,
        "router": STRING,
        "version": STRING,
    }
)


class Tgi(Dialect):
    """`/generate`, `/generate_stream`, and `POST /`, which is either; `/info` and `/health`."""

    paths = ("/generate", "/generate_stream", "/")
    pages = ("/info", "/health")
    health = frozenset({"/health"})
    tables = dict.fromkeys(paths, (FIELDS,))
    descriptions = MappingProxyType(
        {
            "/generate": Operation(
                "Generate from a prompt", responses={"application/json": _GENERATED}, example=_EXAMPLE
            ),
            "/generate_stream": Operation(
                "Generate from a prompt as server-sent events",
                responses={"text/event-stream": EVENTS},
                example=_EXAMPLE,
            ),
            "/": Operation(
                "Generate from a prompt, whole or with `stream` as server-sent events",
                responses={"application/json": list_of(_GENERATED), "text/event-stream": EVENTS},
                example=_EXAMPLE,
            ),
            "GET /info": Operation("The model and its limits", responses={"application/json": _INFO}),
            "GET /health": Operation(
                "Whether every model is ready", responses={"text/plain": STRING}, errors={503: "A model is not ready"}
            ),
        }
    )

    def page(self, request: RawRequest, models: Sequence[ModelStatus]) -> Reply:
        """`/health` is 200 with an empty body when every model is ready; `/info` describes the only model."""
        if request.path == "/health":
            if models and all(model.ready for model in models):
                return Reply(200, "text/plain", b"")
            return Reply.json({"error": "unhealthy", "error_type": "healthcheck"}, 503)
        if len(models) != 1:
            names = ", ".join(model.name for model in models) or "none"
            raise UnknownModelError(f"/info describes the only model; loaded: {names}", name=None)
        (model,) = models
        if model.context is None:
            raise NotReadyError(f"model {model.name} is still loading", retry_after=10)
        options = model.context.options
        return Reply.json(
            {
                "model_id": model.name,
                "model_sha": None,
                "model_pipeline_tag": "text-generation",
                "max_concurrent_requests": options.job_queue_size,
                "max_best_of": 16,
                "max_stop_sequences": 64,
                "max_input_tokens": options.max_input_len,
                "max_total_tokens": model.context.max_seq_len,
                "router": "djl-trtllm",
                "version": __version__,
            }
        )

    def parse(self, request: RawRequest, model: ModelContext) -> Call:
        return parse(request, model.options)

    def encode_error(self, error: BaseException, options: Options) -> Reply:
        return encode_error(error, options)


TGI = Tgi()
