"""The OpenAPI description of a server: made from what each dialect says of itself, and from its replies to errors.

A dialect describes its paths with `tables` and `descriptions`. Its errors are those that `Dialect.encode_error`
makes of every `RequestError`, so there is no second list of statuses and shapes.
"""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import orjson

from djl_trtllm.api.base import Dialect, Operation, Reply
from djl_trtllm.api.front_end import endpoint_error
from djl_trtllm.config import Options
from djl_trtllm.errors import (
    MethodNotAllowedError,
    NotReadyError,
    OverloadedError,
    RequestError,
    UnknownModelError,
    UnknownPathError,
)
from djl_trtllm.files import read_table
from djl_trtllm.version import __version__

Schema: TypeAlias = Mapping[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}


def any_of(*schemas: Schema) -> Schema:
    """Values that fit one of the schemas."""
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}


def list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def members(members: Mapping[str, Schema], *, optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object with these members and no others."""
    return {
        "type": "object",
        "properties": {**members, **(optional or {})},
        "required": list(members),
        "additionalProperties": False,
    }


def read_operations(file: str, package: str = "djl_trtllm.api.dialects") -> dict[str, Operation]:
    """The operations of a TOML file beside the modules of `package`, by the names in the keys ("a,b" are two).

    The members of a row are those of `Operation`; `json` is the response of type application/json. A schema is the name
    of a type or of a table in `schemas`, or several of them with " or " between; "any" is any value, as OpenAPI 3.1 has
    no schema for an event of a stream. `["object"]` is a list of objects, a table an object with these members and no
    others, and a member "name?" may be absent.
    """
    rows = read_table(file, package)
    named = rows.pop("schemas", {})

    def schemas(short: Mapping[str, Any]) -> dict[str, Schema]:
        return {name: schema(value) for name, value in short.items()}

    def schema(short: Any) -> Schema:
        if isinstance(short, list):
            return list_of(schema(short[0]))
        if isinstance(short, dict):
            inner = schemas(short)
            optional = {name.removesuffix("?"): value for name, value in inner.items() if name.endswith("?")}
            return members({name: inner[name] for name in inner if not name.endswith("?")}, optional=optional)
        names = short.split(" or ")
        if len(names) > 1:
            return any_of(*map(schema, names))
        return schema(named[short]) if short in named else {} if short == "any" else {"type": short}

    def operation(row: Mapping[str, Any]) -> Operation:
        responses = row.get("responses", {"application/json": row["json"]} if "json" in row else {"*/*": "any"})
        errors = {int(status): text for status, text in row.get("errors", {}).items()}
        bodies, query = schemas(row.get("bodies", {})), schemas(row.get("query", {}))
        return Operation(row["summary"], bodies, schemas(responses), query, row.get("example"), errors)

    return {name: operation(row) for names, row in rows.items() for name in names.split(",")}


def schema_of(value: object) -> Schema:
    """The schema of values like this one, a JSON value: the same members, of the same types."""
    if isinstance(value, dict):
        return members({name: schema_of(item) for name, item in value.items()})
    if isinstance(value, list):
        return list_of(functools.reduce(joined, map(schema_of, value)) if value else {})
    for kind, schema in ((bool, BOOLEAN), (int, INTEGER), (float, NUMBER), (str, STRING)):
        if isinstance(value, kind):
            return schema
    return NULL


def joined(one: Schema, other: Schema) -> Schema:
    """The schema of values that fit `one` or `other`; objects become one object with the members of both."""
    if one == other:
        return one
    if one.get("type") == other.get("type") == "object":
        properties = dict(one["properties"])
        for name, schema in other["properties"].items():
            properties[name] = joined(properties[name], schema) if name in properties else schema
        required = [name for name in one["required"] if name in other["required"]]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    either = [*one.get("anyOf", [one])]
    return any_of(*either, *(schema for schema in other.get("anyOf", [other]) if schema not in either))


SERVER = "Server"
"""The tag of the server's own paths."""

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_MESSAGES = ("message", "'name' is 0: expected 1")
"""Some dialects repeat the parameter that a message begins with."""


def document(
    dialects: Sequence[Dialect], own: Mapping[str, Operation], options: Options, default: Dialect
) -> dict[str, Any]:
    """The description of dialects and of the server's `own` paths ("GET /ping"), which have the errors of `default`."""
    return _Document(options).of(dialects, own, default)


def request_errors() -> Iterator[RequestError]:
    """Errors of every class of requests' errors, so that each reply that a client may get is made once."""
    for kind in _below(RequestError):
        for message in _MESSAGES:
            if issubclass(kind, OverloadedError):
                yield kind(message, queue_depth=1, capacity=1, retry_after=1)
            elif issubclass(kind, UnknownModelError):
                yield kind(message, name=None)
                yield kind(message, name="name")
            elif issubclass(kind, MethodNotAllowedError):
                yield kind(message, allow="POST")
            elif issubclass(kind, NotReadyError):
                yield kind(message, retry_after=1)
            else:
                yield kind(message)


def _below(kind: type[RequestError]) -> Iterator[type[RequestError]]:
    for each in kind.__subclasses__():
        if each.__module__ == RequestError.__module__:
            yield each
            yield from _below(each)


class _Document:
    def __init__(self, options: Options) -> None:
        self._options = options
        self._paths: dict[str, dict[str, Any]] = {}
        self._components: dict[str, dict[str, Any]] = {"schemas": {}, "responses": {}}
        self._known: dict[bytes, str] = {}

    def of(self, dialects: Sequence[Dialect], own: Mapping[str, Operation], default: Dialect) -> dict[str, Any]:
        for method_path, operation in own.items():
            method, path = method_path.split()
            self._add(SERVER, SERVER, method.lower(), path, operation, self._errors(default, path, ()))
        tags = [{"name": SERVER, "description": "The server's own paths."}]
        for dialect in dialects:
            tag, name = dialect.title or type(dialect).__name__, type(dialect).__name__
            tags.append({"name": tag, "description": " ".join((type(dialect).__doc__ or "").split())})
            for path in (*dialect.paths, *dialect.actions):
                operation = _with_model_name(path, describe(dialect, path))
                self._add(tag, name, "post", path, operation, self._errors(dialect, path, _of_requests))
            for method, paths in (("get", dialect.pages), ("delete", dialect.removals)):
                for path in paths:
                    operation = describe(dialect, path, method.upper())
                    self._add(tag, name, method, path, operation, self._errors(dialect, path, _of_pages))
        return {
            "openapi": "3.1.0",
            "info": {"title": "djl-trtllm", "version": __version__, "license": {"name": "Apache-2.0"}},
            "tags": tags,
            "paths": dict(sorted(self._paths.items())),
            "components": self._components,
        }

    def _add(self, tag: str, group: str, method: str, path: str, operation: Operation, errors: dict[str, Any]) -> None:
        name = "_".join([group, method, *re.findall(r"\w+", path)])
        described: dict[str, Any] = {"operationId": name, "tags": [tag]}
        if operation.summary:
            described["summary"] = operation.summary
        parameters = [
            {"name": each, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for each in _PLACEHOLDER.findall(path)
        ]
        parameters += [{"name": each, "in": "query", "schema": schema} for each, schema in operation.query.items()]
        if parameters:
            described["parameters"] = parameters
        if operation.bodies:
            described["requestBody"] = self._body(name, operation)
        content = {kind: {"schema": schema} if schema else {} for kind, schema in operation.responses.items()}
        described["responses"] = {
            "200": {"description": "OK", "content": content} if content else {"description": "OK"}
        }
        for status, meaning in operation.errors.items():
            described["responses"][str(status)] = {"description": meaning, "content": {"application/json": {}}}
        described["responses"] |= {
            status: self._reuse("responses", f"{group}_{status}", error)
            for status, error in errors.items()
            if int(status) not in operation.errors
        }
        self._paths.setdefault(path, {})[method] = described

    def _body(self, name: str, operation: Operation) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for kind, schema in operation.bodies.items():
            content[kind] = {"schema": self._reuse("schemas", name, schema)} if schema else {}
            if operation.example is not None and kind == "application/json":
                content[kind]["example"] = operation.example
        return {"content": content, "required": "*/*" not in content}

    def _reuse(self, kind: str, name: str, value: Any) -> dict[str, str]:
        """A reference to the component; equal ones are one."""
        key = orjson.dumps([kind, value])
        if key not in self._known:
            taken = self._components[kind]
            names = (name, *(f"{name}_{number}" for number in range(2, 1000)))
            self._known[key] = next(each for each in names if each not in taken)
            taken[self._known[key]] = value
        return {"$ref": f"#/components/{kind}/{self._known[key]}"}

    def _errors(self, dialect: Dialect, path: str, kinds: tuple[type[RequestError], ...]) -> dict[str, Any]:
        """The replies to errors by status."""
        errors: dict[str, Any] = {}
        causes: list[BaseException] = [error for error in request_errors() if isinstance(error, kinds)]
        for error in (*causes, Exception("a defect")):
            reply = dialect.encode_error(error, self._options)
            if "{endpoint}" in path and dialect.sagemaker:
                reply = endpoint_error(error, reply)
            _join_error(errors.setdefault(str(reply.status), {"description": "", "content": {}}), error, reply)
        return dict(sorted(errors.items()))


_of_requests = tuple(kind for kind in _below(RequestError) if kind not in (MethodNotAllowedError, UnknownPathError))
_of_pages = (UnknownModelError, NotReadyError)


def describe(dialect: Dialect, path: str, method: str = "POST") -> Operation:
    """Describe a path. Where it takes POST, the tables of its parameters are the schema of its JSON."""
    if method != "POST":
        return dialect.descriptions.get(f"{method} {path}", Operation())
    described = dialect.descriptions.get(path, Operation())
    schemas = [table.schema() for table in dialect.tables.get(path, ())]
    body: dict[str, Any] = {"application/json": any_of(*schemas)} if schemas else {}
    return described._replace(bodies={**body, **described.bodies} or {"*/*": {}})


def _with_model_name(path: str, operation: Operation) -> Operation:
    """The query may name the model where the path does not."""
    if _PLACEHOLDER.search(path) or "model_name" in operation.query:
        return operation
    return operation._replace(query={**operation.query, "model_name": STRING})


def _join_error(described: dict[str, Any], error: BaseException, reply: Reply) -> None:
    """Add a reply to the description of its status."""
    known = isinstance(error, RequestError)
    meaning = re.split(r"[.;:]", type(error).__doc__ or "")[0] if known else "A defect of the server"
    if meaning not in described["description"]:
        described["description"] = "; ".join(filter(None, [described["description"], meaning]))
    schema = schema_of(orjson.loads(reply.body)) if reply.content_type == "application/json" else STRING
    content = described["content"].setdefault(reply.content_type, {"schema": schema})
    content["schema"] = joined(content["schema"], schema)
    if reply.headers:
        headers = described.setdefault("headers", {})
        headers |= {name: {"schema": STRING} for name, _ in reply.headers}


def resolved(described: Mapping[str, Any], reference: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a description to which a reference refers; anything else is itself."""
    if "$ref" not in reference:
        return reference
    value: Any = described
    for name in reference["$ref"].removeprefix("#/").split("/"):
        value = value[name]
    found: Mapping[str, Any] = value
    return found
