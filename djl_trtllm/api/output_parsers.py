"""Find tool calls and reasoning in generated text, while it arrives.

How a text is cut into pieces does not change what a parser finds. Text that is not what it looked like is content:
parsers do not raise, and only markup is left out.

A parser is a generator: it reads as if all text were there, and yields where it has to wait for more.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Set
from typing import Any, NamedTuple, TypeAlias

from djl_trtllm.config import ReasoningFormat, ToolCallFormat

BLANKS = " \t\r\n"
MOST_BLANKS = 256
"""Characters of white space before markup that belong to it."""


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
Waiting: TypeAlias = Generator[None, None, None]


class OutputParser(ABC):
    """One sequence. The caller has the text as it comes, and `finish` at its end."""

    @abstractmethod
    def feed(self, text: str) -> list[Event]:
        """Take in more text and return the events that it completes."""

    @abstractmethod
    def finish(self) -> list[Event]:
        """Return the events of text that was held back, because it might have become something else."""


class PlainParser(OutputParser):
    """All text is content."""

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class _EndOfText(Exception):
    """The output has ended where a parser waits for more of it."""


class _NoCall(Exception):
    """What stands here cannot be part of a call."""


class Reader(OutputParser):
    """A parser that reads from `rest`, the text that arrived and is not read yet."""

    def __init__(self) -> None:
        self.rest = ""
        self.events: list[Event] = []
        self._ended = False
        self._steps = self.read()

    @abstractmethod
    def read(self) -> Waiting:
        """Read all of the output."""

    def feed(self, text: str) -> list[Event]:
        self.rest += text
        if text:
            next(self._steps)
        return self._take_events()

    def finish(self) -> list[Event]:
        self._ended = True
        next(self._steps, None)
        return self._take_events()

    def more(self) -> Waiting:
        """Wait for more text. Raises _EndOfText if there is none."""
        if not self._ended:
            yield
        if self._ended:
            raise _EndOfText

    def up_to(self, marker: str, kind: type[Content | Reasoning]) -> Generator[None, None, str]:
        """Read a marker and the text before it, which is said. Returns the blanks before the marker, part of it."""
        while marker not in self.rest:
            cut = safe_end(self.rest, marker)
            self.say(self.rest[:cut], kind)
            self.rest = self.rest[cut:]
            yield from self.more()
        before, _, self.rest = self.rest.partition(marker)
        cut = blanks_start(before)
        self.say(before[:cut], kind)
        return before[cut:]

    def say(self, text: str, kind: type[Content | Reasoning] = Content) -> None:
        if text:
            self.events.append(kind(text))

    def skip_blanks(self) -> Waiting:
        """Read blanks up to other text."""
        while not (rest := self.rest.lstrip(BLANKS)):
            self.rest = ""
            yield from self.more()
        self.rest = rest

    def _take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events


def safe_end(text: str, marker: str) -> int:
    """Return the length of the text's beginning that cannot belong to a `marker`, nor to the blanks before one."""
    longest = min(len(marker) - 1, len(text))
    if marker[0] not in text[len(text) - longest :]:
        return blanks_start(text)
    part = next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
    return blanks_start(text[: len(text) - part])


def blanks_start(text: str) -> int:
    """Return the place where the blanks at the end of a text begin."""
    return max(len(text.rstrip(BLANKS)), len(text) - MOST_BLANKS)


_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", *_ARGUMENTS, "id", "type"})
"""Another key means that the object is no call."""
_LITERAL_END = re.compile(r"[\s,}\]<]")


class ValueEnd:
    """Finds the end of a JSON value that arrives in pieces. `first` is its first character.

    Only strings and brackets are looked at. A `<` outside strings is no JSON: the value ends there, `broken`.
    """

    def __init__(self, first: str) -> None:
        self._literal = first not in '"{['
        self._depth = 0
        self._quoted = self._escaped = self.broken = False

    def find(self, text: str) -> int | None:
        """Return the place in the next piece where the value ends; None if it goes on."""
        if self._literal:
            end = _LITERAL_END.search(text)
            return end and end.start()
        for at, char in enumerate(text):
            if self._quoted:
                self._quoted = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == "<":
                self.broken = True
                return at
            else:
                self._quoted = char == '"'
                self._depth += (char in "{[") - (char in "}]")
            if not self._quoted and not self._depth:
                return at + 1
        return None


