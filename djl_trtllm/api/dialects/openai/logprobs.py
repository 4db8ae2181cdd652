"""Log-probabilities: vLLM's `prompt_logprobs`, and the `logprobs` of a completion, with `echo` those of its prompt too.

They become JSON when they come, and not all together at the end of a request with many prompts and tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

from djl_trtllm.api.choices import json_items, json_list
from djl_trtllm.request import RankedToken, Token

_LONGEST_GAP = 4


class LogprobsPart(NamedTuple):
    """A part of the `logprobs` of a choice, each list as JSON without its brackets.

    `end` is where its text ends, in characters of the choice's text.
    """

    tokens: bytes
    token_logprobs: bytes
    top_logprobs: bytes
    text_offset: bytes
    end: int

    @classmethod
    def of_prompt(cls, tokens: list[RankedToken], text: str) -> LogprobsPart:
        """The part of an echoed prompt."""
        offsets, end = [], 0
        for token in tokens:
            # A token that begins the prompt need not be in its text, nor one that is a part of a character.
            found = text.find(token.text, end, end + len(token.text) + _LONGEST_GAP)
            offsets.append(end if found < 0 else found)
            end = end if found < 0 else found + len(token.text)
        return cls(
            json_items([token.text for token in tokens]),
            json_items([token.logprob for token in tokens]),
            json_items([None if token.logprob is None else _likeliest(token) for token in tokens]),
            json_items(offsets),
            len(text),
        )

    @classmethod
    def of_output(cls, tokens: list[Token], before: LogprobsPart | None) -> LogprobsPart:
        """The part of generated tokens, which follow the part `before` them."""
        texts, logprobs, top, offsets = completion_logprobs(tokens, 0 if before is None else before.end).values()
        if top is None and before is not None and before.top_logprobs:
            top = [{token.text: token.logprob} for token in tokens]  # what is known of each
        end = offsets[-1] + len(texts[-1])
        return cls(json_items(texts), json_items(logprobs), json_items(top or []), json_items(offsets), end)


def joined_logprobs(parts: list[LogprobsPart]) -> dict[str, orjson.Fragment | None]:
    """The `logprobs` of a choice."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    found: dict[str, orjson.Fragment | None] = {
        name: json_list(getattr(part, name) for part in parts) for name in names
    }
    return found if any(part.top_logprobs for part in parts) else found | {"top_logprobs": None}


def completion_logprobs(tokens: list[Token], offset: int) -> dict[str, Any]:
    """The `logprobs` of a choice whose first token begins at `offset`, in characters of the choice's text."""
    offsets: list[int] = []
    ranked = [token for token in tokens if isinstance(token, RankedToken)]
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{each.text: each.logprob for each in token.top} for token in ranked] if ranked else None,
        "text_offset": offsets,
    }


def vllm_prompt_logprobs(tokens: list[RankedToken]) -> orjson.Fragment:
    """A list with an object for each token, None for the first: the token and the most likely ones, by id."""
    return orjson.Fragment(orjson.dumps([None, *map(_by_id, tokens[1:])]))


def _by_id(token: RankedToken) -> dict[str, dict[str, Any]]:
    found = {str(token.id): {"logprob": token.logprob, "rank": None, "decoded_token": token.text}}
    for rank, each in enumerate(token.top, 1):
        found[str(each.id)] = {"logprob": each.logprob, "rank": rank, "decoded_token": each.text}
    return found


def _likeliest(token: RankedToken) -> dict[str, float | None]:
    """The most likely tokens and the token itself; of two with one text the more likely one."""
    found: dict[str, float | None] = {}
    for each in token.top:
        found.setdefault(each.text, each.logprob)
    found.setdefault(token.text, token.logprob)
    return found
