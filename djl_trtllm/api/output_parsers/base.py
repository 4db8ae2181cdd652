"""What parsers find, and the machine that most of them are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from djl_trtllm.api.output_parsers.json_call import CallArguments, CallReader, CallStart, Status

BLANKS = " \t\r\n"
MOST_BLANKS = 256
"""Characters of white space before markup that belong to it."""


class Content(NamedTuple):
    """Text of the answer."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model wrote for itself."""

    text: str


Event: TypeAlias = Content | Reasoning | CallStart | CallArguments


class OutputParser(ABC):
    """One sequence. The caller has the text as it comes, and `finish` at its end."""

    @abstractmethod
    def feed(self, text: str) -> list[Event]:
        """What this text adds."""

    @abstractmethod
    def finish(self) -> list[Event]:
        """What was held back, because it might have become something else."""


class PlainParser(OutputParser):
    """All text is content."""

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class StateMachine(OutputParser):
    """A state is a method: it takes what it can from `rest`, and returns whether to go on at once."""

    def __init__(self, state: Callable[[], bool]) -> None:
        self.state = state
        self.rest = ""
        self.events: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        self.rest += text
        while self.rest and self.state():
            pass
        return self._take_events()

    def finish(self) -> list[Event]:
        self.end()
        return self._take_events()

    @abstractmethod
    def end(self) -> None:
        """The text has ended in the present state."""

    def skip_blanks(self) -> str:
        """Remove the blanks that `rest` begins with, and return them."""
        rest = self.rest.lstrip(BLANKS)
        blanks = self.rest[: len(self.rest) - len(rest)]
        self.rest = rest
        return blanks

    def _take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events


class MarkedParser(StateMachine):
    """Content in which calls begin with `opener`. A subclass has what stands after the opener, and after a call."""

    opener: str

    def __init__(self) -> None:
        super().__init__(self.content)
        self.held = ""
        """Markup before the call that is being read: content if it turns out to be no call."""
        self.reader = CallReader()

    def content(self) -> bool:
        before, found, after = self.rest.partition(self.opener)
        cut = safe_end(self.rest, self.opener) if not found else blanks_start(before)
        self.say(self.rest[:cut])
        if not found:
            self.rest = self.rest[cut:]
            return False
        self.held, self.rest, self.state = before[cut:] + found, after, self.opened
        return True

    @abstractmethod
    def opened(self) -> bool:
        """The state after the opener."""

    @abstractmethod
    def after_call(self) -> bool:
        """The state after a call."""

    def read(self, reader: CallReader) -> bool:
        """Read a call from here on."""
        self.reader, self.state = reader, self.call
        return True

    def call(self) -> bool:
        taken = self.reader.read(self.rest, self.events)
        self.rest = self.rest[taken:]
        if self.reader.started:
            self.held = ""
        if self.reader.status is Status.FAILED:
            return self.give_up()
        if self.reader.status is Status.DONE:
            self.state = self.after_call
        return True

    def between(self) -> bool:
        """After all calls: blanks before further text belong to the markup."""
        self.skip_blanks()
        self.state = self.content if self.rest else self.between
        return True

    def give_up(self) -> bool:
        """What was held is content."""
        self.say(self.held + self.reader.text)
        self.held, self.reader, self.state = "", CallReader(), self.content
        return True

    def say(self, text: str) -> None:
        if text:
            self.events.append(Content(text))

    def end(self) -> None:
        if self.state not in (self.after_call, self.between):
            self.say(self.held + self.reader.text + self.rest)


def safe_end(text: str, marker: str) -> int:
    """How much of a text without `marker` cannot belong to one, or to the blanks before it."""
    longest = min(len(marker) - 1, len(text))
    if marker[0] not in text[len(text) - longest :]:
        return blanks_start(text)
    part = next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
    return blanks_start(text[: len(text) - part])


def blanks_start(text: str) -> int:
    """Where the blanks at the end of a text begin."""
    return max(len(text.rstrip(BLANKS)), len(text) - MOST_BLANKS)
