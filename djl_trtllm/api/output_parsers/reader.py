"""The events that parsers find, and the reader of text that is still arriving, with the values of arguments in it.

How a text is cut into pieces does not change what a parser finds. Text that is not what it looked like is content:
parsers do not raise, and only markup is left out.

A parser is a generator: it reads as if all text were there, and yields where it has to wait for more.
"""

import ast
import contextlib
import functools
import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple, TypeAlias

_LITERAL_END = re.compile(r"[\s,}\]<]")
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|["{}\[\]<]', re.DOTALL)
_REST_OF_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*(?P<end>"|\\\Z)', re.DOTALL)


class ValueEnd:
    """Finds the end of a JSON value that arrives in pieces. `first` is its first character.

    Only strings and brackets are looked at. A `<` outside strings is no JSON: the value ends there, `broken`.
    """

    def __init__(self, first: str) -> None:
        self._literal = first not in '"{['
        self._depth = 0
        self._quoted = self._escaped = self.broken = False

    def find(self, text: str, at: int) -> int | None:
        """Return the place in the next piece, from `at` on, where the value ends; None if it goes on."""
        if self._literal:
            end = _LITERAL_END.search(text, at)
            return end and end.start()
        if self._escaped and at < len(text):
            self._escaped, at = False, at + 1
        while self._quoted:
            string = _REST_OF_STRING.match(text, at)
            if string is None:
                return None
            if string["end"] == "\\":  # the last character, because none follows it
                self._escaped = True
                return None
            self._quoted, at = False, string.end()
            if not self._depth:
                return at
        for found in _STRING_OR_BRACKET.finditer(text, at):
            mark = found[0]
            if mark == '"':  # a string that goes on in the next piece
                self._quoted = True
                return self.find(text, found.end())
            if mark == "<":
                self.broken = True
                return found.start()
            self._depth += (mark in "{[") - (mark in "}]")
            if self._depth <= 0:
                return found.end()
        return None


_ENCODER = json.JSONEncoder(ensure_ascii=False)
"""`json.dumps` makes one for each call, which takes longer than encoding a short text."""


def quoted(text: str) -> str:
    """A text as JSON."""
    return _ENCODER.encode(text)


_HEX = "[0-9a-fA-F]"
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_LONGEST_OF_PYTHON = 1 << 16
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")


def word(text: str) -> str:
    """A value without quotes, as JSON: a number, one of Python's or JSON's three words, or otherwise a text."""
    if text in _WORDS or text in _WORDS.values():
        return _WORDS.get(text, text)
    return text if _NUMBER.fullmatch(text) else quoted(text)


_KNOWN = {"\\n": "\\n", "\\t": "\\t", "\\r": "\\r", "\\b": "\\b", "\\f": "\\f", "\\v": "\\u000b", "\\a": "\\u0007"}
_KNOWN |= {"\\\n": "", "\\\\": "\\\\", "\\'": "'", '\\"': '\\"', '"': '\\"', "\n": "\\n"}
"""Escape sequences of Python, and characters that JSON escapes, as they are in JSON."""
_DIGITS = {"x": 2, "u": 4, "U": 8}


def _sequences(unless: str) -> str:
    """A pattern of escape sequences; one of few digits only where `unless` does not follow: more may come."""
    short = {mark: f"{_HEX}{{{most}}}|{_HEX}{{0,{most - 1}}}(?!{unless})" for mark, most in _DIGITS.items()}
    return rf"\\(?:{'|'.join(f'{mark}(?:{digits})' for mark, digits in short.items())}|[^xuU])"


_SEQUENCE = _sequences(rf"{_HEX}|\Z")
_UNLIKE_JSON = re.compile(rf'{_sequences(_HEX)}|["\x00-\x1f]', re.DOTALL)


PYTHON_QUOTES = "'\""


def part_of_string(quote: str) -> re.Pattern[str]:
    """A pattern for the inside of a Python string, up to its end or to an escape sequence that is not complete yet."""
    other = rf"[^{quote}\\]*"
    return re.compile(f"{other}(?:{_SEQUENCE}{other})*", re.DOTALL)


def unescaped(text: str) -> str:
    """The inside of a Python string, as that of a JSON string. Unknown sequences stand for themselves."""
    return _UNLIKE_JSON.sub(lambda found: _KNOWN.get(found[0]) or _rare(found[0]), text)


def _rare(text: str) -> str:
    mark, digits = text[1:2], text[2:]
    if len(digits) == _DIGITS.get(mark) and (code := int(digits, 16)) <= sys.maxunicode:
        return json.dumps(chr(code))[1:-1]
    return "" if text == "\\\n" else quoted(text)[1:-1]


def as_json(text: str, types: frozenset[str]) -> str:
    """A value as JSON of one of these JSON types (of any, if there are none); otherwise the value as a JSON text."""
    text = text.strip()
    if not text and types and "string" not in types:
        return "[]" if "array" in types else "{}" if "object" in types else "null"
    if text in _WORDS and (not types or types & {"boolean", "null"}):
        return _WORDS[text]
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        return _of_python(text) if types & {"array", "object"} else quoted(text)
    if "string" not in types or types & _types_of(value):
        return text
    return quoted(text)


def _of_python(text: str) -> str:
    """A list or an object as Python prints it, as JSON; other text as a JSON text."""
    with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        if text[0] in "[{" and "\\" not in text and len(text) <= _LONGEST_OF_PYTHON:
            return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    return quoted(text)


def _refuse(constant: str) -> None:
    raise ValueError(constant)


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _types_of(value: Any) -> set[str]:
    kind = _TYPES.get(type(value), "null")
    return {kind, "number"} if kind == "integer" else {kind}


def types_in(schema: Any, root: Any) -> frozenset[str]:
    """The JSON types that a schema allows; none if it does not say. Each part of the schema is looked at once."""
    types: set[str] = set()
    waiting, seen = [schema], set()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        own = part.get("type")
        types.update(name for name in (own if isinstance(own, list) else [own]) if isinstance(name, str))
        if "const" in part:
            types |= _types_of(part["const"])
        for keyword in ("enum", "anyOf", "oneOf", "allOf"):
            values = part.get(keyword)
            if isinstance(values, list) and keyword == "enum":
                types.update(*map(_types_of, values))
            elif isinstance(values, list):
                waiting += values
        if isinstance(part.get("$ref"), str):
            waiting.append(referred(part["$ref"], root))
    return frozenset(types)


def referred(reference: str, root: Any) -> Any:
    """The schema to which `#/$defs/name` refers, None if it is not in this one."""
    if not reference.startswith("#"):
        return None
    for name in reference.removeprefix("#").strip("/").split("/"):
        root = root.get(name) if isinstance(root, Mapping) else None
    return root


def member_of(schema: Any, key: str | None, root: Any) -> Any:
    """The schema of an object's member, or of a list's items (None), where `schema` says so without alternatives."""
    if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        schema = referred(schema["$ref"], root)
    if not isinstance(schema, Mapping):
        return None
    if key is None:
        return schema.get("items")
    properties = schema.get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None


BLANKS = " \t\r\n"
_BLANKS = re.compile(f"[{BLANKS}]*")
MOST_BLANKS = 256
"""The most characters of white space before markup that count as part of the markup."""
LONGEST_HEAD = 512
"""The most characters between two markers where a name, a key or a word is expected."""


class Content(NamedTuple):
    """Text of the answer."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model wrote for itself."""

    text: str


class CallStart(NamedTuple):
    """A call of the function `name` begins. Its arguments follow."""

    name: str


class CallArguments(NamedTuple):
    """More of the arguments, which are JSON as text, of the call that started last."""

    text: str


Event: TypeAlias = Content | Reasoning | CallStart | CallArguments
Kind: TypeAlias = type[Content] | type[Reasoning] | type[CallArguments]
Waiting: TypeAlias = Generator[None, None, None]


class OutputParser(ABC):
    """One sequence. The caller has the text as it comes, and `finish` at its end."""

    @abstractmethod
    def feed(self, text: str) -> list[Event]:
        """Take in more text and return the events that it completes."""

    def finish(self) -> list[Event]:
        """Return the events of text that was held back, because it might have become something else."""
        return []


class PlainParser(OutputParser):
    """Passes all text on as content."""

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []


class NamedParser(OutputParser):
    """Passes all text on as the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        events: list[Event] = [] if self._started else [CallStart(self._name)]
        self._started = True
        return [*events, CallArguments(text)]


class EndOfText(Exception):
    """The output has ended where a parser waits for more of it."""


class NoMatch(Exception):
    """The text that follows does not have the form that is being read."""


class Markers:
    """Texts to look for, none of which begins another one."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.longest = max(map(len, texts))
        begun = {text[:size] for text in texts for size in range(1, len(text))}
        self._whole = re.compile(_any_of(texts))
        self._begun = re.compile(rf"(?:{_any_of(begun)})\Z") if begun else None

    def find(self, text: str, at: int) -> re.Match[str] | None:
        """The first marker from `at` on."""
        return self._whole.search(text, at)

    def begun(self, text: str, at: int) -> int:
        """The place from which the text, which has no whole marker, may be the beginning of a marker."""
        found = self._begun and self._begun.search(text, max(at, len(text) - self.longest + 1))
        return found.start() if found else len(text)


@functools.lru_cache(256)
def markers(*texts: str) -> Markers:
    """The `Markers` of these texts: one object for each set of texts that a format uses."""
    return Markers(*texts)


def _any_of(texts: tuple[str, ...] | set[str]) -> str:
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))


