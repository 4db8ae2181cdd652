"""The server's own paths as OpenAPI operations, and the page that shows the whole description.

The page is rendered here from `docs.html` beside this module: it needs no script and loads nothing from elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from djl_trtllm.api import Dialect, Reply
from djl_trtllm.api.openapi import SERVER, document, read_operations, resolved
from djl_trtllm.api.registry import DEFAULT
from djl_trtllm.config import Options

_TEMPLATE = Path(__file__).with_name("docs.html")
_SECURITY = (("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),)
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
OPEN = ("/version", "/openapi.json", "/docs", "/ping", "/monitor", "/monitor/{file}")
"""The server's own paths that need no API key."""


OPERATIONS = read_operations("operations.toml", "djl_trtllm.server")
"""The operations by "METHOD PATH"."""


class Description:
    """The description of a server, made once when it is first asked for."""

    def __init__(self, dialects: Sequence[Dialect], options: Options, *, keys: bool = False) -> None:
        """With `keys`, requests need an API key."""
        self._dialects = dialects
        self._keys = keys
        self._options = options

    @cached_property
    def document(self) -> Reply:
        """The body of `/openapi.json`."""
        return Reply.json(self._described())

    @cached_property
    def page(self) -> Reply:
        """The page `/docs`."""
        return Reply(200, "text/html; charset=utf-8", _render(self._described()).encode(), _SECURITY)

    def _described(self) -> dict[str, Any]:
        described = document(self._dialects, OPERATIONS, self._options, DEFAULT)
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
    """Return each tag with its operations: those that generate first, the server's own at the end."""
    operations = [
        {"path": path, "method": method.upper(), **operation}
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    ]
    operations.sort(key=lambda each: (each["method"] != "POST", "{" in each["path"]))
    tags = sorted(described["tags"], key=lambda tag: tag["name"] == SERVER)
    return [(tag, [each for each in operations if tag["name"] in each["tags"]]) for tag in tags]


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