class CallParser(Reader):
    """Content in which calls begin with `opener`. A subclass reads what stands after the opener.

    A call starts when its name is known and its arguments begin; what goes wrong from then on ends it.
    """

    opener: str

    def __init__(self) -> None:
        super().__init__()
        self.held = ""
        """Markup before the call that is being read, and what is read of it: content if it turns out to be no call."""
        self._started = False
        self._after = False

    def read(self) -> Waiting:
        try:
            yield from self.begin()
            while True:
                self._started = self._after = False
                self.held = (yield from self.up_to(self.opener, Content)) + self.opener
                yield from self.calls()
        except _EndOfText:
            if not self._after:
                self.say(self.held + self.rest)

    def begin(self) -> Waiting:
        """Read what only the beginning of an output may have."""
        yield from ()

    @abstractmethod
    def calls(self) -> Waiting:
        """Read what stands after the opener, up to further text."""

    def give_up(self) -> None:
        """What is held is content."""
        self.say(self.held)
        self.held = ""
        self._after = False

    def call(self, names: Set[str] | None = None) -> Generator[None, None, bool]:
        """Read a call, if it is one of `names`. False if there is none: what was held is content."""
        self._started = self._after = False
        try:
            yield from self._members(names)
        except _NoCall:
            if not self._started:
                self.give_up()
        self._after = self._started
        return self._started

    def arguments(self, name: str) -> Waiting:
        """Read the arguments alone, of a function whose name stood before."""
        self._start(name)
        with contextlib.suppress(_NoCall):
            yield from self._value(streamed=True)
        self._after = True

    def peek(self) -> Generator[None, None, str]:
        """The next character that is no blank. Blanks before it are read."""
        while not (rest := self.rest.lstrip(BLANKS)):
            self.take(len(self.rest))
            yield from self.more()
        self.take(len(self.rest) - len(rest))
        return rest[0]

    def take(self, length: int) -> str:
        """Read some characters."""
        taken, self.rest = self.rest[:length], self.rest[length:]
        if not self._started:
            self.held += taken
        return taken

    def _members(self, names: Set[str] | None) -> Waiting:
        """Read an object with the name and the arguments. Raises _NoCall where it cannot be one."""
        name = arguments = None
        yield from self._mark("{")
        mark = yield from self.peek()
        while mark != "}":
            if (yield from self.peek()) != '"' or (key := _json((yield from self._value()))) not in _KEYS:
                raise _NoCall
            yield from self._mark(":")
            opening = yield from self.peek()
            if key in _ARGUMENTS and name is not None and opening == "{" and not self._started:
                self._start(name)
                yield from self._value(streamed=True)
            else:
                value = _json(raw := (yield from self._value()))
                if key == "name" and not self._started:
                    name = _name(value, names)
                elif key in _ARGUMENTS and not self._started:
                    arguments = _arguments(value, raw)
                if name is not None and arguments is not None and not self._started:
                    self._start(name, arguments)
            mark = yield from self._mark(",}")
        if not self._started:
            self._start(_name(name, None), "{}")

    def _start(self, name: str, arguments: str = "") -> None:
        self._started, self.held = True, ""
        self.events.append(CallStart(name))
        if arguments:
            self.events.append(CallArguments(arguments))

    def _mark(self, expected: str) -> Generator[None, None, str]:
        if (yield from self.peek()) not in expected:
            raise _NoCall
        return self.take(1)

    def _value(self, *, streamed: bool = False) -> Generator[None, None, str]:
        """Read a JSON value; `streamed`: it is arguments, and passed on as it comes. Raises _NoCall if it is none."""
        first = yield from self.peek()
        if first in ",:}]<":
            raise _NoCall
        value, end = "", ValueEnd(first)
        while True:
            found = end.find(self.rest)
            piece = self.take(len(self.rest) if found is None else found)
            value += piece
            if streamed and piece:
                self.events.append(CallArguments(piece))
            if end.broken:
                raise _NoCall
            if found is not None:
                return value
            yield from self.more()


def _json(text: str) -> Any:
    """A part of a call. Raises _NoCall if it is no JSON."""
    try:
        value = json.loads(text)
        if isinstance(value, str):
            value.encode()  # a lone surrogate cannot be sent
    except (ValueError, RecursionError):
        raise _NoCall from None
    return value


def _name(value: Any, names: Set[str] | None) -> str:
    if not isinstance(value, str) or not value or (names is not None and value not in names):
        raise _NoCall
    return value


