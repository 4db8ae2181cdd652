from __future__ import annotations

from typing import TypedDict


class _InputOptions(TypedDict, total=False):
    cache_salt: str


class TokensInput(_InputOptions):
    type: str
    prompt_token_ids: list[int]
