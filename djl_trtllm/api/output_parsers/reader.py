"""What a parser finds, and reading text that is still arriving.

How a text is cut into pieces does not change what a parser finds. Text that is not what it looked like is content:
parsers do not raise, and only markup is left out.

A parser is a generator: it reads as if all text were there, and yields where it has to wait for more.
"""

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import NamedTuple, TypeAlias

from djl_trtllm.api.output_parsers.values import ValueEnd

BLANKS = " \t\r\n"
_BLANKS = re.compile(f"[{BLANKS}]*")
MOST_BLANKS = 256
"""Characters of white space before markup that belong to it."""
LONGEST_HEAD = 512
"""Characters of what stands between two markers where a name, a key or a word is expected."""


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
    """All text is content."""

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []


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


class EndOfText(Exception):
    """The output has ended where a parser waits for more of it."""


class NoMatch(Exception):
    """What stands here cannot be what is being read."""


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
        """The place from where on the text, which has no marker, may be the beginning of one."""
        found = self._begun and self._begun.search(text, max(at, len(text) - self.longest + 1))
        return found.start() if found else len(text)


@functools.lru_cache(256)
def markers(*texts: str) -> Markers:
    """Markers that a format makes up while it is read."""
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
        """Read up to the place `end`."""
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
        """Whether a marker is next. It is not read."""
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
        """Read a marker and the text before it, which is said. Returns the blanks before the marker, and the marker."""
        while (found := markers.find(self.text, self.at)) is None:
            self.say(self.take(self._blanks_start(markers.begun(self.text, self.at))), kind)
            yield from self.more()
        self.say(self.take(self._blanks_start(found.start())), kind)
        blanks = self.take(found.start())
        return blanks, self.take(found.end())

    def head(self, ends: Markers) -> Generator[None, None, tuple[str, str]]:
        """Read a short text and the marker after it. Raises NoMatch if there is none soon."""
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