class Reader(OutputParser):
    """A parser that reads `text` from `at` on. Each wait for more moves the text: no other place is valid after it."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.events: list[Event] = []
        self._ended = False
        self._steps = self.read()

    @abstractmethod
    def read(self) -> Waiting:
        """Read all of the output."""

    def feed(self, text: str) -> list[Event]:
        if text:
            self.text = self.text[self.at :] + text
            self.at = 0
            next(self._steps)
        return self._take_events()

    def finish(self) -> list[Event]:
        self._ended = True
        next(self._steps, None)
        return self._take_events()

    def more(self) -> Waiting:
        """Wait for more text. Raises EndOfText if there is none."""
        if not self._ended:
            yield
        if self._ended:
            raise EndOfText

    def say(self, text: str, kind: Kind = Content) -> None:
        if text:
            self.events.append(kind(text))

    def take(self, end: int) -> str:
        """Read up to the place `end`, and return that text."""
        taken = self.text[self.at : end]
        self.at = end
        return taken

    def skip_blanks(self) -> Generator[None, None, str]:
        """Read blanks up to other text, whose first character is returned."""
        while True:
            text, at = self.text, self.at
            if at < len(text):
                if (char := text[at]) not in BLANKS:
                    return char
                blanks = _BLANKS.match(text, at)
                assert blanks is not None
                self.take(blanks.end())
            else:
                yield from self.more()

    def stands(self, marker: str) -> Generator[None, None, bool]:
        """Whether a marker is next. The marker is not read."""
        while len(rest := self.text[self.at : self.at + len(marker)]) < len(marker) and marker.startswith(rest):
            yield from self.more()
        return rest == marker

    def read_if(self, marker: str) -> Generator[None, None, bool]:
        """Read a marker, if it is next."""
        found = yield from self.stands(marker)
        if found:
            self.take(self.at + len(marker))
        return found

    def up_to(self, markers: Markers, kind: Kind) -> Generator[None, None, tuple[str, str]]:
        """Read up to a marker; the text before it is `kind`. Returns the blanks before the marker, and the marker."""
        while (found := markers.find(self.text, self.at)) is None:
            self.say(self.take(self._blanks_start(markers.begun(self.text, self.at))), kind)
            yield from self.more()
        self.say(self.take(self._blanks_start(found.start())), kind)
        blanks = self.take(found.start())
        return blanks, self.take(found.end())

    def head(self, ends: Markers) -> Generator[None, None, tuple[str, str]]:
        """Read a short text and the marker after it. Raises NoMatch if no marker comes soon."""
        while (found := ends.find(self.text, self.at)) is None:
            if len(self.text) - self.at > LONGEST_HEAD + ends.longest:
                raise NoMatch
            yield from self.more()
        if found.start() - self.at > LONGEST_HEAD:
            raise NoMatch
        head = self.take(found.start())
        return head, self.take(found.end())

    def json(self, *, streamed: bool = False) -> Generator[None, None, str]:
        """Read a JSON value; `streamed`: it is arguments, and passed on as it comes. Raises NoMatch if it is none."""
        first = yield from self.skip_blanks()
        if first in ",:}]<":
            raise NoMatch
        pieces, end = [], ValueEnd(first)
        while True:
            found = end.find(self.text, self.at)
            piece = self.take(len(self.text) if found is None else found)
            if streamed:
                self.say(piece, CallArguments)
            else:
                pieces.append(piece)
            if end.broken:
                raise NoMatch
            if found is not None:
                return "".join(pieces)
            yield from self.more()

    def _blanks_start(self, end: int) -> int:
        """The place where the blanks before `end` begin."""
        tail = self.text[max(self.at, end - MOST_BLANKS) : end]
        return end - len(tail) + len(tail.rstrip(BLANKS))

    def _take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events
