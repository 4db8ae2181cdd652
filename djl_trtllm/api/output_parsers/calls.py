"""Tool calls in generated text, in any format that is a row of `formats.toml`."""

import json
import re
from collections.abc import Container, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from djl_trtllm.api.output_parsers import reader
from djl_trtllm.api.output_parsers.formats import Call, Parameter, ToolFormat

_ARGUMENTS = ("arguments", "parameters")
_B = f"[{reader.BLANKS}]*"
_KEYS = frozenset({"name", *_ARGUMENTS, "id", "type"})
"""The keys of a call. An object with another key is not a call."""
_USUAL_HEAD = re.compile(
    rf'{_B}{{{_B}"name"{_B}:{_B}"([\w.-]+)"{_B},{_B}"(?:{"|".join(_ARGUMENTS)})"{_B}:{_B}(?={{)', re.ASCII
)
"""The usual beginning of a call that is one JSON object: one match finds it, and it need not be read in steps."""
_BEGUN_LIST = re.compile(r"[ \t\r\n]*(?:\[(?!TOOL_CALLS\])|,)")
_MOST_LEVELS = 64
_TEXT = frozenset({"string"})
_ELEMENT_END = reader.Markers(">")
_OPENING = {"{": "}", "[": "]", "(": ")"}
_KEY_ENDS = reader.Markers(*",:={}[]()\"'<")
_WORD_ENDS = reader.Markers(*reader.BLANKS, *_KEY_ENDS.texts)
_PARTS_OF_STRINGS = {quote: reader.part_of_string(quote) for quote in reader.PYTHON_QUOTES}


@dataclass(slots=True)
class _Level:
    """An object or a list that a literal is in."""

    closer: str
    is_object: bool
    items: int = 0
    keyed: bool = False
    """A key has been written, and its value is next."""

    @property
    def takes_value(self) -> bool:
        return self.keyed or not self.is_object

    def before(self) -> str:
        """The separator before the next key or value."""
        return ", " if self.items and not self.keyed else ""

    def after(self) -> str:
        """The separator after the key or value that has been written."""
        self.keyed = not self.takes_value
        self.items += not self.keyed
        return ": " if self.keyed else ""

    def complete(self) -> str:
        """The text that completes a key without a value."""
        return "null" + self.after() if self.keyed else ""


