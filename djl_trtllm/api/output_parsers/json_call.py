"""Reads a call that is a JSON object: `{"name": ..., "arguments": {...}}`, as it arrives."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Set
from typing import Any, NamedTuple


class CallStart(NamedTuple):
    """A call of the function `name` begins. Its arguments follow."""

    name: str


class CallArguments(NamedTuple):
    """More of the arguments, which are JSON as text, of the call that started last."""

    text: str


class Status(enum.Enum):
    READING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()
    """It is no call."""


class _Expect(enum.Enum):
    """What stands next in the object."""

    OPEN = enum.auto()
    FIRST_KEY = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA = enum.auto()


_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", *_ARGUMENTS, "id", "type"})
"""Another key means that the object is no call."""

_IN_STRING = re.compile(r'["\\]')
_NESTED = re.compile(r'["{}\[\]<]')
_LITERAL_END = re.compile(r"[\s,}\]<]")


class ValueEnd:
    """Finds the end of a JSON value that arrives in pieces. `first` is its first character.

    Only strings and brackets are looked at. A `<` outside strings is no JSON: the value ends there, `broken`.
    """

    __slots__ = ("_depth", "_escaped", "_in_string", "_literal", "broken")

    def __init__(self, first: str) -> None:
        self._literal = first not in '"{['
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.broken = False

    def find(self, text: str, at: int) -> int | None:
        """Where the value ends in the next piece, `text` from `at` on. None if it goes on."""
        if self._literal:
            end = _LITERAL_END.search(text, at)
            return end and end.start()
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._in_string else _NESTED).search(text, at)
            if found is None:
                return None
            at = found.end()
            match found[0]:
                case "\\":
                    self._escaped = True
                    continue
                case "<":
                    self.broken = True
                    return at - 1
                case '"':
                    self._in_string = not self._in_string
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
            if not self._depth and not self._in_string:
                return at
        return None


class CallReader:
    """One call. `names`: only calls of these functions are calls.

    Until the call starts, `text` is all that was read. It starts when its name is known and its arguments begin; what
    goes wrong from then on ends it.
    """

    def __init__(self, names: Set[str] | None = None) -> None:
        self.status = Status.READING
        self.text = ""
        self._names = names
        self._expect = _Expect.OPEN
        self._key = ""
        self._name: str | None = None
        self._arguments: str | None = None
        self.started = False
        self._alone = False
        self._value: ValueEnd | None = None
        self._parts: list[str] | None = None
        """Of the value, None where it is streamed."""

    @classmethod
    def of_arguments(cls, name: str) -> CallReader:
        """Reads the arguments alone, of a function whose name stands before."""
        reader = cls()
        reader._name, reader._key, reader._expect, reader._alone = name, _ARGUMENTS[0], _Expect.VALUE, True
        return reader

    def read(self, text: str, events: list[Any]) -> int:
        """Take in the next piece, and add what it brings to `events`. Returns how much of it belongs to the call."""
        at = 0
        while at < len(text) and self.status is Status.READING:
            at = self._read_value(text, at, events) if self._value is not None else self._read_mark(text, at, events)
        self.text = "" if self.started else self.text + text[:at]
        return at

    def _read_mark(self, text: str, at: int, events: list[Any]) -> int:
        """One character outside keys and values, or the beginning of one."""
        char = text[at]
        if char in " \t\r\n":
            return at + 1
        match self._expect, char:
            case _Expect.OPEN, "{":
                self._expect = _Expect.FIRST_KEY
            case ((_Expect.FIRST_KEY | _Expect.KEY), '"'):
                self._value, self._parts = ValueEnd(char), []
                return at
            case _Expect.COLON, ":":
                self._expect = _Expect.VALUE
            case _Expect.COMMA, ",":
                self._expect = _Expect.KEY
            case ((_Expect.FIRST_KEY | _Expect.COMMA), "}"):
                return self._close(at, events)
            case _Expect.VALUE, _ if char not in ",:}]<":
                self._begin_value(char, events)
                return at
            case _:
                return self._fail(at)
        return at + 1

    def _begin_value(self, char: str, events: list[Any]) -> None:
        self._value, self._parts = ValueEnd(char), []
        if self._key in _ARGUMENTS and self._name is not None and char == "{" and not self.started:
            self._start(events)
            self._parts = None

    def _read_value(self, text: str, at: int, events: list[Any]) -> int:
        assert self._value is not None
        end = self._value.find(text, at)
        piece = text[at:end]
        if self._parts is not None:
            self._parts.append(piece)
        elif piece:
            events.append(CallArguments(piece))
        if end is None:
            return len(text)
        broken, self._value = self._value.broken, None
        if broken or not self._take_value(events):
            return self._fail(end)
        if self._alone:
            self.status = Status.DONE
        return end

    def _take_value(self, events: list[Any]) -> bool:
        """A key or a value is complete. False if it cannot be one of a call."""
        is_key = self._expect is not _Expect.VALUE
        self._expect = _Expect.COLON if is_key else _Expect.COMMA
        if self._parts is None:
            return True
        raw = "".join(self._parts)
        try:
            value = json.loads(raw)
            if isinstance(value, str):
                value.encode()  # a lone surrogate cannot be sent
        except (ValueError, RecursionError):
            return False
        if is_key:
            self._key = value
            return value in _KEYS
        if self._key == "name" and not self.started:
            if not isinstance(value, str) or not value or (self._names is not None and value not in self._names):
                return False
            self._name = value
        elif self._key in _ARGUMENTS and not self.started:
            self._arguments = _arguments(value, raw)
            if self._arguments is None:
                return False
        if self._name is not None and self._arguments is not None and not self.started:
            self._start(events)
            events.append(CallArguments(self._arguments))
        return True

    def _close(self, at: int, events: list[Any]) -> int:
        if not self.started:
            if self._name is None:
                return self._fail(at)
            self._start(events)
            events.append(CallArguments("{}"))
        self.status = Status.DONE
        return at + 1

    def _start(self, events: list[Any]) -> None:
        assert self._name is not None
        self.started = True
        events.append(CallStart(self._name))

    def _fail(self, at: int) -> int:
        self.status = Status.DONE if self.started else Status.FAILED
        return at


def _arguments(value: Any, raw: str) -> str | None:
    """Arguments that are not streamed: an object, the text of one, or none. None if they cannot be arguments."""
    if value is None:
        return "{}"
    if isinstance(value, dict):
        return raw
    return value if isinstance(value, str) else None
