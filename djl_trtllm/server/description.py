"""The server's own paths as OpenAPI operations, and the page that shows the whole description.

The page is rendered here from `docs.html` beside this module: it needs no script and loads nothing from elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from djl_trtllm.api import Dialect, Operation, Reply
from djl_trtllm.api.openapi import OwnPath, document, resolved
from djl_trtllm.api.registry import DEFAULT
from djl_trtllm.api.schemas import INTEGER, STRING, list_of, members
from djl_trtllm.config import Options
from djl_trtllm.server.adapter_routes import PATHS as ADAPTER_PATHS
from djl_trtllm.server.model_routes import MODELS

_TEMPLATE = Path(__file__).with_name("docs.html")
_SECURITY = (("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),)
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
OPEN = ("/version", "/openapi.json", "/docs", "/ping", "/monitor", "/monitor/{file}")
"""The server's own paths that need no API key."""
_OBJECT = {"type": "object"}
_STATUS = {"application/json": members({"status": STRING})}
_REFUSED = {400: "The request is wrong, or the server does not do this", 404: "No model of that name"}
_NO_PAGE: dict[int, str] = {404: "The page is not shown to this client (option monitor)"}
_ADAPTER = members({"name": STRING, "src": STRING})
_MODEL = members({"modelName": STRING, "modelUrl": STRING, "status": STRING})
_MODELS = members({"models": list_of(_MODEL)}, optional={"nextPageToken": STRING})


def _json(summary: str, schema: Mapping[str, Any], **more: Any) -> Operation:
    return Operation(summary, responses={"application/json": schema}, **more)


def _adapter_operations(path: str) -> dict[tuple[str, str], Operation]:
    named = {"name": STRING, "src": STRING}
    refused: dict[str, Any] = {"errors": _REFUSED | {503: "The model is not ready"}}
    return {
        ("get", path): _json("The LoRA adapters", members({"adapters": list_of(_ADAPTER)}), **refused),
        ("post", path): Operation(
            "Register a LoRA adapter", bodies={"*/*": {}}, responses=_STATUS, query=named, **refused
        ),
        ("get", path + "/{adapter}"): _json("One LoRA adapter", _ADAPTER, **refused),
        ("delete", path + "/{adapter}"): Operation("Unregister a LoRA adapter", responses=_STATUS, **refused),
    }


_METRICS = Operation("Prometheus", responses={"text/plain": STRING, "application/openmetrics-text": STRING})

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("get", "/"): _json(
        "What this server is",
        members({"name": STRING, "version": STRING, "models": list_of(_OBJECT), "links": _OBJECT, "apis": _OBJECT}),
    ),
    ("get", "/version"): _json("The version of the server", members({"version": STRING})),
    ("get", "/openapi.json"): _json("This description", _OBJECT),
    ("get", "/docs"): Operation("This description as a page", responses={"text/html": STRING}),
    ("get", "/ping"): _json(
        "Whether every model of the start is ready",
        _OBJECT,
        errors={500: "A model has failed", 503: "A model is loading, recovering, shutting down or unregistered"},
    ),
    ("post", "/ping"): _json(
        "Whether every model of the start is ready",
        _OBJECT,
        errors={500: "A model has failed", 503: "A model is loading, recovering, shutting down or unregistered"},
    ),
    ("get", "/metrics"): _METRICS,
    ("get", "/prometheus/metrics"): _METRICS,
    ("get", "/monitor"): Operation(
        "The live page of requests, batch and latencies", responses={"text/html": STRING}, errors=_NO_PAGE
    ),
    ("get", "/monitor/{file}"): Operation("A file of that page", responses={"*/*": {}}, errors=_NO_PAGE),
    ("get", "/monitor/events"): Operation(
        "Snapshots for that page, as Server-Sent Events",
        responses={"text/event-stream": STRING},
        query={"model": STRING},
        errors=_NO_PAGE | {503: "Four pages watch already"},
    ),
    ("get", MODELS): _json(
        "The models",
        _MODELS,
        query={"limit": INTEGER, "next_page_token": STRING},
        errors={400: "The page is no number"},
    ),
    ("post", MODELS): Operation(
        "Register a model of the model store",
        bodies={"*/*": {}},
        responses=_STATUS,
        query={"url": STRING, "model_name": STRING, "min_worker": INTEGER, "synchronous": STRING},
        errors=_REFUSED
        | {202: "The model loads", 409: "A model has this name", 500: "It did not load", 507: "Out of memory"},
    ),
    ("get", MODELS + "/{model}"): _json(
        "One model and its workers", list_of(_OBJECT), errors={404: "No model of that name"}
    ),
    ("put", MODELS + "/{model}"): Operation(
        "Scale a model",
        responses=_STATUS,
        query={"min_worker": INTEGER, "max_worker": INTEGER},
        errors=_REFUSED | {409: "The model is not ready", 500: "A worker did not start"},
    ),
    ("delete", MODELS + "/{model}"): Operation(
        "Unregister a model", responses=_STATUS, errors=_REFUSED | {405: "The server has no model store"}
    ),
    **{key: operation for path in ADAPTER_PATHS for key, operation in _adapter_operations(path).items()},
}
"""By method and path."""


