"""Token ids to text, one token at a time, never splitting a character."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_CONTEXT = 6
"""Prompt tokens that the decoder gets to see, so that it knows whether the first token begins with a space."""


class Detokenizer:
    """Decodes one sequence. Joining what `step` and `flush` return gives what decoding all its tokens at once would
    add to the prompt's text. Special tokens have no text and are not shown to it."""

    __slots__ = ("_context", "_emitted", "_ids", "_stream", "_tokenizer", "pending")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt_ids[-_CONTEXT:])
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=True)
        self._ids: list[int] = []
        self._emitted = 0
        self.pending = False
        """Whether the last token ended inside a character."""

    def step(self, token_id: int) -> str:
        """The text that `token_id` completes: "" while a character is unfinished."""
        self._ids.append(token_id)
        try:
            text: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:  # the Rust library raises bare Exception
            text = self._restart()
        if text is None:
            self.pending = True
            return ""
        self.pending = False
        self._emitted += len(text) if self._ids else 0
        return text

    def flush(self) -> str:
        """The text held back at the end of the sequence: replacement characters for unfinished ones."""
        if not self.pending:
            return ""
        decode = self._tokenizer.decode
        before = len(decode(self._context, skip_special_tokens=True))
        whole: str = decode(self._context + self._ids, skip_special_tokens=True)
        self.pending = False
        return whole[before + self._emitted :]

    def _restart(self) -> str:
        """The decoder took back text that has been handed out, as byte-fallback decoders do when a byte turns out to
        be invalid. Go on from here: the last token's text as it follows its predecessor."""
        last_two = (self._context + self._ids)[-2:]
        decode = self._tokenizer.decode
        before: str = decode(last_two[:-1], skip_special_tokens=True)
        text: str = decode(last_two, skip_special_tokens=True)[len(before) :]
        self._context, self._ids, self._emitted = last_two[-1:], [], 0
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=True)
        return text
