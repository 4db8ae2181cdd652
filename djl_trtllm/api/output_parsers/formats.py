"""The formats of tool calls and reasoning: the rows of `formats.toml`, and the usual form of a call in each.

Models write call after call in one way, most of them without nested values. In that form one match reads each call that
stands behind another one (`UsualCall`). `calls` reads any form in steps, which take ten times as long; what does not
match here is read there. No match goes beyond the call that is read in steps, so that it costs no more than that.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from djl_trtllm.api.output_parsers import reader
from djl_trtllm.files import read_table

_VARYING = re.compile(r"\$(object|json|parameters|elements|literal|name|key|text|value)")
_NAME = re.compile(r"[\w.-]{1,256}")
_NO_NAME = "[]{}\"',<"


def _lines(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split("\n")))


@dataclass(frozen=True, slots=True)
class Parameter:
    """The form in which a parameter is written: `opener`, the key, `inner` markers, the value, `closer`."""

    opener: str
    inner: tuple[str, ...]
    text_end: str
    """The marker after the word that says whether the value is text; "" if the format has no such word."""
    closer: str
    on_lines: bool
    """The value stands on lines of its own."""

    @classmethod
    def read(cls, text: str) -> Parameter:
        opener, _, inner, *rest = _VARYING.split(text)
        text_end = rest[1] if rest[0] == "text" else ""
        return cls(opener, _lines(inner), text_end, rest[-1].strip("\n"), inner.endswith("\n"))


@dataclass(frozen=True, slots=True)
class Call:
    """The form in which a call is written: `opener`, the name, `middle`, the arguments as `body`, `closers`."""

    opener: str
    middle: str
    body: str
    closers: tuple[str, ...]
    listed: bool
    name_ends: reader.Markers | None
    """The markers that may stand after the name; None if the name is in the body."""

    @classmethod
    def read(cls, text: str, parameter: Parameter | None) -> Call:
        opener, first, *rest = _VARYING.split(text)
        listed = opener == "["
        after = rest[-1].removesuffix("]") if listed else rest[-1]
        middle = rest[0] if first == "name" else ""
        ends = [middle or (parameter.opener if parameter else "{"), *(() if middle else _lines(after))]
        if listed:
            ends += _NO_NAME
        names = reader.Markers(*ends) if first == "name" else None
        return cls(opener, middle, rest[1] if first == "name" else first, _lines(after), listed, names)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A row of `tools`. `markers` are shown in the text where they are special tokens."""

    call: Sequence[Call] = ()
    parameter: Parameter | None = None
    name: re.Pattern[str] = _NAME
    section: str = ""
    close: str = ""
    between: str = ""
    bare: bool = False
    alone: bool = False
    forced: bool = False
    channels: bool = False
    quotes: Sequence[str] = ()
    markers: tuple[str, ...] = ()
    template: Sequence[Sequence[str]] = ()
    id: str = ""
    _usual: dict[str, UsualCall] = field(default_factory=dict, compare=False)

    @classmethod
    def read(cls, row: dict[str, Any]) -> ToolFormat:
        parameter = Parameter.read(row["parameter"]) if "parameter" in row else None
        texts = [row["call"]] if isinstance(row.get("call"), str) else row.get("call", ())
        marks = row.get("markers") or filter(None, (row.get("section"), row.get("close")))
        own = {
            "call": [Call.read(text, parameter) for text in texts],
            "parameter": parameter,
            "name": re.compile(row.get("name", _NAME)),
            "markers": CHANNEL_MARKERS if row.get("channels") else tuple(marks),
        }
        return cls(**row | own)

    @property
    def openers(self) -> reader.Markers:
        """The markers with which calls begin: that of their section, or their own."""
        own = () if self.section and not self.bare else (call.opener for call in self.call)
        return reader.markers(*filter(None, (self.section, *own)))

    def usual(self, call: Call) -> UsualCall:
        """The usual form of a call behind another one."""
        kind = f"{call.opener}${call.body}"
        if kind not in self._usual:
            self._usual[kind] = UsualCall(call, self)
        return self._usual[kind]

    def new_id(self) -> str:
        """The id of a call."""
        if self.id.isdigit():
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(int(self.id)))
        return f"call_{secrets.token_hex(12)}"

    def fit_id(self, call_id: str, name: str = "", index: int = 0) -> str:
        """The id of a conversation's call `index`, of the function `name`, as the template takes it.

        The end of an id has most of its randomness.
        """
        if self.id.isdigit():
            return call_id[-int(self.id) :]
        return self.id.format(name=name, index=index) if self.id and name else call_id


# -- calls in their usual form -----------------------------------------------------------------------------------------

FEW_BLANKS = _B = r"[ \t\r\n]{0,64}(?![ \t\r\n])"
"""All blanks up to the next text, at most 64: matched in one way, so that neighbouring patterns cost no more."""
FLAT = r'\{[^"{}\[\]<]*(?:"[^"\\]*(?:\\.[^"\\]*)*"[^"{}\[\]<]*)*\}'
"""A pattern of a JSON object without objects or lists in it."""
_OBJECT = rf'\{{{_B}"name"{_B}:{_B}"([A-Za-z0-9_.-]+)"{_B},{_B}"(?:arguments|parameters)"{_B}:{_B}({FLAT}){_B}\}}'
_KEY = r"([\w.-]{1,256})"
_QUOTES = reader.PYTHON_QUOTES + "<"
"""The characters with which strings begin."""
_ESCAPED = r"nrtbf\\" + reader.PYTHON_QUOTES
_WORD = rf"[^\s,:={{}}\[\]\(){_QUOTES}]{{1,256}}"

