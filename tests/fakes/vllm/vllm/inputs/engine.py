from __future__ import annotations

from typing import TypedDict


class TokensInput(TypedDict):
    type: str
    prompt_token_ids: list[int]