class Description:
    """The description of a server, made once when it is first asked for."""

    def __init__(self, dialects: Sequence[Dialect], options: Options, *, keys: bool = False) -> None:
        """`keys`: requests need an API key."""
        self._dialects = dialects
        self._keys = keys
        self._options = options
        self._replies: dict[str, Reply] = {}

    def document(self) -> Reply:
        """`/openapi.json`."""
        if "document" not in self._replies:
            self._replies["document"] = Reply.json(self._described())
        return self._replies["document"]

    def page(self) -> Reply:
        """`/docs`."""
        if "page" not in self._replies:
            html = _render(self._described())
            self._replies["page"] = Reply(200, "text/html; charset=utf-8", html.encode(), _SECURITY)
        return self._replies["page"]

    def _described(self) -> dict[str, Any]:
        own = [OwnPath(method, path, operation) for (method, path), operation in OPERATIONS.items()]
        described = document(self._dialects, own, self._options, DEFAULT)
        if self._keys:
            described["components"]["securitySchemes"] = _KEYS
            described["security"] = [{name: []} for name in _KEYS]
            for path in (*OPEN, *(path for dialect in self._dialects for path in dialect.health)):
                for operation in described["paths"][path].values():
                    operation["security"] = []
        return described


def _render(described: dict[str, Any]) -> str:
    from jinja2 import Environment  # a tenth of a second, and few servers are asked

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["type"] = lambda schema: type_of(resolved(described, schema))
    environment.filters["json"] = lambda value: orjson.dumps(value).decode()
    environment.filters["pretty"] = lambda value: orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
    environment.filters["resolved"] = lambda reference: resolved(described, reference)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(described=described, sections=_sections(described))


def _sections(described: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], list[dict[str, Any]]]]:
    """Each tag with its operations."""
    operations = [
        {"path": path, "method": method.upper(), **operation}
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    ]
    return [(tag, [each for each in operations if tag["name"] in each["tags"]]) for tag in described["tags"]]


def type_of(schema: Mapping[str, Any]) -> str:
    """A schema in a few words: `integer, 1 to 5, or null`."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(type_of(each) for each in schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(orjson.dumps(value).decode() for value in schema["enum"])
    if "const" in schema:
        return orjson.dumps(schema["const"]).decode()
    name = str(schema.get("type", "any value"))
    if name == "array":
        return f"list of {type_of(schema.get('items', {}))}"
    low, high = schema.get("minimum"), schema.get("maximum")
    above = schema.get("exclusiveMinimum")
    bounds = [f"at least {low:g}" if low is not None else "", f"above {above:g}" if above is not None else ""]
    bounds.append(f"at most {high}" if high is not None else "")
    return ", ".join([name, *filter(None, bounds)])