class CallParser(reader.Reader):
    """Content with calls. `tools` are the parameters' schemas of the request's functions, by name.

    A call starts when its name is known and its arguments begin; what goes wrong from then on ends it. A call that the
    model did not close is a call.
    """

    def __init__(self, own: ToolFormat, tools: Mapping[str, Any]) -> None:
        super().__init__()
        self.format = own
        self.tools = tools
        self._types: dict[tuple[str, str], frozenset[str]] = {}
        self._held: list[str] | None = None
        """Markup before the call that is being read, and what is read of it: content if it is no call after all."""
        self._started = False
        self._completed_by: tuple[str, ...] | None = None
        """Markers that may follow, where the parameters of a call may be complete."""

    def take(self, end: int) -> str:
        taken = self.text[self.at : end]
        self.at = end
        if self._held is not None:
            self._held.append(taken)
        return taken

    def read(self) -> reader.Waiting:
        own = self.format
        openers = own.openers
        try:
            if own.alone or own.forced:
                yield from self._alone()
            while True:
                self._started, self._held = False, None
                blanks, opener = yield from self.up_to(openers, reader.Content)
                if opener != own.section:
                    self.at -= len(opener)
                self._held = [blanks, opener] if opener == own.section else [blanks]
                yield from self._calls(None)
        except reader.EndOfText:
            self._end()

    def _end(self) -> None:
        rest, held = self.text[self.at :], "".join(self._held or ())
        if self._started:
            ends = self._completed_by
            if ends is not None and any(marker.startswith(rest.strip(reader.BLANKS)) for marker in ends):
                self.say("}", reader.CallArguments)
        elif not self.format.forced or not _BEGUN_LIST.match(held):  # of a forced call nothing else is content
            self.say(held + rest)

    def _alone(self) -> reader.Waiting:
        """Read calls at the beginning of an output. Few blanks before them are markup."""
        (call,), self._held = self.format.call, []
        while not self.text[self.at :].strip(reader.BLANKS) and len(self.text) <= reader.MOST_BLANKS:
            yield from self.more()
        begin = len(self.text) - len(self.text.lstrip(reader.BLANKS))
        if begin <= reader.MOST_BLANKS and self.text.startswith(call.opener or "{", begin):
            yield from self._calls(None if self.format.forced else self.tools)

    def _calls(self, names: Container[str] | None) -> reader.Waiting:
        """Read calls and the markers between and after them. Held text is content if there is no call."""
        found = False
        while (call := (yield from self._choose())) and (yield from self._several(call, names)):
            found = True
            if not call.listed:
                self._repeated(call)
            yield from self.skip_blanks()
            if call.listed or not (call.opener or self.format.between):
                break
            self._held = []
            while self.format.between and (yield from self.read_if(self.format.between)):
                between, self._held = self._held, None
                yield from self.skip_blanks()
                self._held = between
            names = self.tools if self.format.alone else None
        if self._held and self.format.close and (yield from self.stands(self.format.close)):
            self._held, found = None, True  # a section without calls
        self._give_up()
        if found and self.format.close:
            yield from self._optional(self.format.close)
        if found:
            yield from self.skip_blanks()

    def _choose(self) -> Generator[None, None, Call | None]:
        """The kind of call that begins here. Its opener is read."""
        char = yield from self.skip_blanks()
        for call in self.format.call:
            if call.opener and (yield from self.read_if(call.opener)):
                return call
            if not call.opener and (call.name_ends or char == "{"):
                return call
        return None

    def _several(self, call: Call, names: Container[str] | None) -> Generator[None, None, bool]:
        """Read a call, or a list of calls after its opener. False if there is none: the text was content."""
        found = yield from self._one(call, names)
        while found and call.listed:
            self._repeated(call)
            if (yield from self.skip_blanks()) != ",":
                yield from self._optional("]")
                break
            self._held = []
            self.take(self.at + 1)
            if not (yield from self._one(call, None)):
                break
        return found

    def _repeated(self, call: Call) -> None:
        """Read more calls of this kind, as long as they are whole and in their usual form."""
        usual = self.format.usual(call)
        names = self.tools if self.format.alone and not call.listed else None
        events, self.at = usual.read(self.text, self.at, self._types_of, names)
        self.events += events

    def _one(self, call: Call, names: Container[str] | None) -> Generator[None, None, bool]:
        self._started = False
        try:
            if call.name_ends is None:
                yield from self._object(names)
            else:
                yield from self._named(call, call.name_ends, names)
        except reader.NoMatch:
            if not self._started:
                self._give_up()
                return False
        for marker in call.closers:
            yield from self._optional(marker)
        return True

    def _give_up(self) -> None:
        """Pass the held text on as content."""
        if self._held:
            self.say("".join(self._held))
            self._started = False
        self._held = None

    def _start(self, name: str, arguments: str = "") -> None:
        self._started, self._held = True, None
        self.events.append(reader.CallStart(name))
        self.say(arguments, reader.CallArguments)

    def _optional(self, marker: str) -> Generator[None, None, bool]:
        """Read a marker, if it is next. Blanks before it are read in any case."""
        yield from self.skip_blanks()
        return (yield from self.read_if(marker))

    def _expect(self, marker: str) -> reader.Waiting:
        if not (yield from self._optional(marker)):
            raise reader.NoMatch

    # -- calls whose name stands before the arguments ------------------------------------------------------------------

    def _named(self, call: Call, ends: reader.Markers, names: Container[str] | None) -> reader.Waiting:
        head, end = yield from self.head(ends)
        found = self.format.name.fullmatch(head.strip(reader.BLANKS))
        if found is None or (call.middle and end != call.middle):
            raise reader.NoMatch
        name = found[found.lastindex or 0]
        if names is not None and name not in names:
            raise reader.NoMatch
        if not call.middle:  # what is next belongs to the arguments
            self.at -= len(end)
            if self._held:
                self._held.pop()
        if call.body == "json":
            if (yield from self.skip_blanks()) == "{":
                self._start(name)
                yield from self.json(streamed=True)
            elif call.closers and (yield from self.stands(call.closers[0])):
                self._start(name, "{}")
            else:
                raise reader.NoMatch
            return
        self._start(name)
        parameter, schema = self.format.parameter, self.tools.get(name)
        if call.body == "literal" or parameter is None:
            yield from self._literal(call.closers[0])
        elif call.body == "elements":
            yield from self._elements(parameter, schema, schema, 0)
        else:
            yield from self._parameters(call, parameter, name)

    def _parameters(self, call: Call, parameter: Parameter, name: str) -> reader.Waiting:
        if (yield from self.skip_blanks()) == "{":
            yield from self.json(streamed=True)
            return
        key_end, *inner = parameter.inner
        key_ends = reader.markers(key_end)
        own, end = self.format, parameter.closer
        follow = (parameter.opener, *call.closers, *filter(None, (own.close, own.section, call.opener)))
        after = {end: follow}
        if parameter.on_lines:  # models forget the last closer
            after |= {f"\n{end}": follow, f"\n{call.closers[0]}": (own.close,)}
        self.say("{", reader.CallArguments)
        before = ""
        try:
            self._completed_by = call.closers
            while (yield from self._optional(parameter.opener)):
                self._completed_by = None
                key = (yield from self.head(key_ends))[0].strip(reader.BLANKS)
                types = self._types_of(name, key)
                if parameter.text_end:
                    is_text = (yield from self.head(reader.markers(parameter.text_end)))[0]
                    types = _TEXT if is_text == "true" else frozenset()
                for marker in inner:
                    yield from self._expect(marker)
                self.say(f"{before}{reader.quoted(key)}: ", reader.CallArguments)
                if parameter.on_lines:
                    yield from self.read_if("\n")
                yield from self._value(types, after)
                before, self._completed_by = ", ", call.closers
        except reader.NoMatch:
            pass
        self._completed_by = None
        self.say("}", reader.CallArguments)

    def _types_of(self, name: str, key: str) -> frozenset[str]:
        """The JSON types of a parameter, none if its function's schema does not say."""
        schema = self.tools.get(name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if not isinstance(properties, Mapping) or key not in properties:
            return frozenset()
        if (name, key) not in self._types:
            self._types[name, key] = reader.types_in(properties[key], schema)
        return self._types[name, key]

    def _value(self, types: frozenset[str], after: Mapping[str, tuple[str, ...]]) -> reader.Waiting:
        """Read a value and the marker at its end: one of `after`, if one of the texts there follows it.

        A text is passed on as it comes, a value that may be JSON at its end.
        """
        ends = reader.markers(*after)
        pieces: list[str] = []
        is_text = types == _TEXT
        if is_text:
            self.say('"', reader.CallArguments)
        try:
            while True:
                found = ends.find(self.text, self.at)
                pieces.append(self.take(ends.begun(self.text, self.at) if found is None else found.start()))
                if found is not None and not (yield from self._is_followed(len(found[0]), after[found[0]])):
                    pieces.append(self.take(self.at + len(found[0])))
                elif found is not None:
                    self.take(self.at + len(found[0]))
                    break
                else:
                    if is_text:
                        self.say(reader.quoted("".join(pieces))[1:-1], reader.CallArguments)
                        pieces.clear()
                    yield from self.more()
        except reader.EndOfText:
            self.say("".join(pieces), reader.CallArguments)
            raise
        last = "".join(pieces)
        self.say(reader.quoted(last)[1:] if is_text else reader.as_json(last, types), reader.CallArguments)

    def _is_followed(self, length: int, after: tuple[str, ...]) -> Generator[None, None, bool]:
        """Whether one of `after` stands behind the next characters, or the output ends there."""
        while after:
            begin = self.at + length
            blanks = self.text[begin : begin + reader.MOST_BLANKS + 1]
            begin += len(blanks) - len(blanks.lstrip(reader.BLANKS))
            if begin - self.at - length > reader.MOST_BLANKS:
                return False
            rest = self.text[begin : begin + reader.LONGEST_HEAD]
            if any(rest.startswith(marker) for marker in after):
                return True
            if not any(marker.startswith(rest) for marker in after):
                return False
            try:
                yield from self.more()
            except reader.EndOfText:
                return True
        return True

    def _elements(self, parameter: Parameter, schema: Any, root: Any, level: int) -> reader.Waiting:
        """Read elements as an object, or as a list if they are items of one."""
        begin, listed = "{", False
        try:
            while (yield from self.skip_blanks()) and not (yield from self.stands(parameter.closer)):
                yield from self._expect(parameter.opener)
                key = (yield from self.head(_ELEMENT_END))[0].strip(reader.BLANKS)
                if begin == "{" and level and key == "item" and "object" not in reader.types_in(schema, root):
                    begin, listed = "[", True
                self.say(begin if listed else f"{begin}{reader.quoted(key)}: ", reader.CallArguments)
                begin, inner = ", ", reader.member_of(schema, None if listed else key, root)
                if level < _MOST_LEVELS and (yield from self._has_elements(parameter)):
                    yield from self._elements(parameter, inner, root, level + 1)
                    yield from self._optional(f"{parameter.closer}{key}>")
                else:
                    yield from self._value(reader.types_in(inner, root), {f"{parameter.closer}{key}>": ()})
        except reader.NoMatch:
            pass
        self.say(("{" if begin == "{" else "") + ("]" if listed else "}"), reader.CallArguments)

    def _has_elements(self, parameter: Parameter) -> Generator[None, None, bool]:
        if not (yield from self._is_followed(0, (parameter.opener,))):
            return False
        yield from self.skip_blanks()
        return not (yield from self.stands(parameter.closer))

    # -- keys and values as in Python or Gemma -------------------------------------------------------------------------

    def _literal(self, closer: str) -> reader.Waiting:
        """Read keys and values up to `closer`, as an object."""
        levels: list[_Level] = []
        try:
            self._open(levels, closer, is_object=True)
            while levels:
                level, char = levels[-1], (yield from self.skip_blanks())
                if quote := (yield from self._quote(char)):
                    self.say(level.before(), reader.CallArguments)
                    yield from self._string(quote)
                    self.say(level.after(), reader.CallArguments)
                elif char in _OPENING and level.takes_value:
                    self.say(level.before(), reader.CallArguments)
                    self.take(self.at + 1)
                    self._open(levels, _OPENING[char], is_object=char == "{")
                elif char in ",:=":
                    self.take(self.at + 1)
                    self.say(level.complete() if char == "," else "", reader.CallArguments)
                elif char == level.closer:
                    self.take(self.at + 1)
                    self._close(levels)
                else:
                    text, end = yield from self.head(_WORD_ENDS if level.takes_value else _KEY_ENDS)
                    self.at -= len(end)
                    if not text:
                        raise reader.NoMatch
                    shown = reader.word(text) if level.takes_value else reader.quoted(text.strip(reader.BLANKS))
                    self.say(level.before() + shown + level.after(), reader.CallArguments)
        except reader.NoMatch:
            while levels:
                self._close(levels)

    def _open(self, levels: list[_Level], closer: str, *, is_object: bool) -> None:
        levels.append(_Level(closer, is_object))
        self.say("{" if is_object else "[", reader.CallArguments)

    def _close(self, levels: list[_Level]) -> None:
        level = levels.pop()
        self.say(level.complete() + ("}" if level.is_object else "]"), reader.CallArguments)
        if levels:
            self.say(levels[-1].after(), reader.CallArguments)

    def _quote(self, char: str) -> Generator[None, None, str]:
        """Read what stands around the string that begins here, "" if none does."""
        for quote in self.format.quotes:
            if quote[0] == char and (yield from self.read_if(quote)):
                return quote
        return ""

    def _string(self, quote: str) -> reader.Waiting:
        """Read a string. One in Python's quotes has escape sequences, of which unknown ones stand for themselves."""
        part, ends = _PARTS_OF_STRINGS.get(quote), reader.markers(quote)
        self.say('"', reader.CallArguments)
        while True:
            if part is None:
                found = ends.find(self.text, self.at)
                text = self.take(ends.begun(self.text, self.at) if found is None else found.start())
                self.say(reader.quoted(text)[1:-1], reader.CallArguments)
            elif (matched := part.match(self.text, self.at)) is not None:
                self.say(reader.unescaped(self.take(matched.end())), reader.CallArguments)
            if self.text.startswith(quote, self.at):
                self.take(self.at + len(quote))
                self.say('"', reader.CallArguments)
                return
            yield from self.more()

    # -- calls as one JSON object --------------------------------------------------------------------------------------

    def _object(self, names: Container[str] | None) -> reader.Waiting:
        """Read an object with the name and the arguments. Raises NoMatch where it cannot be one."""
        name = arguments = None
        if head := _USUAL_HEAD.match(self.text, self.at):
            name = _name(head[1], names)
            self.take(head.end())
            self._start(name)
            yield from self.json(streamed=True)
            mark = yield from self._mark(",}")
        else:
            mark = yield from self._mark("{")
        while mark != "}":
            if (yield from self.skip_blanks()) != '"' or (key := _json((yield from self.json()))) not in _KEYS:
                raise reader.NoMatch
            yield from self._mark(":")
            opening = yield from self.skip_blanks()
            if self._started:
                _json((yield from self.json()))
            elif key in _ARGUMENTS and name is not None and opening == "{":
                self._start(name)
                yield from self.json(streamed=True)
            else:
                value = _json(raw := (yield from self.json()))
                if key == "name":
                    name = _name(value, names)
                elif key in _ARGUMENTS:
                    arguments = _arguments(value, raw)
                if name is not None and arguments is not None:
                    self._start(name, arguments)
            mark = yield from self._mark(",}")
        if not self._started:
            self._start(_name(name, None), "{}")

    def _mark(self, expected: str) -> Generator[None, None, str]:
        if (char := (yield from self.skip_blanks())) not in expected:
            raise reader.NoMatch
        self.take(self.at + 1)
        return char


def _json(text: str) -> Any:
    """The value of a part of a call. Raises NoMatch if it is not JSON."""
    try:
        value = json.loads(text)
        if isinstance(value, str):
            value.encode()  # a lone surrogate cannot be sent
    except (ValueError, RecursionError):
        raise reader.NoMatch from None
    return value


def _name(value: Any, names: Container[str] | None) -> str:
    if not isinstance(value, str) or not value or (names is not None and value not in names):
        raise reader.NoMatch
    return value


def _arguments(value: Any, raw: str) -> str:
    """Arguments that are not streamed, as JSON text: of an object, of the text of an object, or of no arguments."""
    if value is None:
        return "{}"
    if not isinstance(value, (dict, str)):
        raise reader.NoMatch
    return raw if isinstance(value, dict) else value
