"""Read a configuration file of another server into a `Source`.

Every entry of such a file becomes a setting, or a message that says why it has no effect here.
"""

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from djl_trtllm.config.sources import Ignored, Layer, Origin, Setting, Source, is_secret_key, masked, shortened
from djl_trtllm.files import MOST_SETTINGS_BYTES, read_file

_LONGEST = 60


class FormatError(ValueError):
    """The text is not in the format. The message says what to write instead; `line` begins at 1."""

    def __init__(self, line: int, message: str) -> None:
        self.line = line
        super().__init__(message)

    def source(self, path: str) -> Source:
        return Source(Layer.FOREIGN, problems=(f"{path}:{self.line}: {self}",))


def read_text(path: Path) -> str | Source:
    """The text of a file, or a source that says why the file cannot be read."""
    try:
        return read_file(path, MOST_SETTINGS_BYTES).decode("utf-8-sig")
    except OSError as error:
        return Source(Layer.FOREIGN, problems=(f"{path} cannot be read: {error.strerror or error}",))
    except UnicodeDecodeError:
        return Source(Layer.FOREIGN, problems=(f"{path} is not UTF-8 text; save it as UTF-8",))


@dataclass(frozen=True)
class ForeignSetting:
    """One value of a file: its name on that server, its text, and its line, which begins at 1.

    An empty collection (`{}`) has the text "", as null has.
    """

    name: str
    value: str
    line: int

    @property
    def assignment(self) -> str:
        return f"{self.name}={shortened(masked(self.name, self.value), _LONGEST)}"


@dataclass
class Reading:
    """The settings and messages of one file, collected entry by entry; `source` is the result."""

    path: str
    settings: list[Setting] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _unknown: list[Ignored] = field(default_factory=list)
    _ignored: dict[tuple[bool, str], dict[str, int]] = field(default_factory=dict)
    """Entries and their lines, by whether somebody has to act and the reason."""

    def set(self, key: str, entry: ForeignSetting, value: str | None = None) -> None:
        """Set `key` from an entry, to its own text or to `value`."""
        text = entry.value if value is None else value
        given = None if text == entry.value else entry.value
        self.settings.append(Setting(key, text, Origin.file(self.path, entry.line), entry.name, given, alone=True))

    def ignore(self, entry: ForeignSetting, reason: str, *, act: bool = False) -> None:
        """Note that an entry has no effect here; `act` if its author has to do something about it.

        Entries with the same reason share a line. An entry without a value is named once.
        """
        text = entry.assignment if entry.value and not is_secret_key(entry.name) else entry.name
        self._ignored.setdefault((act, reason), {}).setdefault(text, entry.line)

    def warn(self, entry: ForeignSetting, text: str) -> None:
        """Note that an entry has an effect, with the warning `text`."""
        self.warnings.append(f"{entry.assignment} ({self.path}:{entry.line}): {text}")

    def refuse(self, entry: ForeignSetting, text: str) -> None:
        """Note that an entry is wrong; `text` is what to write instead."""
        self.problems.append(f"{entry.assignment} ({self.path}:{entry.line}): {text}")

    def unknown_setting(self, entry: ForeignSetting, known: Iterable[str], server: str) -> None:
        """Note a setting that the other server does not have. Its value is not shown: it may be a secret."""
        near = difflib.get_close_matches(entry.name, tuple(known), n=1, cutoff=0.75)
        advice = f"did you mean {near[0]}?" if near else "remove it, or set the option that you mean"
        reason = f"it is not a setting of {server} and has no effect; {advice}"
        self._unknown.append(Ignored(entry.name, Origin.file(self.path, entry.line), reason, unknown=True))

    def source(self) -> Source:
        return Source(
            Layer.FOREIGN,
            tuple(self.settings),
            (*self.warnings, *self._lines(act=True)),
            tuple(self.problems),
            tuple(f"{each.assignment} ({each.origin}) {each.reason.removeprefix('it ')}" for each in self._unknown),
            tuple(self._lines(act=False)),
            (
                *(
                    Ignored(text, Origin.file(self.path, line), reason)
                    for (_, reason), entries in sorted(self._ignored.items(), key=lambda item: not item[0][0])
                    for text, line in entries.items()
                ),
                *self._unknown,
            ),
        )

    def _lines(self, *, act: bool) -> Iterator[str]:
        for (to_act_on, reason), entries in self._ignored.items():
            if to_act_on is act:
                yield f"{self.path}: {', '.join(f'{text} (line {line})' for text, line in entries.items())}: {reason}"


def presets(server: str, values: dict[str, str]) -> Source:
    """The defaults of `server`, by key, for its own files."""
    origin = Origin.preset(server)
    return Source(Layer.PRESET, tuple(Setting(key, value, origin, key, alone=True) for key, value in values.items()))
