"""Types of a JSON schema and of Python annotations in one form: a list of the JSON kinds, choices and classes that a
value may be (`["integer", "null"]`, `["'cpu'", "'cuda'"]`, `["LoraConfig", "null"]`). What arrays hold is left out."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

REQUIRED_DEFAULT = "required"
_LLM = "LLM.tensorrt"
_KINDS = {
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "str": "string",
    "Path": "string",
    "None": "null",
    "List": "array",
    "list": "array",
    "Dict": "object",
    "dict": "object",
    # Read from JSON, a tokenizer is its path.
    "TokenizerBase": "string",
    "PreTrainedTokenizerBase": "string",
}
_GROUPS = {
    "SparseAttentionConfig": (
        "DeepSeekSparseAttentionConfig",
        "RocketSparseAttentionConfig",
        "SkipSoftmaxAttentionConfig",
    ),
    "SpeculativeConfig": (
        *("AutoDecodingConfig", "DraftTargetDecodingConfig", "EagleDecodingConfig", "LookaheadDecodingConfig"),
        *("MTPDecodingConfig", "MedusaDecodingConfig", "NGramDecodingConfig", "SaveHiddenStatesDecodingConfig"),
        "UserProvidedDecodingConfig",
    ),
}
"""Type aliases of TensorRT-LLM 1.2, with what they stand for."""


def kinds_of(annotation: str) -> list[str]:
    """The kinds of a Python annotation, or of a schema's text for one (`int | None`, `Optional[a.b.C]`)."""
    return sorted(set(_kinds(ast.parse(annotation, mode="eval").body)))


def _kinds(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant):
        yield "null" if node.value is None else repr(node.value)
    elif isinstance(node, ast.BinOp):
        yield from _kinds(node.left)
        yield from _kinds(node.right)
    elif isinstance(node, ast.Subscript):
        yield from _subscripted(node)
    else:
        name = node.attr if isinstance(node, ast.Attribute) else ast.unparse(node)
        yield from _GROUPS.get(name, (_KINDS.get(name, name),))


def _subscripted(node: ast.Subscript) -> Iterator[str]:
    name = ast.unparse(node.value)
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if name not in ("Optional", "Union", "Literal"):
        yield _KINDS.get(name, name)
        return
    for part in parts:
        yield from _kinds(part)
    if name == "Optional":
        yield "null"


def reduced(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The compared part of a `schema.discovered.json`; a reduced one stays as it is. Raises KeyError for other data."""
    if not isinstance(schema, Mapping):
        raise KeyError("engine_params")
    if "classes" in schema:
        return dict(schema)
    definitions: Mapping[str, Any] = schema.get("$defs", {})
    classes = {
        _LLM: {name: _named(field) for name, field in schema["engine_params"].items()},
        "SamplingParams": {name: _named(field) for name, field in schema["sampling_params"].items()},
    }
    others = []
    for name, definition in definitions.items():
        if "properties" in definition and name in _COMPARED:
            required = definition.get("required", ())
            classes[name] = {
                field: {
                    "type": sorted(set(_json_kinds(described))),
                    "default": REQUIRED_DEFAULT if field in required else described.get("default"),
                }
                for field, described in definition["properties"].items()
            }
        elif "properties" in definition:
            others.append(name)
    return {
        "version": schema["engine_version"],
        "source": f"{schema['discovery_method']}, inside {schema['image_ref']}",
        "classes": classes,
        "enums": {name: found["enum"] for name, found in definitions.items() if "enum" in found},
        "other_classes": sorted(others),
    }


_COMPARED = frozenset(
    {
        *("BuildConfig", "CalibConfig", "DynamicBatchConfig", "ExtendedRuntimePerfKnobConfig", "KvCacheConfig"),
        *("LoraConfig", "PeftCacheConfig", "PluginConfig", "QuantConfig", "SchedulerConfig"),
    }
)


def _named(field: Mapping[str, Any]) -> dict[str, Any]:
    """A field of the schema's first two parts, whose types are text."""
    words = {"integer": "int", "number": "float", "boolean": "bool", "string": "str", "array": "list", "object": "dict"}
    text = " | ".join(words.get(part, part) for part in field["type"].split(" | "))
    return {"type": kinds_of(text), "default": field["default"]}


def _json_kinds(described: Mapping[str, Any]) -> Iterator[str]:
    if "anyOf" in described:
        for part in described["anyOf"]:
            yield from _json_kinds(part)
    elif "$ref" in described:
        yield described["$ref"].rsplit("/", 1)[-1]
    elif "enum" in described:
        yield from ("null" if value is None else repr(value) for value in described["enum"])
    elif "type" in described:
        yield described["type"]
