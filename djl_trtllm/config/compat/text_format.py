"""The text format of protocol buffers, in which Triton's `config.pbtxt` is written.

`google.protobuf.text_format` reads messages of known types and does not keep the lines of values. Here every value has
its line, any field may occur, and a `${placeholder}` that is not filled in is a value. To the library it is a syntax
error that hides all others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from google.protobuf import text_encoding

from djl_trtllm.config.compat.foreign_format import FormatError

_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r\f\v]+|\#[^\n]*)
  | (?P<newline>\n)
  | (?P<text>"(?:[^"\\\n]|\\[^\n])*"|'(?:[^'\\\n]|\\[^\n])*')
  | (?P<word>\$\{[^{}\n]*\}|[+-]?[A-Za-z_0-9.][A-Za-z_0-9.+-]*)
  | (?P<mark>[{}<>\[\]:,;])
    """,
    re.VERBOSE,
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_LAST_NAME = re.compile(r"([A-Za-z_][A-Za-z_0-9]{0,60})[ \t]*$")
_CLOSING = {"{": "}", "<": ">", "[": "]"}
_DEEPEST = 50


@dataclass(frozen=True)
class Field:
    """One field: its name, its value (text, or the fields of a message) and the line on which the value begins."""

    name: str
    value: Value
    line: int


Value: TypeAlias = "str | tuple[Field, ...]"


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    line: int


def parse(text: str) -> tuple[Field, ...]:
    """The fields of a message; a list `[a, b]` becomes one field for each member. Raises `FormatError`."""
    return _Parser(tuple(_tokens(text))).message(None, 0)


def _tokens(text: str) -> Iterator[_Token]:
    line, position = 1, 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise FormatError(line, _unexpected(text, position))
        position = match.end()
        if match.lastgroup == "newline":
            line += 1
        elif match.lastgroup != "space":
            yield _Token(str(match.lastgroup), match.group(), line)


def _unexpected(text: str, position: int) -> str:
    character = text[position]
    if character in "\"'":
        return f"the {character} has no second one on this line; texts begin and end with a quote"
    if text.startswith("${", position):
        return "the ${ has no } on this line; write the value itself in its place"
    if character == "=":
        name = _LAST_NAME.search(text, 0, position)
        return f"there is = where a : belongs; write {name.group(1) if name else 'name'}: value"
    if character == "/":
        return "a path needs quotes, and a comment begins with #"
    return f"{character!r} has no meaning here; texts need quotes, and a comment begins with #"


class _Parser:
    def __init__(self, tokens: tuple[_Token, ...]) -> None:
        self._tokens = tokens
        self._next = 0

    def message(self, opening: _Token | None, depth: int) -> tuple[Field, ...]:
        """The fields up to the mark that closes `opening`, or up to the end of the text."""
        if opening is not None and depth > _DEEPEST:
            raise FormatError(opening.line, f"more than {_DEEPEST} nested messages")
        fields: list[Field] = []
        while True:
            token = self._peek()
            if token is None:
                if opening is None:
                    return tuple(fields)
                raise _not_closed(opening)
            if token.kind == "mark" and opening is not None and token.text == _CLOSING[opening.text]:
                self._next += 1
                return tuple(fields)
            if token.text in (",", ";") and fields:
                self._next += 1
                continue
            fields += self._field(depth)

    def _field(self, depth: int) -> Iterator[Field]:
        name = self._take()
        if name.kind == "text":
            raise FormatError(name.line, f"{name.text} has quotes, and names have none; write {name.text[1:-1]}:")
        if not _NAME.fullmatch(name.text):
            raise FormatError(name.line, f"there is {name.text} where the name of a field belongs")
        mark = self._peek()
        if mark is not None and mark.text == ":":
            self._next += 1
        elif mark is None or mark.text not in ("{", "<", "["):
            raise FormatError(name.line, f"{name.text} has no : behind it; write {name.text}: value")
        for value, line in self._values(name, depth):
            yield Field(name.text, value, line)

    def _values(self, name: _Token, depth: int) -> Iterator[tuple[Value, int]]:
        token = self._peek()
        if token is None or token.text in ("}", ">", "]", ":", ",", ";"):
            raise FormatError(name.line, f"{name.text} has no value; write {name.text}: value")
        if token.text != "[":
            yield self._value(depth)
            return
        opening = self._take()
        while (token := self._peek()) is not None and token.text != "]":
            yield self._value(depth)
            token = self._peek()
            if token is not None and token.text == ",":
                self._next += 1
            elif token is not None and token.text != "]":
                raise FormatError(token.line, f"there is no comma between the members of {name.text}")
        if token is None:
            raise _not_closed(opening)
        self._next += 1

    def _value(self, depth: int) -> tuple[Value, int]:
        token = self._take()
        if token.text in ("{", "<"):
            return self.message(token, depth + 1), token.line
        if token.kind == "mark":
            raise FormatError(token.line, f"there is {token.text} where a value belongs")
        if token.kind == "word":
            return token.text, token.line
        parts = [_unescaped(token)]
        while (following := self._peek()) is not None and following.kind == "text":
            parts.append(_unescaped(self._take()))
        return "".join(parts), token.line

    def _peek(self) -> _Token | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def _take(self) -> _Token:
        token = self._tokens[self._next]
        self._next += 1
        return token


def _not_closed(opening: _Token) -> FormatError:
    return FormatError(opening.line, f"the {opening.text} is not closed; a {_CLOSING[opening.text]} is missing")


def _unescaped(token: _Token) -> str:
    try:
        return bytes(text_encoding.CUnescape(token.text[1:-1])).decode()
    except ValueError:
        raise FormatError(token.line, f"{token.text} has a \\ that begins no escape; write it twice") from None
