"""JSON schemas of responses, for the descriptions of dialects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Schema: TypeAlias = Mapping[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
EVENTS: Schema = {}
"""Of a stream: OpenAPI 3.1 has no schema for one event or line."""


def any_of(*schemas: Schema) -> Schema:
    """Values that fit one of the schemas."""
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}


def nullable(schema: Schema) -> Schema:
    return any_of(schema, NULL)


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


def schema_of(value: object) -> Schema:
    """The schema of values like this one, a JSON value: the same members, of the same types."""
    if isinstance(value, dict):
        return members({name: schema_of(item) for name, item in value.items()})
    if isinstance(value, list):
        return list_of(_joined([schema_of(item) for item in value]))
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


def _joined(schemas: list[Schema]) -> Schema:
    result: Schema = schemas[0] if schemas else {}
    for schema in schemas[1:]:
        result = joined(result, schema)
    return result
