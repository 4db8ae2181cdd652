"""TGI's API as a dialect."""

from __future__ import annotations

from collections.abc import Sequence

from djl_trtllm.api.base import Call, Dialect, ModelContext, ModelStatus, RawRequest, Reply
from djl_trtllm.api.tgi.errors import encode_error
from djl_trtllm.api.tgi.parse import parse
from djl_trtllm.config import Options
from djl_trtllm.errors import NotReadyError, UnknownModelError
from djl_trtllm.version import __version__


class Tgi(Dialect):
    """`/generate`, `/generate_stream`, and `POST /`, which is either; `/info` and `/health`."""

    paths = ("/generate", "/generate_stream", "/")
    pages = ("/info", "/health")

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
                "max_total_tokens": options.max_seq_len,
                "router": "djl-trtllm",
                "version": __version__,
            }
        )

    def parse(self, request: RawRequest, model: ModelContext) -> Call:
        return parse(request, model.options)

    def encode_error(self, error: BaseException, options: Options) -> Reply:
        return encode_error(error, options)


TGI = Tgi()
