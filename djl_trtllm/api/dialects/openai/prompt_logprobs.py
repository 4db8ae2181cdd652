"""Log-probabilities of a prompt: vLLM's `prompt_logprobs`, and those in the `logprobs` of a completion with `echo`.

They become JSON when they come, prompt by prompt, and not all together at the end of a request with many prompts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

from djl_trtllm.request import RankedToken

_LONGEST_GAP = 4


class EchoedLogprobs(NamedTuple):
    """The `logprobs` of a prompt, each list as JSON without its brackets. `end` is where the prompt's text ends."""

    tokens: bytes
    token_logprobs: bytes
    top_logprobs: bytes
    text_offset: bytes
    end: int

    @classmethod
    def of(cls, tokens: list[RankedToken], text: str) -> EchoedLogprobs:
        offsets, end = [], 0
        for token in tokens:
            # A token that begins the prompt need not be in its text, nor one that is a part of a character.
            found = text.find(token.text, end, end + len(token.text) + _LONGEST_GAP)
            offsets.append(end if found < 0 else found)
            end = end if found < 0 else found + len(token.text)
        return cls(
            _items([token.text for token in tokens]),
            _items([token.logprob for token in tokens]),
            _items([None if token.logprob is None else _likeliest(token) for token in tokens]),
            _items(offsets),
            len(text),
        )

    def joined(self, generated: dict[str, Any]) -> dict[str, orjson.Fragment]:
        """The `logprobs` of the prompt and of what follows it."""
        return {
            name: orjson.Fragment(b"[%b]" % b",".join(filter(None, (getattr(self, name), _items(following)))))
            for name, following in generated.items()
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


def _items(values: list[Any]) -> bytes:
    return orjson.dumps(values)[1:-1]
