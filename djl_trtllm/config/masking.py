"""Keeps secrets out of tables, logs and messages."""

from __future__ import annotations

import re

MASK = "********"

_SECRET_KEY = re.compile(
    r"(^|[._-])(token|secret|password|passwd|credentials?|authorization|(api|access|private|secret)[._-]?key)$",
    re.IGNORECASE,
)
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{8,}")


def is_secret_key(key: str) -> bool:
    """Whether a key's name says that its value is a secret (`HF_TOKEN` is, `max_num_tokens` is not)."""
    return _SECRET_KEY.search(key) is not None


def masked(key: str, value: str) -> str:
    """`value` as it may be shown: secrets by key's name, credentials in URLs and hub tokens are masked."""
    if is_secret_key(key):
        return MASK
    return _HUB_TOKEN.sub(MASK, _URL_PASSWORD.sub(MASK, value))
