"""Outputs of models in every format of tool calls, as their chat templates write them, and what is found in outputs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from djl_trtllm.api import output_parsers as parsers
from djl_trtllm.config import ReasoningFormat, ToolCallFormat

_DATA = json.loads(Path(__file__).with_suffix(".json").read_bytes())
FUNCTIONS: dict[str, Any] = _DATA["functions"]
CASES: list[Any] = _DATA["cases"]
WRITERS = tuple(_DATA["writers"])
"""A format, or a variant of it whose name goes on after a blank."""


@cache
def _template(writer: str) -> jinja2.Template:
    environment = jinja2.Environment(autoescape=False, undefined=jinja2.StrictUndefined)
    environment.filters |= {"json": lambda value: json.dumps(value, ensure_ascii=False), "python": repr}
    return environment.from_string(_DATA["writers"][writer].replace("{% XML %}", _DATA["xml"]))


def write(writer: str, before: str, calls: Iterable[tuple[str, Any]], after: str) -> str:
    """The output of a model with these calls."""
    named = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return _template(writer).render(before=before, calls=named, after=after)


class Answer(NamedTuple):
    """What was found in an output."""

    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""

    @classmethod
    def of(cls, content: str, calls: list[list[str]], reasoning: str) -> Answer:
        """An answer of a table."""
        return cls(content, tuple((name, arguments) for name, arguments in calls), reasoning)

    def values(self) -> list[list[Any]]:
        """The calls with their arguments as values. Raises ValueError if some are no JSON."""
        return [[name, json.loads(arguments)] for name, arguments in self.calls]


def parser(name: str, tools: Any = None, reasoning: str = "none", prompt: str = "") -> parsers.OutputParser:
    """A parser of the format (of the writer) `name`."""
    own = parsers.tool_format(ToolCallFormat(name.split()[0]), "")
    assert own is not None
    calls = parsers.call_parser(own, FUNCTIONS if tools is None else tools)
    return parsers.with_reasoning(ReasoningFormat(reasoning), calls, prompt)


def parse(parser: parsers.OutputParser, *pieces: str) -> Answer:
    """What a parser finds in the pieces of an output."""
    found: dict[type, list[str]] = {parsers.Content: [], parsers.Reasoning: []}
    calls: list[tuple[str, list[str]]] = []
    for event in [event for piece in pieces for event in parser.feed(piece)] + parser.finish():
        match event:
            case parsers.CallStart(name):
                calls.append((name, []))
            case parsers.CallArguments(text):
                calls[-1][1].append(text)
            case parsers.Content(text) | parsers.Reasoning(text):
                assert text
                found[type(event)].append(text)
    content, reasoning = ("".join(texts) for texts in found.values())
    return Answer(content, tuple((name, "".join(arguments)) for name, arguments in calls), reasoning)
