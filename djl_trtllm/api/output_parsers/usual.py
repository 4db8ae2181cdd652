"""Calls in their usual form that stand one after the other: one match reads each.

Models write call after call in one way, most of them without nested values. `calls` reads any form in steps, which
take ten times as long; what does not match here is read there. No match goes beyond the call that is read in steps, so
that it costs no more than that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import TYPE_CHECKING

from djl_trtllm.api.output_parsers.reader import (
    PYTHON_QUOTES,
    CallArguments,
    CallStart,
    Event,
    as_json,
    quoted,
    unescaped,
    word,
)

if TYPE_CHECKING:
    from djl_trtllm.api.output_parsers.formats import Call, Parameter, ToolFormat

FEW_BLANKS = _B = r"[ \t\r\n]{0,64}(?![ \t\r\n])"
"""All blanks up to what comes next, at most 64: in one way, so that blanks beside each other cost no more."""
FLAT = r'\{[^"{}\[\]<]*(?:"[^"\\]*(?:\\.[^"\\]*)*"[^"{}\[\]<]*)*\}'
"""A JSON object without others in it."""
_OBJECT = rf'\{{{_B}"name"{_B}:{_B}"([A-Za-z0-9_.-]+)"{_B},{_B}"(?:arguments|parameters)"{_B}:{_B}({FLAT}){_B}\}}'
_KEY = r"([\w.-]{1,256})"
_QUOTES = PYTHON_QUOTES + "<"
"""What strings begin with."""
_ESCAPED = r"nrtbf\\" + PYTHON_QUOTES
_WORD = rf"[^\s,:={{}}\[\]\(){_QUOTES}]{{1,256}}"

TypesOf = Callable[[str, str], frozenset[str]]


class UsualCall:
    """A call of a format behind another one of its kind, from what stands between them on."""

    def __init__(self, call: Call, own: ToolFormat) -> None:
        self._pair: Callable[[str, tuple[str, ...], TypesOf], str | None] = self._typed
        self._quote, item, between = "", "", _B
        if call.body in ("parameters", "elements") and own.parameter is not None:
            item = _written(own.parameter, named=call.body == "elements")
            if own.parameter.text_end:
                self._pair = self._marked
        elif call.body == "literal":
            item = rf"{_KEY}{_B}[:=]{_B}({'|'.join([*map(_string, own.quotes), _WORD])})"
            between, self._pair, self._quote = f"{_B},{_B}", self._literal, own.quotes[0]
        self._item = re.compile(item, re.DOTALL) if item else None
        body = f"({FLAT})"
        if item:  # most calls have one, and need no second search
            body = f"(?:{_B}{item}((?:{between}{_without_groups(item)})*)|)"
        self._name = 1 if own.name.groups and call.name_ends is not None else 0
        name = f"({own.name.pattern}){_B}{re.escape(call.middle)}{_B}{body}"
        ends = "".join(_B + re.escape(closer) for closer in call.closers)
        pattern = f"{_between(call, own)}{_B}{_OBJECT if call.name_ends is None else name}{ends}"
        self._pattern = re.compile(pattern, re.DOTALL)

    def read(self, text: str, at: int, types_of: TypesOf, names: Container[str] | None) -> tuple[list[Event], int]:
        """Read the calls of `names` (of any, if None) that stand at a place; returns them and where they end."""
        match, position, items, pair = self._pattern.match, self._name, self._item, self._pair
        events: list[Event] = []
        start = CallStart("")
        while (found := match(text, at)) is not None:
            groups = found.groups("")
            name, arguments = groups[position], groups[-1]
            if names is not None and name not in names:
                break
            if items is not None:
                first = groups[position + 1 : -1]
                pairs = pair(name, first, types_of) if first[0] else ""
                if arguments:
                    several = [pairs, *(pair(name, item, types_of) for item in items.findall(arguments))]
                    pairs = None if None in several else ", ".join(filter(None, several))
                if pairs is None:
                    break
                arguments = f"{{{pairs}}}"
            if name != start.name:
                start = CallStart(name)
            events += (start, CallArguments(arguments))
            at = found.end()
        return events, at

    # -- a key and a value as JSON; None where they have to be read in steps ------------------------------------------

    def _literal(self, _: str, item: tuple[str, ...], __: TypesOf) -> str:
        key, value = item
        if value[0] not in _QUOTES:
            return f'"{key}": {word(value)}'
        if self._quote in PYTHON_QUOTES:
            return f'"{key}": "{_from_python(value[1:-1])}"'
        return f'"{key}": {quoted(value[len(self._quote) : -len(self._quote)])}'

    def _marked(self, _: str, item: tuple[str, ...], __: TypesOf) -> str:
        key, is_text, value = item
        return f'"{key}": {quoted(value) if is_text == "true" else as_json(value, frozenset())}'

    def _typed(self, name: str, item: tuple[str, ...], types_of: TypesOf) -> str | None:
        key, value, *closed = item
        if closed and (closed != [key] or value.isspace()):
            return None
        types = types_of(name, key)
        return f'"{key}": {quoted(value) if types == {"string"} else as_json(value, types)}'


def _between(call: Call, own: ToolFormat) -> str:
    """What may stand between two calls."""
    if call.listed:
        return f"{_B},"
    section = f"{_B}{re.escape(own.section)}" if own.section else ""
    if section and own.close:
        section = f"(?:{_B}{re.escape(own.close)})?{section}"
    if call.opener:
        return (f"(?:{section})?" if section else "") + _B + re.escape(call.opener)
    return f"(?:{_B}{re.escape(own.between)})?" if own.between else section


def _written(parameter: Parameter, *, named: bool) -> str:
    """A parameter, with groups for key, word (whether the value is text), value, and if `named` the key at its end."""
    end, line = parameter.closer, r"\n?" if parameter.on_lines else ""
    key_end, *inner = map(re.escape, parameter.inner)
    text = rf"(true|false){re.escape(parameter.text_end)}" if parameter.text_end else ""
    markers = "".join(_B + marker for marker in inner)
    value = f"{line}([^{re.escape(end[0])}]*?){line}{re.escape(end)}" + (f"{_KEY}>" if named else "")
    return f"{re.escape(parameter.opener)}{_KEY}{key_end}{text}{markers}{value}"


def _string(quote: str) -> str:
    """A string, without escape sequences that JSON lacks."""
    end, first = re.escape(quote), re.escape(quote[0])
    if quote in PYTHON_QUOTES:
        return rf"{end}[^{first}\\]*(?:\\[{_ESCAPED}][^{first}\\]*)*{end}"
    return f"{end}[^{first}]*{end}"


def _without_groups(pattern: str) -> str:
    return re.sub(r"(?<!\\)\((?!\?)", "(?:", pattern)


def _from_python(text: str) -> str:
    """The inside of such a string, as that of a JSON string: of most, only the quotes differ."""
    if "\\\\" in text or not text.isprintable():
        return unescaped(text)
    return text.replace('"', '\\"').replace('\\\\"', '\\"').replace("\\'", "'")
