"""Values of a config.json, which may hold anything: what is not of the expected type counts as absent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def positive(text: Mapping[str, Any], name: str) -> int | None:
    value = text.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def first_positive(text: Mapping[str, Any], names: Iterable[str]) -> int | None:
    return next((value for name in names if (value := positive(text, name))), None)


def listed(text: Mapping[str, Any], name: str) -> Sequence[Any]:
    """A list, or nothing."""
    value = text.get(name)
    return value if isinstance(value, list) else ()


def part(text: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object, or an empty one."""
    value = text.get(name)
    return value if isinstance(value, dict) else {}


def model_type(text: Mapping[str, Any]) -> str:
    value = text.get("model_type")
    return value if isinstance(value, str) else ""
