from __future__ import annotations

from typing import Any, TypedDict


class _PromptOptions(TypedDict, total=False):
    multi_modal_data: dict[str, list[Any]]
    multi_modal_uuids: dict[str, list[str]]
    cache_salt: str


class TokensPrompt(_PromptOptions):
    prompt_token_ids: list[int]
