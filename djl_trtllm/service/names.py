"""Names and paths that clients give to models and adapters: they become parts of addresses, metrics and log lines."""

from __future__ import annotations

_LONGEST = 4096
_SHOWN = 80


def problem_of_name(name: str, what: str) -> str | None:
    """Why a client cannot give this name to `what`; None if it can."""
    if not name:
        return f"{what} needs a name"
    if "/" in name or name in (".", ".."):
        return f"the name of {what} is {name[:_SHOWN]!r}: expected one without '/'"
    return problem_of_text(name, f"the name of {what}")


def problem_of_text(text: str, what: str) -> str | None:
    """Why this text cannot be a name or a path; None if it can."""
    if len(text) > _LONGEST:
        return f"{what} has {len(text)} characters: expected at most {_LONGEST}"
    if not text.isprintable():
        return f"{what} is {text[:_SHOWN]!r}: expected one without line ends and control characters"
    return None
