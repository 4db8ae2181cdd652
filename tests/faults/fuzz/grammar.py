"""Makes requests from the parameter tables of every dialect. Every one follows from the seed."""

from __future__ import annotations

import enum
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from djl_trtllm.api.registry import DIALECTS
from djl_trtllm.api.triton.protocol import ModelInferRequest, methods
from tests.faults.fuzz.damage import damaged
from tests.support.client import raw_post

MODEL = "scripted"
_PLACES = {"model": MODEL, "version": "1", "endpoint": "e", "component": "c", "name": MODEL, "region": "r"}
_WORDS = ("wolf", "", "\0", "🦊", "\\", '"', "[[[", "</s>", "null", "-1", "1e999", "../x")
_LONG = "a" * 3000
_LEAVES: tuple[Any, ...] = (None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, *_WORDS, *_WORDS)
_MEMBERS = (*_WORDS, "type", "json", "function", "name", "text")
_HEADERS = (
    "Accept: text/event-stream",
    "Content-Type: text/plain",
    "Content-Type: application/octet-stream",
    "Content-Encoding: gzip",
    "Inference-Header-Content-Length: 5",
    "X-Amzn-SageMaker-Custom-Attributes: content-length=9;a=b",
    "X-Amzn-SageMaker-Session-Id: NEW_SESSION",
    "X-Amzn-SageMaker-Target-Model: x.tar.gz",
    "X-Request-Id: \t\x7f",
    "Accept-Encoding: gzip",
)
_FRAMING = (
    "Transfer-Encoding: chunked",
    "Transfer-Encoding: gzip, chunked",
    "Content-Length: 3",
    "Content-Length: +5",
    "Content-Length: 99999999999999999999",
    "Expect: 100-continue",
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x",
    "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
    "Host: a\r\nHost: b",
    " folded: yes",
    "X:\r\n Y",
    ": no name",
    "X" * 3000 + ": " + "y" * 3000,
)
_METHODS = ("GET", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW")
_OTHER_PATHS = ("/ping", "/metrics", "/openapi.json", "/models", f"/models/{MODEL}", "/adapters", "/nowhere", "/%00")
_TENSORS = ("BYTES", "INT32", "INT64", "UINT64", "FP32", "FP64", "BOOL", "INT33", "")
_SHAPES: tuple[Any, ...] = ([1, 1], [1, 1], [1], [-1, 1], [2**31 - 1, 2**31 - 1], [])
_MORE = 4
"""How far above its smallest value a number goes that fits: the engine is not what is looked at."""


class Way(enum.Enum):
    """How a request is sent: over HTTP with whole heads, as bytes whose heads are damaged too, a message, a call."""

    HTTP = enum.auto()
    RAW = enum.auto()
    WEBSOCKET = enum.auto()
    GRPC = enum.auto()
    GRPC_STREAM = enum.auto()


@dataclass(frozen=True)
class Made:
    """A request. `target` is a path, or a method of gRPC; `data` what goes over the connection."""

    way: Way
    target: str
    data: bytes


@dataclass(frozen=True)
class _Target:
    """A path, and the JSON schemas of the members of its bodies and of their `parameters`."""

    path: str
    members: Mapping[str, Any]
    parameters: Mapping[str, Any]


def targets() -> list[list[_Target]]:
    """Every path that takes a body, by dialect."""
    return [
        [
            target
            for path in (*dialect.paths, *dialect.actions)
            for target in _of_path(_filled(path), dialect.tables.get(path, ()))
        ]
        for dialect in DIALECTS
    ]


def _of_path(path: str, tables: Any) -> Iterator[_Target]:
    for schema in [table.schema() for table in tables] or [{}]:
        members = dict(schema.get("properties", {}))
        inner = members.pop("parameters", {})
        parameters = {
            name: member for part in inner.get("anyOf", [inner]) for name, member in part.get("properties", {}).items()
        }
        yield _Target(path, members, parameters)


def _filled(path: str) -> str:
    for name, value in _PLACES.items():
        path = path.replace(f"{{{name}}}", value)
    return path


class Grammar:
    """An endless source of requests."""

    def __init__(self, seed: int) -> None:
        self._source = random.Random(seed)
        self._targets = targets()
        self._pages = [_filled(page) for dialect in DIALECTS for page in dialect.pages] + list(_OTHER_PATHS)
        tensors = [target for targets in self._targets for target in targets if target.path.endswith("/generate")]
        self._tensors = next(target.members for target in tensors if "text_input" in target.members)
        self._methods = [method.name for method in methods() if method.name not in ("ModelInfer", "ModelStreamInfer")]

    def request(self) -> Made:
        """The next one."""
        kind = self._source.random()
        if kind < 0.02:
            return Made(Way.WEBSOCKET, "/invocations-bidirectional-stream", self._post()[1])
        if kind < 0.06:
            return self._call()
        if kind < 0.11:
            return self._raw()
        if kind < 0.16:
            return self._other()
        path, body, headers = self._post()
        return Made(Way.HTTP, path, raw_post(body, *headers, path=path))

    # -- ways ----------------------------------------------------------------------------------------------------------

    def _post(self) -> tuple[str, bytes, list[str]]:
        source = self._source
        target = source.choice(source.choice(self._targets))
        body = json.dumps(self._body(target)).encode()
        if source.random() < 0.2:
            body = damaged(source, body)
        return target.path, body, [source.choice(_HEADERS)] if source.random() < 0.2 else []

    def _other(self) -> Made:
        """Other methods, and pages with queries."""
        source = self._source
        path = source.choice(self._pages)
        if source.random() < 0.3:
            path += source.choice(("?", "/", "%2e%2e", "?a=%ff", "?name=\x7f", "/../ping", "?" + "x=y&" * 500))
        data = raw_post(self._post()[1] if source.random() < 0.2 else b"", path=path)
        return Made(Way.HTTP, path, data.replace(b"POST", source.choice(_METHODS).encode(), 1))

    def _raw(self) -> Made:
        source = self._source
        path, body, headers = self._post()
        headers += source.sample(_FRAMING, source.randrange(3))
        source.shuffle(headers)
        data = raw_post(body, *headers, path=path, version=source.choice(("1.1", "1.0", "2.0", "", "9" * 300)))
        return Made(Way.RAW, path, damaged(source, data))

    def _call(self) -> Made:
        source = self._source
        message = ModelInferRequest(model_name=source.choice((MODEL, "ensemble", "", "../x")), id="7")
        for tensor in self._inputs():
            made = message.inputs.add(name=tensor["name"], datatype=tensor["datatype"])
            made.shape.extend(size for size in tensor["shape"] if -(2**63) <= size < 2**63)
            message.raw_input_contents.append(_raw_tensor(tensor["data"][0]))
        data = message.SerializeToString()
        if source.random() < 0.3:
            data = damaged(source, data)
        kind = source.random()
        if kind < 0.4:
            return Made(Way.GRPC_STREAM, "ModelStreamInfer", data)
        return Made(Way.GRPC, "ModelInfer" if kind < 0.8 else source.choice(self._methods), data)

    # -- bodies --------------------------------------------------------------------------------------------------------

    def _body(self, target: _Target) -> Any:
        source = self._source
        if source.random() < 0.05:
            return self._value(0)
        if target.path.endswith("/infer"):
            return {"inputs": self._inputs()}
        text = source.choice(("the wolf", "the wolf", source.choice(_WORDS)))
        role = source.choice(("user", "user", "user", "system", "tool", ""))
        usual: dict[str, Any] = {
            "inputs": text,
            "prompt": text,
            "text_input": text,
            "messages": [{"role": role, "content": text}],
        }
        body = {name: value for name, value in usual.items() if name in target.members}
        if "messages" in body:
            body.pop("prompt", None)
        body |= self._some(target.members) | self._limit(target.members)
        if target.parameters and source.random() < 0.8:
            body["parameters"] = self._some(target.parameters) | self._limit(target.parameters)
        if source.random() < 0.02:
            body[source.choice(_MEMBERS)] = _LONG
        return body

    def _limit(self, members: Mapping[str, Any]) -> dict[str, Any]:
        known = [name for name in ("max_new_tokens", "max_tokens") if name in members]
        return {name: self._source.choice((3, 3, 3, 1, 0, None)) for name in known[:1]}

    def _some(self, members: Mapping[str, Any]) -> dict[str, Any]:
        """Some of these members. Half of the bodies have only values that fit."""
        source = self._source
        wrong = source.choice((0.0, 0.3))
        return {
            name: self._value(0) if source.random() < wrong else self._fitting(members[name])
            for name in source.sample(list(members), min(len(members), source.randrange(4)))
        }

    def _inputs(self) -> list[dict[str, Any]]:
        source = self._source
        values = {"text_input": "the wolf", "max_tokens": 3} | self._some(self._tensors)
        return [
            {
                "name": name,
                "shape": source.choice(_SHAPES) if source.random() < 0.1 else [1, 1],
                "datatype": source.choice(_TENSORS) if source.random() < 0.1 else _datatype(value),
                "data": [value],
            }
            for name, value in values.items()
        ]

    def _fitting(self, schema: Mapping[str, Any]) -> Any:
        """A value of this schema, or almost."""
        source = self._source
        if parts := schema.get("anyOf"):
            return self._fitting(source.choice(parts))
        if values := schema.get("enum"):
            return source.choice(values)
        match schema.get("type"):
            case "string":
                return source.choice(_WORDS) or "wolf"
            case "integer":
                least = schema.get("minimum", -1)
                return source.randint(least, min(schema.get("maximum", least + _MORE), least + _MORE))
            case "number":
                least = schema.get("minimum", schema.get("exclusiveMinimum", 0))
                return min(least + source.random() * _MORE, schema.get("maximum", least + _MORE))
            case "boolean":
                return source.random() < 0.5
            case "array":
                return [self._fitting(schema.get("items", {})) for _ in range(source.randrange(3))]
            case "object":
                return self._some(schema.get("properties", {}))
            case "null":
                return None
        return self._value(1)

    def _value(self, depth: int) -> Any:
        source = self._source
        kind = source.random()
        if depth > 4 or kind < 0.6:
            return source.choice(_LEAVES)
        count = source.choice((0, 1, 2, 3, 70 if depth < 2 else 4))
        if kind < 0.8:
            return [self._value(depth + 1)] * count
        return {source.choice(_MEMBERS): self._value(depth + 1)}


def _datatype(value: Any) -> str:
    return {bool: "BOOL", int: "INT32", float: "FP32"}.get(type(value), "BYTES")


def _raw_tensor(value: Any) -> bytes:
    if isinstance(value, bool):
        return bytes([value])
    if isinstance(value, int):
        return (value % 2**32).to_bytes(4, "little")
    text = str(value).encode()
    return len(text).to_bytes(4, "little") + text
