"""Files of prompts: text with a prompt on each line, or JSON lines.

A JSON line is a request of the LMI schema with two freedoms: `prompt` may stand for `inputs`, and chat parameters may
stand in `parameters` as well as beside `messages`. Its `id` (a string or a number) comes back with the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import orjson

from djl_trtllm.api.lmi import parse as lmi
from djl_trtllm.api.lmi.parameters import CHAT_FIELDS, INPUTS_PARAMETERS
from djl_trtllm.api.parameters import Table, show
from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.request import GenerationRequest

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
"""Files with these names are JSON lines."""

_SHAPES_ANSWERS = (
    "stream",
    "stream_options",
    "output_formatter",
    "details",
    "return_full_text",
    "decoder_input_details",
)
_MOST_PROBLEMS = 10


class Entry(NamedTuple):
    """A prompt of a file. `id` is the line's own, or the number of the line (from 1)."""

    id: str | int | float
    request: GenerationRequest


def read_entries(data: bytes, name: str, parameters: Mapping[str, Any], *, json_lines: bool) -> list[Entry]:
    """The prompts of a file; empty lines are left out.

    `name` is the file's in messages. `parameters` are parameters of the LMI schema for every line; a line's own win.
    Raises InvalidRequestError for parameters that are wrong, and for lines that are, with their numbers.
    """
    template = _parse({"inputs": "-", "parameters": parameters})
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    entries: list[Entry] = []
    problems: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            if json_lines:
                entries.append(_read_object(_decode(line), number, parameters))
            else:
                entries.append(Entry(number, msgspec.structs.replace(template, prompt=line.rstrip(b"\r").decode())))
        except UnicodeDecodeError as error:
            problems.append(f"{name}:{number}: the line is not UTF-8: {error}")
        except InvalidRequestError as error:
            problems.append(f"{name}:{number}: {error}")
    if problems:
        shown = problems[:_MOST_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} lines more")
        raise InvalidRequestError("\n".join(shown))
    return entries


def _decode(line: bytes) -> dict[str, Any]:
    try:
        payload = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the line is not JSON: {error.msg} at column {error.colno}") from None
    if type(payload) is not dict:
        raise InvalidRequestError(f"the line is {show(payload)}: expected a JSON object")
    return payload


def _read_object(line: dict[str, Any], number: int, defaults: Mapping[str, Any]) -> Entry:
    payload = dict(line)
    id_ = payload.pop("id", None)
    if id_ is not None and type(id_) not in (str, int, float):
        raise InvalidRequestError(f"'id' is {show(id_)}: expected a string or a number")
    own = payload.pop("parameters", None) or {}
    if type(own) is not dict:
        raise InvalidRequestError(f"'parameters' is {show(own)}: expected an object")
    if sum(name in payload for name in ("prompt", "inputs", "messages")) != 1:
        raise InvalidRequestError("expected exactly one of 'prompt', 'inputs' and 'messages'")
    if "prompt" in payload:
        payload["inputs"] = payload.pop("prompt")
    for name in _SHAPES_ANSWERS:
        if payload.get(name) or own.get(name):
            raise InvalidRequestError(f"'{name}' shapes answers over HTTP, and the lines written here have one shape")
    if "messages" in payload:
        if twice := sorted(own.keys() & payload.keys()):
            raise InvalidRequestError(f"'{twice[0]}' stands in 'parameters' and beside 'messages': give one")
        payload = _fill(payload | own, defaults, CHAT_FIELDS)
    else:
        payload["parameters"] = _fill(own, defaults, INPUTS_PARAMETERS)
    return Entry(number if id_ is None else id_, _parse(payload))


def _fill(given: dict[str, Any], defaults: Mapping[str, Any], table: Table) -> dict[str, Any]:
    """`given`, and the defaults of parameters that it has by no name."""
    given = {name: value for name, value in given.items() if value is not None}
    taken = {alias for name in given if name in table.rows for alias in table.rows[name].names}
    return {name: value for name, value in defaults.items() if name not in taken} | given


def _parse(payload: dict[str, Any]) -> GenerationRequest:
    try:
        (request,) = lmi.parse_payload(payload).requests
    except InvalidRequestError as error:
        raise type(error)(str(error).removeprefix(lmi.PREFIX)) from None
    return request
