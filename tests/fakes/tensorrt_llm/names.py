"""Classes whose fields are those of the table of names.

A member's type is a Python expression over `typing` and the classes here; the table's text is what is evaluated.
"""

from __future__ import annotations

import builtins
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .settings import TABLE


class _Namespace(dict[str, Any]):
    """What types may name. What the fake does not have may be anything."""

    def __missing__(self, name: str) -> Any:
        return Any


NAMESPACE = _Namespace({**vars(builtins), **vars(typing)}, Path=Path, torch=SimpleNamespace(Tensor=Any))
"""Classes add themselves."""


def has(owner: str) -> bool:
    """Whether this version has the class."""
    return owner in TABLE["owners"]


def arguments(owner: str) -> dict[str, dict[str, Any]]:
    """What the owner's constructor, or the function, takes in this version; nothing where the version lacks it."""
    return {name: member for name, member in members(owner).items() if member["kind"] == "argument"}


def members(owner: str) -> dict[str, dict[str, Any]]:
    """All names of the owner, of any kind."""
    return TABLE["owners"][owner]["members"] if has(owner) else {}


def type_of(member: dict[str, Any]) -> Any:
    """The member's type."""
    return eval(member["type"], {}, NAMESPACE)
