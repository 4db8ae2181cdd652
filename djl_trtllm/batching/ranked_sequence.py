"""A sequence whose tokens come with the most likely ones at their position.

A class of its own, so that sequences without them do nothing for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from djl_trtllm.batching.sequence import OutputSequence
from djl_trtllm.executor.protocol import Logprob, Ranked
from djl_trtllm.request import Alternative, OutputChunk, RankedToken, Token


class RankedSequence(OutputSequence):
    """`text_of` is the text of a token id in the middle of a text."""

    __slots__ = ("_ranked", "_text_of")

    def __init__(self, *, text_of: Callable[[int], str], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._text_of = text_of
        self._ranked: deque[Logprob] = deque()
        """What the engine said of each token that is not delivered yet: tokens keep their number and order."""

    def take(self, token_ids: Sequence[int], logprobs: Sequence[Any] | None) -> bool:
        entries = [None] * len(token_ids) if logprobs is None else logprobs
        self._ranked.extend(entries)
        chosen = [entry.logprob if isinstance(entry, Ranked) else entry for entry in entries]
        return super().take(token_ids, None if logprobs is None else chosen)

    def drain(self) -> OutputChunk:
        chunk = super().drain()
        tokens: list[Token] = [self._with_rank(token, self._ranked.popleft()) for token in chunk.tokens]
        return OutputChunk(chunk.index, tokens, chunk.finished)

    def _with_rank(self, token: Token, entry: Logprob) -> RankedToken:
        top: list[Alternative] = []
        if isinstance(entry, Ranked):
            pairs = zip(entry.ids, entry.logprobs, strict=True)
            top = [
                Alternative(id_, token.text if id_ == token.id else self._text_of(id_), logprob)
                for id_, logprob in pairs
            ]
        return RankedToken(token.id, token.text, token.logprob, token.special, top)