def _arguments(value: Any, raw: str) -> str:
    """Arguments that are not streamed: an object, the text of one, or none."""
    if value is None:
        return "{}"
    if not isinstance(value, (dict, str)):
        raise _NoCall
    return raw if isinstance(value, dict) else value


_CALL_OPEN, _CALL_CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(CallParser):
    """The calls of Hermes 2 Pro, Qwen 2.5, Qwen 3 and many others: `<tool_call>{"name", "arguments"}</tool_call>`.

    A call that the model did not close is a call.
    """

    opener = _CALL_OPEN

    def calls(self) -> Waiting:
        if not (yield from self.call()):
            return
        yield from self.skip_blanks()
        while not self.rest.startswith(_CALL_CLOSE) and _CALL_CLOSE.startswith(self.rest):
            yield from self.more()
        self.rest = self.rest.removeprefix(_CALL_CLOSE)
        yield from self.skip_blanks()


_PYTHON_TAG = "<|python_tag|>"


class Llama3JsonParser(CallParser):
    """The calls of Llama 3: `{"name", "parameters"}`, after `<|python_tag|>` or alone, several parted by `;` or lines.

    Without the tag, only an answer that begins with a call of one of `names` is one.
    """

    opener = _PYTHON_TAG

    def __init__(self, names: Set[str]) -> None:
        super().__init__()
        self._names = names

    def begin(self) -> Waiting:
        while (blanks := len(self.rest) - len(self.rest.lstrip(BLANKS))) == len(self.rest) <= MOST_BLANKS:
            yield from self.more()
        if blanks <= MOST_BLANKS and self.rest[blanks] == "{":
            yield from self._several(self._names)

    def calls(self) -> Waiting:
        yield from self._several(None)

    def _several(self, names: Set[str] | None) -> Waiting:
        found = yield from self.call(names)
        while found:
            while not (rest := self.rest.lstrip(BLANKS + ";")):
                yield from self.more()
            self.held, self.rest = self.rest[: len(self.rest) - len(rest)], rest
            if not rest.startswith("{"):
                self.held = self.held.strip(BLANKS)
                self.give_up()
                return
            found = yield from self.call(self._names)


_MISTRAL_MARKERS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_HEAD = re.compile(r"\s*([\w.-]{1,256})\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?")
_LONGEST_HEAD = 512


class CallListParser(CallParser):
    """Calls in a JSON list."""

    opener = _MISTRAL_MARKERS[0]

    def calls(self) -> Waiting:
        if (yield from self.peek()) == "[":
            self.take(1)
            found = yield from self.call()
        else:
            found = yield from self.other()
        while found:
            yield from self.skip_blanks()
            if not self.rest.startswith(","):
                self.rest = self.rest.removeprefix("]")
                yield from self.skip_blanks()
                return
            self.held, self.rest = ",", self.rest[1:]
            found = yield from self.call()

    def other(self) -> Generator[None, None, bool]:
        """Read what stands after an opener without a list. False if it is no call."""
        yield from ()
        self.give_up()
        return False


class MistralParser(CallListParser):
    """The calls of Mistral's models: `[TOOL_CALLS][{"name", "arguments"}, ...]` or `[TOOL_CALLS]NAME[ARGS]{...}`."""

    def other(self) -> Generator[None, None, bool]:
        if self.rest.startswith("{"):
            return (yield from self.call())
        while (at := self.rest.find("{")) < 0 and len(self.rest) <= _LONGEST_HEAD:
            yield from self.more()
        head = _HEAD.fullmatch(self.rest, 0, at) if 0 <= at <= _LONGEST_HEAD else None
        if head is None:
            self.give_up()
            return False
        self.rest = self.rest[at:]
        yield from self.arguments(head[1])
        return True


class RequiredParser(CallListParser):
    """The calls of a model that had to make one, as a JSON list without a marker: a guide let it write nothing else.

    The marker is looked for only if the output is no list. A call that is cut off before its arguments is left out: the
    output's finish reason says why.
    """

    def begin(self) -> Waiting:
        try:
            yield from self.calls()
        except _EndOfText:
            if self.held.lstrip(BLANKS).startswith(("[", ",")):
                self.held = self.rest = ""
            raise


