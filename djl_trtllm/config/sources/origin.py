"""Where a value came from."""

from __future__ import annotations

import enum
from dataclasses import dataclass

_PRESETS = "the presets of "


class OriginKind(str, enum.Enum):
    """Where a value can come from; OVERRIDE is a program or a command line."""

    FILE = "file"
    ENVIRONMENT = "environment"
    DEFAULT = "default"
    DERIVED = "derived"
    OVERRIDE = "override"


@dataclass(frozen=True)
class Origin:
    """Where one value came from; `str(origin)` is what messages and tables show.

    `where` is a path (FILE), a variable's name (ENVIRONMENT), the text of a rule (DERIVED) or the caller's text
    (OVERRIDE). `line` begins at 1 and is None outside files.
    """

    kind: OriginKind
    where: str = ""
    line: int | None = None

    @classmethod
    def file(cls, path: str, line: int) -> Origin:
        return cls(OriginKind.FILE, path, line)

    @classmethod
    def environment(cls, variable: str) -> Origin:
        return cls(OriginKind.ENVIRONMENT, variable)

    @classmethod
    def default(cls) -> Origin:
        return cls(OriginKind.DEFAULT)

    @classmethod
    def derived(cls, rule: str) -> Origin:
        """Computed from other values; `rule` says from which and how."""
        return cls(OriginKind.DERIVED, rule)

    @classmethod
    def preset(cls, server: str) -> Origin:
        """A default of another server, for its own files."""
        return cls.derived(f"{_PRESETS}{server}")

    @classmethod
    def override(cls, by: str) -> Origin:
        """Given by a caller, for example `Origin.override("command line --port")`."""
        return cls(OriginKind.OVERRIDE, by)

    @property
    def is_user(self) -> bool:
        """Whether a person set the value, as opposed to a default or a rule."""
        return self.kind in (OriginKind.FILE, OriginKind.ENVIRONMENT, OriginKind.OVERRIDE)

    @property
    def is_preset(self) -> bool:
        return self.kind is OriginKind.DERIVED and self.where.startswith(_PRESETS)

    def __str__(self) -> str:
        if self.kind is OriginKind.FILE:
            return f"{self.where}:{self.line}"
        if self.kind is OriginKind.ENVIRONMENT:
            return f"environment variable {self.where}"
        if self.kind is OriginKind.DERIVED:
            return f"derived from {self.where}"
        if self.kind is OriginKind.OVERRIDE:
            return self.where
        return "default"
