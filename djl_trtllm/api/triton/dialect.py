"""Triton's HTTP API as a dialect: KServe v2 and the generate extension."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from djl_trtllm.api.base import Call, Dialect, ModelContext, ModelStatus, Operation, RawRequest, Reply
from djl_trtllm.api.parameters import show
from djl_trtllm.api.schemas import EVENTS, STRING, Schema, list_of, members
from djl_trtllm.api.triton import description, refusals
from djl_trtllm.api.triton.content import read_body, read_object
from djl_trtllm.api.triton.errors import encode_error
from djl_trtllm.api.triton.generate import parse_generate
from djl_trtllm.api.triton.infer import parse_infer
from djl_trtllm.api.triton.inputs import GENERATE_FIELDS
from djl_trtllm.config import Options
from djl_trtllm.errors import InvalidRequestError, UnsupportedParameterError

_MODEL = "/v2/models/{model}"
_VERSION = _MODEL + "/versions/{version}"
_MODELS = (_MODEL, _VERSION)
_LONGEST_INDEX_REQUEST = 65_536

_OBJECT: Schema = {"type": "object"}
_EXAMPLE = {"text_input": "The wolf", "max_tokens": 16}
_INFER = members(
    {"inputs": list_of({**_OBJECT, "required": ["name", "shape", "datatype"]})},
    optional={"id": STRING, "outputs": {}, "parameters": {}},
)
_INFER_EXAMPLE = {
    "inputs": [
        {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["The wolf"]},
        {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [16]},
    ]
}
_REQUESTS = {
    "generate": Operation("Generate, as one JSON object", responses={"application/json": _OBJECT}, example=_EXAMPLE),
    "generate_stream": Operation(
        "Generate, as server-sent events", responses={"text/event-stream": EVENTS}, example=_EXAMPLE
    ),
    "infer": Operation(
        "Generate from tensors, as JSON or as bytes after the JSON",
        bodies={"application/json": _INFER, "application/octet-stream": {}},
        responses={"application/json": _OBJECT, "application/octet-stream": STRING},
        example=_INFER_EXAMPLE,
    ),
}
_PAGES = {
    "/v2": "The server",
    "/v2/models/stats": "Statistics of all models",
    "": "The inputs and outputs of a model",
    "/config": "The configuration of a model",
    "/stats": "Statistics of a model",
}
_HEALTH = {"/v2/health/live": "Whether the server runs", "/v2/health/ready": "Whether every model is ready"}


def _page(path: str) -> Operation:
    """What the description says of a page."""
    name = path.removeprefix(_VERSION).removeprefix(_MODEL)
    if name in _PAGES:
        return Operation(_PAGES[name], responses={"application/json": _OBJECT})
    summary = _HEALTH.get(name, "Whether the model is ready")
    return Operation(summary, responses={"text/plain": STRING}, errors={400: "It is not"})


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
        *refusals.PAGES,
    )
    health = frozenset(page for page in pages if page.endswith(("/live", "/ready")))
    actions = ("/v2/repository/index", *refusals.ACTIONS)
    aliases = description.NAMES
    tables = MappingProxyType(
        {f"{model}/{verb}": (GENERATE_FIELDS,) for verb in ("generate", "generate_stream") for model in _MODELS}
    )
    descriptions = MappingProxyType(
        {
            **{f"{model}/{verb}": operation for verb, operation in _REQUESTS.items() for model in _MODELS},
            **{f"GET {path}": _page(path) for path in pages},
            **{f"GET {path}": refusals.DESCRIPTION for path in refusals.PAGES},
            **dict.fromkeys(refusals.ACTIONS, refusals.DESCRIPTION),
            "/v2/repository/index": Operation(
                "The models of the repository",
                bodies={"application/json": members({}, optional={"ready": {"type": "boolean"}})},
                responses={"application/json": list_of(_OBJECT)},
                example={"ready": True},
            ),
        }
    )

    def page(self, request: RawRequest, models: Sequence[ModelStatus]) -> Reply:
        """Health is a status without a body, all else JSON."""
        path = request.path
        if path in refusals.PAGES:
            raise UnsupportedParameterError(refusals.PAGES[path])
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
        if request.path in refusals.ACTIONS:
            raise UnsupportedParameterError(refusals.ACTIONS[request.path])
        body = read_body(request, _LONGEST_INDEX_REQUEST)
        given = read_object(body) if body else {}
        if unknown := sorted(given.keys() - {"ready"}):
            raise InvalidRequestError(
                f"unknown member {show(unknown[0])} of the request for the index: expected 'ready'"
            )
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