class NamedParser(OutputParser):
    """The arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        events: list[Event] = [] if self._started else [CallStart(self._name)]
        self._started = True
        return [*events, CallArguments(text)]

    def finish(self) -> list[Event]:
        return []


_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"


class ReasoningParser(Reader):
    """Separates `<think>...</think>` at the beginning of an output from the answer after it, which `answer` parses.

    `thinking`: the output begins with reasoning, tag or no tag. Blanks beside the tags belong to them.
    """

    def __init__(self, answer: OutputParser, *, thinking: bool) -> None:
        super().__init__()
        self._answer = answer
        self._thinking = thinking

    def read(self) -> Waiting:
        try:
            if (yield from self._opens()) or self._thinking:
                self._thinking = True
                yield from self.skip_blanks()
                yield from self.up_to(_THINK_CLOSE, Reasoning)
                self._thinking = False
                yield from self.skip_blanks()
            while True:
                self._pass_on()
                yield from self.more()
        except _EndOfText:
            if self._thinking:
                self.say(self.rest, Reasoning)
            else:
                self._pass_on()
            self.events += self._answer.finish()

    def _opens(self) -> Generator[None, None, bool]:
        """Read the tag, if the output begins with it."""
        while True:
            text = self.rest.lstrip(BLANKS)
            if text.startswith(_THINK_OPEN) and len(self.rest) - len(text) <= MOST_BLANKS:
                self.rest = text[len(_THINK_OPEN) :]
                return True
            if not _THINK_OPEN.startswith(text) or len(self.rest) - len(text) > MOST_BLANKS:
                return False
            yield from self.more()

    def _pass_on(self) -> None:
        self.events += self._answer.feed(self.rest)
        self.rest = ""


THINK_MARKERS = (_THINK_OPEN, _THINK_CLOSE)
_MISTRAL_ID = 9
"""Characters: Mistral's templates refuse ids of another length."""


class ToolFormat(NamedTuple):
    """`parser` makes one for a request with these functions. `markers` are shown where they are special tokens.

    `id_length` is the length of a call's id where the template wants a certain one.
    """

    parser: Callable[[Set[str]], OutputParser]
    markers: tuple[str, ...] = ()
    id_length: int | None = None

    def new_id(self) -> str:
        """The id of a call."""
        if self.id_length is not None:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self.id_length))
        return f"call_{secrets.token_hex(12)}"

    def fit_id(self, call_id: str) -> str:
        """The id of a call as the template takes it. The end of an id has most of its randomness."""
        return call_id if self.id_length is None else call_id[-self.id_length :]


_FORMATS = {
    ToolCallFormat.HERMES: ToolFormat(lambda names: HermesParser(), (_CALL_OPEN, _CALL_CLOSE)),
    ToolCallFormat.LLAMA3_JSON: ToolFormat(Llama3JsonParser, (_PYTHON_TAG,)),
    ToolCallFormat.MISTRAL: ToolFormat(lambda names: MistralParser(), _MISTRAL_MARKERS, _MISTRAL_ID),
    ToolCallFormat.NONE: ToolFormat(lambda names: PlainParser()),
}


def tool_format(setting: ToolCallFormat, template: str) -> ToolFormat | None:
    """The format that the option sets, or that the template asks for. None if it asks for none that is known."""
    return _FORMATS.get(_recognise_tools(template) if setting is ToolCallFormat.AUTO else setting)


def reasoning_format(setting: ReasoningFormat, template: str) -> ReasoningFormat:
    """The format that the option sets, or that the template knows."""
    return _recognise_reasoning(template) if setting is ReasoningFormat.AUTO else setting


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt ends in an open `<think>`, so that the output begins with reasoning."""
    return prompt[-200:].rstrip().endswith(_THINK_OPEN)


def closes_reasoning(prompt: str) -> bool:
    """Whether a prompt ends with the reasoning, so that the output has none."""
    return prompt[-200:].rstrip().endswith(_THINK_CLOSE)


@functools.lru_cache(64)
def _recognise_tools(template: str) -> ToolCallFormat:
    """AUTO if the template asks for no known format."""
    if "[TOOL_CALLS]" in template:
        return ToolCallFormat.MISTRAL
    # Qwen3 Coder and GLM write XML between the same tags.
    if _CALL_OPEN in template and "<function=" not in template and "<arg_key>" not in template:
        return ToolCallFormat.HERMES
    if _PYTHON_TAG in template or '"parameters": dictionary of' in template:
        return ToolCallFormat.LLAMA3_JSON
    return ToolCallFormat.AUTO


@functools.lru_cache(64)
def _recognise_reasoning(template: str) -> ReasoningFormat:
    # Whether the output begins with reasoning is seen at the prompt.
    return ReasoningFormat.QWEN3 if _THINK_CLOSE in template else ReasoningFormat.NONE