TypesOf = Callable[[str, str], frozenset[str]]


class UsualCall:
    """A pattern of a call that follows another call of its kind, from the text between them on."""

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

    def read(
        self, text: str, at: int, types_of: TypesOf, names: Container[str] | None
    ) -> tuple[list[reader.Event], int]:
        """Read the calls of `names` (of any, if None) that stand at a place; returns them and their end."""
        match, position, items, pair = self._pattern.match, self._name, self._item, self._pair
        events: list[reader.Event] = []
        start = reader.CallStart("")
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
                start = reader.CallStart(name)
            events += (start, reader.CallArguments(arguments))
            at = found.end()
        return events, at

    # -- a key and a value as JSON; None where they have to be read in steps ------------------------------------------

    def _literal(self, _: str, item: tuple[str, ...], __: TypesOf) -> str:
        key, value = item
        if value[0] not in _QUOTES:
            return f'"{key}": {reader.word(value)}'
        if self._quote in reader.PYTHON_QUOTES:
            return f'"{key}": "{_from_python(value[1:-1])}"'
        return f'"{key}": {reader.quoted(value[len(self._quote) : -len(self._quote)])}'

    def _marked(self, _: str, item: tuple[str, ...], __: TypesOf) -> str:
        key, is_text, value = item
        return f'"{key}": {reader.quoted(value) if is_text == "true" else reader.as_json(value, frozenset())}'

    def _typed(self, name: str, item: tuple[str, ...], types_of: TypesOf) -> str | None:
        key, value, *closed = item
        if closed and (closed != [key] or value.isspace()):
            return None
        types = types_of(name, key)
        return f'"{key}": {reader.quoted(value) if types == {"string"} else reader.as_json(value, types)}'


def _between(call: Call, own: ToolFormat) -> str:
    """A pattern for the text between two calls."""
    if call.listed:
        return f"{_B},"
    section = f"{_B}{re.escape(own.section)}" if own.section else ""
    if section and own.close:
        section = f"(?:{_B}{re.escape(own.close)})?{section}"
    if call.opener:
        return (f"(?:{section})?" if section else "") + _B + re.escape(call.opener)
    return f"(?:{_B}{re.escape(own.between)})?" if own.between else section


def _written(parameter: Parameter, *, named: bool) -> str:
    """A pattern of a parameter: its groups are the key, the word that says whether the value is text, the value, and if
    `named` the key at its end."""
    end, line = parameter.closer, r"\n?" if parameter.on_lines else ""
    key_end, *inner = map(re.escape, parameter.inner)
    text = rf"(true|false){re.escape(parameter.text_end)}" if parameter.text_end else ""
    markers = "".join(_B + marker for marker in inner)
    value = f"{line}([^{re.escape(end[0])}]*?){line}{re.escape(end)}" + (f"{_KEY}>" if named else "")
    return f"{re.escape(parameter.opener)}{_KEY}{key_end}{text}{markers}{value}"


def _string(quote: str) -> str:
    """A pattern of a string without escape sequences that JSON lacks."""
    end, first = re.escape(quote), re.escape(quote[0])
    if quote in reader.PYTHON_QUOTES:
        return rf"{end}[^{first}\\]*(?:\\[{_ESCAPED}][^{first}\\]*)*{end}"
    return f"{end}[^{first}]*{end}"


def _without_groups(pattern: str) -> str:
    return re.sub(r"(?<!\\)\((?!\?)", "(?:", pattern)


def _from_python(text: str) -> str:
    """The inside of a Python string, as that of a JSON string: for most strings, only the quotes differ."""
    if "\\\\" in text or not text.isprintable():
        return reader.unescaped(text)
    return text.replace('"', '\\"').replace('\\\\"', '\\"').replace("\\'", "'")


# -- reasoning, and the rows -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Thinking:
    """A row of `reasoning`. `markers` are shown in the text where they are special tokens."""

    open: str = ""
    close: str = ""
    starts: bool = False
    ends_at_call: bool = False
    anywhere: bool = False
    channels: bool = False
    markers: tuple[str, ...] = ()
    template: str = ""

    @classmethod
    def read(cls, row: dict[str, Any]) -> Thinking:
        marks = CHANNEL_MARKERS if row.get("channels") else row.get("markers") or (row["open"], row["close"])
        return cls(**row | {"markers": tuple(marks)})


CHANNEL_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

_ROWS = read_table("formats.toml", __package__)
TOOLS = {name: ToolFormat.read(row) for name, row in _ROWS["tools"].items()}
REASONING = {name: Thinking.read(row) for name, row in _ROWS["reasoning"].items()}
REQUIRED = ToolFormat.read(_ROWS["required"])
"""Calls of a request that has to make one."""
