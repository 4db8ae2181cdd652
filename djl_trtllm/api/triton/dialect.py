"""Triton's HTTP API as a dialect: KServe v2 and the generate extension."""

from __future__ import annotations

from collections.abc import Sequence

from djl_trtllm.api.base import Call, Dialect, ModelContext, ModelStatus, RawRequest, Reply
from djl_trtllm.api.triton import description
from djl_trtllm.api.triton.content import read_body, read_object
from djl_trtllm.api.triton.errors import encode_error
from djl_trtllm.api.triton.generate import parse_generate
from djl_trtllm.api.triton.infer import parse_infer
from djl_trtllm.config import Options
from djl_trtllm.errors import InvalidRequestError

_MODEL = "/v2/models/{model}"
_VERSION = _MODEL + "/versions/{version}"
_LONGEST_INDEX_REQUEST = 65_536


class Triton(Dialect):
    """Requests, health, metadata, configuration, statistics and the index of the repository."""

    paths = tuple(
        model + "/" + verb for verb in ("generate", "generate_stream", "infer") for model in (_MODEL, _VERSION)
    )
    pages = (
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/stats",
        *(model + page for page in ("", "/ready", "/config", "/stats") for model in (_MODEL, _VERSION)),
    )
    actions = ("/v2/repository/index",)
    aliases = description.NAMES

    def page(self, request: RawRequest, models: Sequence[ModelStatus]) -> Reply:
        """Health is a status without a body, all else JSON."""
        path = request.path
        if path == "/v2":
            return Reply.json(description.server_metadata())
        if path == "/v2/health/live":
            return _health(True)
        if path == "/v2/health/ready" or path.endswith("/ready"):
            _check(request)
            return _health(bool(models) and all(model.ready for model in models))
        name = _check(request)
        if path.endswith("/stats"):
            return Reply.json(description.statistics(models, name))
        (model,) = models
        assert name is not None
        context = description.require_context(model)
        if path.endswith("/config"):
            return Reply.json(description.model_config(name, context))
        return Reply.json(description.model_metadata(name))

    def act(self, request: RawRequest, models: Sequence[ModelStatus]) -> Reply:
        """The index of the repository; with `ready` true, of the models that are ready."""
        body = read_body(request, _LONGEST_INDEX_REQUEST)
        given = read_object(body) if body.strip() else {}
        ready = given.get("ready", False)
        if type(ready) is not bool:
            raise InvalidRequestError("'ready' of the request for the index: expected true or false")
        return Reply.json(description.repository_index(models, ready_only=ready))

    def parse(self, request: RawRequest, model: ModelContext) -> Call:
        name = _check(request) or model.name
        description.check_takes_requests(name)
        return (parse_infer if request.path.endswith("/infer") else parse_generate)(request, model, name)

    def encode_error(self, error: BaseException, options: Options) -> Reply:
        return encode_error(error, options)


def _check(request: RawRequest) -> str | None:
    """The model that the path names, in a version that is there. Raises UnknownModelError."""
    name = request.parameters.get("model")
    if name is not None:
        description.check_version(request.parameters.get("version"), name)
    return name


def _health(good: bool) -> Reply:
    return Reply(200 if good else 400, "text/plain", b"")


TRITON = Triton()
