"""Keeps secrets, and what is too long, out of tables, logs and messages."""

from __future__ import annotations

import re

MASK = "********"

# Not `max_tokens_per_step`: those tokens are units of text.
_TOKEN = "(?<!per[_-])(?<!adapter[_-])token"  # noqa: S105  # a pattern
_SECRET_KEY = re.compile(
    rf"(^|[._-])({_TOKEN}|secret|password|passwd|pass|credentials?|authorization|(api|access|private|secret)[._-]?key)$",
    re.IGNORECASE,
)
_PAIR = re.compile(
    rf"(?<![\w.-])([\w.-]*(?:{_TOKEN}|secret|passw(?:or)?d|credentials?|signature|(?:api|access|private|secret)[_-]?key))"
    r"(\s*=\s*)(\"[^\"]*\"|'[^']*'|[^\s,;&]+)",
    re.IGNORECASE,
)
_VALUE_OF_PAIR = re.compile(r"=[^,]*")
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s]+(?=@)")
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{8,}")


def shortened(text: str, longest: int) -> str:
    """`text` on one line, with escapes for what cannot be printed, and at most `longest` characters of it."""
    text = text[: longest + 1]  # it may be a megabyte
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= longest else text[: longest - 3] + "..."


def is_secret_key(key: str) -> bool:
    """Return whether a key's name says that its value is a secret (`HF_TOKEN` is, `max_num_tokens` is not)."""
    return _SECRET_KEY.search(key) is not None


def masked(key: str, value: str) -> str:
    """`value` as it may be shown.

    This masks secrets by the key's name, `NAME=VALUE` pairs inside the value whose name says so, credentials in URLs,
    hub tokens, and every value of `option.env`, because a variable's name does not show what it holds.
    """
    if is_secret_key(key):
        return MASK
    if key.lower() in ("option.env", "option_env"):
        return _VALUE_OF_PAIR.sub(f"={MASK}", value) if "=" in value else MASK
    value = _PAIR.sub(rf"\1\2{MASK}", value)
    return _HUB_TOKEN.sub(MASK, _URL_PASSWORD.sub(MASK, value))
