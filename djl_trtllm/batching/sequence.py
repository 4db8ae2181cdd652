"""One sequence: turns its tokens into text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from djl_trtllm.batching.detokenizer import Detokenizer
from djl_trtllm.batching.stopping import StopMatcher
from djl_trtllm.errors import RequestError
from djl_trtllm.model import TokenTexts
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult, Token


class OutputSequence:
    """The output of one sequence.

    `take` turns token ids into tokens with text, and holds back those whose character is unfinished or whose text may
    belong to a stop string; `finish` ends it; `drain` returns the new output. A token that a stop string swallows keeps
    its place with the text before it, so as many tokens come out as `token_ids` has, and their texts always join to
    the output.
    """

    __slots__ = (
        "_detokenizer",
        "_held",
        "_logprobs",
        "_matcher",
        "_prompt_ids",
        "_ready",
        "_shown",
        "_special_ids",
        "_stop_ids",
        "_text_end",
        "_texts",
        "closed",
        "cumulative_logprob",
        "finished",
        "index",
        "seed",
        "token_ids",
    )

    def __init__(
        self,
        *,
        index: int,
        texts: TokenTexts,
        special_ids: frozenset[int],
        shown: Mapping[int, str] = MappingProxyType({}),
        prompt_ids: Sequence[int],
        stop: Sequence[str],
        stop_ids: Mapping[int, FinishReason] = MappingProxyType({}),
        seed: int | None,
        logprobs: bool,
    ) -> None:
        self.index = index
        self.seed = seed
        self.token_ids: list[int] = []
        """What was generated so far."""
        self.cumulative_logprob = 0.0
        self.finished: SequenceResult | None = None
        self.closed = False
        """Whether the end has been delivered."""
        self._texts = texts
        self._prompt_ids = prompt_ids
        self._detokenizer: Detokenizer | None = None
        """None as long as there are no tokens."""
        self._matcher = StopMatcher(stop) if stop else None
        self._special_ids = special_ids
        self._shown = shown
        """The texts of those special tokens that are part of the output."""
        self._stop_ids = stop_ids
        """Ids that end the sequence here, each with its reason: those that the engine does not stop at."""
        self._ready: list[Token] = []
        self._held: list[tuple[int, Token]] = []
        """Tokens that wait for a possible stop string to resolve, with the offset where each one's text begins."""
        self._text_end = 0
        self._logprobs = logprobs

    def take(self, token_ids: Sequence[int], logprobs: Sequence[Any] | None) -> bool:
        """Append tokens, with a number or None for each. False if a stop string or stop id ended the sequence; later
        tokens are discarded."""
        detokenizer = self._detokenizer
        if detokenizer is None:
            detokenizer = self._detokenizer = Detokenizer(self._texts, self._prompt_ids)
        for position, token_id in enumerate(token_ids):
            self.token_ids.append(token_id)
            logprob = None
            if logprobs is not None:
                logprob = logprobs[position]
                self.cumulative_logprob += logprob or 0.0
            if token_id in self._special_ids:
                token = Token(token_id, self._shown.get(token_id, ""), logprob, True)
            else:
                token = Token(token_id, detokenizer.step(token_id), logprob, False)
            if self._matcher is None and not detokenizer.pending and not self._held:
                self._ready.append(token)
            elif self._hold(token, unfinished=detokenizer.pending):
                return False
            if token_id in self._stop_ids:
                self.finish(self._stop_ids[token_id])
                return False
        return True

    def finish(self, reason: FinishReason, error: RequestError | None = None) -> None:
        """End the sequence and release the text that was held back."""
        tail = "" if self._detokenizer is None else self._detokenizer.flush()
        self._ready += [token for _, token in self._held]
        if tail:
            # A character is unfinished, so at least the token that began it is still here.
            last = max(at for at, token in enumerate(self._ready) if not token.special)
            self._ready[last] = replace(self._ready[last], text=self._ready[last].text + tail)
        self._end(reason, None, error)

    def drain(self) -> OutputChunk:
        tokens, self._ready = self._ready, []
        return OutputChunk(self.index, tokens, self.finished)

    def _hold(self, token: Token, *, unfinished: bool) -> bool:
        """Hold a token back, and release those that are safe now. True if a stop string is complete.

        `unfinished`: it ends inside a character.
        """
        self._held.append((self._text_end, token))
        self._text_end += len(token.text)
        safe = self._text_end
        if self._matcher is not None:
            match = self._matcher.feed(token.text)
            safe = self._matcher.safe
            if match is not None:
                self._ready += [replace(held, text=held.text[: max(0, safe - start)]) for start, held in self._held]
                self._end(FinishReason.STOP, match.stop, None)
                return True
        if not unfinished:
            while self._held and self._held[0][0] + len(self._held[0][1].text) <= safe:
                self._ready.append(self._held.pop(0)[1])
        return False

    def _end(self, reason: FinishReason, stop: str | None, error: RequestError | None) -> None:
        logprob = self.cumulative_logprob if self._logprobs else None
        self.finished = SequenceResult(reason, len(self.token_ids), logprob, self.seed, stop, error)
