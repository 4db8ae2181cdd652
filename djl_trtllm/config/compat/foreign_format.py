"""A configuration file of another server on its way to a `Source`.

Every entry of such a file takes effect or is answered by name: it becomes a setting, or a line that says what it did
there and what happens here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from djl_trtllm.config.masking import is_secret_key, masked
from djl_trtllm.config.sources.origin import Origin
from djl_trtllm.config.sources.properties import Layer, Setting, Source

_LONGEST = 60


@dataclass(frozen=True)
class Entry:
    """One value of a file: its name as users of that server say it, its text, and its line, which counts from 1."""

    name: str
    value: str
    line: int

    @property
    def shown(self) -> str:
        """`name=value` with secrets masked and long values shortened."""
        text = masked(self.name, self.value)
        text = text if text.isprintable() else repr(text)[1:-1]
        return f"{self.name}={text if len(text) <= _LONGEST else text[: _LONGEST - 3] + '...'}"


@dataclass
class Reading:
    """What is made of one file. Filled entry by entry; `source` is the result."""

    path: str
    settings: list[Setting] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    _answers: dict[str, dict[str, int]] = field(default_factory=dict)
    _to_act_on: dict[str, dict[str, int]] = field(default_factory=dict)

    def set(self, key: str, entry: Entry, value: str | None = None) -> None:
        """The entry sets `key`, to its own text or to `value`, which the text means."""
        text = entry.value if value is None else value
        wrote = None if text == entry.value else entry.value
        self.settings.append(Setting(key, text, Origin.file(self.path, entry.line), entry.name, wrote, alone=True))

    def answer(self, entry: Entry, text: str, *, act: bool = False) -> None:
        """The entry has no effect here, and `text` says why; `act` where its author has to do something about it.

        Entries with one answer share a line. An entry without a value is told by its name alone, and once.
        """
        shown = entry.shown if entry.value and not is_secret_key(entry.name) else entry.name
        answers = self._to_act_on if act else self._answers
        answers.setdefault(text, {}).setdefault(shown, entry.line)

    def warn(self, entry: Entry, text: str) -> None:
        """The entry takes effect, and `text` says what there is to know about it."""
        self.warnings.append(f"{entry.shown} ({self.path}:{entry.line}): {text}")

    def refuse(self, entry: Entry, text: str) -> None:
        """The entry is wrong; `text` says what to write instead."""
        self.problems.append(f"{entry.shown} ({self.path}:{entry.line}): {text}")

    def not_known(self, entry: Entry, known: Iterable[str], server: str) -> None:
        """The entry is nothing that the other server has. Its value is not shown: it may be a secret."""
        near = difflib.get_close_matches(entry.name, tuple(known), n=1, cutoff=0.75)
        advice = f"did you mean {near[0]}?" if near else "take it out, or set the option that you mean in its place"
        self.unknown.append(
            f"{entry.name} ({self.path}:{entry.line}) is nothing that {server} reads and has no effect; {advice}"
        )

    def source(self) -> Source:
        """Everything read so far."""
        return Source(
            Layer.DIALECT,
            tuple(self.settings),
            (*self.warnings, *self._told(self._to_act_on)),
            tuple(self.problems),
            tuple(self.unknown),
            tuple(self._told(self._answers)),
        )

    def _told(self, answers: dict[str, dict[str, int]]) -> Iterator[str]:
        for text, entries in answers.items():
            names = ", ".join(f"{shown} (line {line})" for shown, line in entries.items())
            yield f"{self.path}: {names}: {text}"


def presets(server: str, values: dict[str, str]) -> Source:
    """What `server` presets where its file is the source, by key."""
    origin = Origin.derived(f"the presets of {server}")
    return Source(Layer.PRESET, tuple(Setting(key, value, origin, key, alone=True) for key, value in values.items()))
