"""Token ids to text, one token at a time, never splitting a character."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from djl_trtllm.model import TokenTexts

_CONTEXT = 6
"""Prompt tokens that the decoder sees, so that it knows whether the first token begins with a space."""


class Detokenizer:
    """Decodes one sequence. Joining what `step` and `flush` return gives what decoding all its tokens at once would
    add to the prompt's text. Special tokens have no text and are left out.

    Most tokens are looked up in `texts`, in a tenth of the time. The library decodes the first one, and those that
    make a character only together.
    """

    __slots__ = ("_begun", "_context", "_emitted", "_ids", "_stream", "_texts", "_tokenizer", "pending")

    def __init__(self, texts: TokenTexts, prompt_ids: Sequence[int]) -> None:
        self._texts = texts
        self._tokenizer = texts.raw
        self.pending = False
        """Whether the last token ended inside a character."""
        self._begun = False
        """Whether there was text."""
        self._stream: DecodeStream | None
        """None after a token that was looked up."""
        self._begin(list(prompt_ids[-_CONTEXT:]))

    def step(self, token_id: int) -> str:
        """The text that `token_id` completes: "" while a character is unfinished."""
        self._ids.append(token_id)
        if self._begun and not self.pending:
            known = self._texts[token_id]
            if known is not None:
                self._stream = None
                return known
        return self._decoded(token_id)

    def _decoded(self, token_id: int) -> str:
        stream = self._stream
        if stream is None:
            self._begin((self._context + self._ids[-_CONTEXT - 1 : -1])[-_CONTEXT:])
            self._ids.append(token_id)
            stream = self._stream = DecodeStream(ids=self._context, skip_special_tokens=True)
        try:
            text: str | None = stream.step(self._tokenizer, token_id)
        except Exception:  # the Rust library raises bare Exception
            self.pending = False
            return self._restart()
        self.pending = text is None
        if text is None:
            return ""
        self._begun = True
        self._emitted += len(text)
        return text

    def flush(self) -> str:
        """The text held back at the end of the sequence: replacement characters for unfinished ones."""
        if not self.pending:
            return ""
        self.pending = False
        before, whole = self._decode(self._context), self._decode(self._context + self._ids)
        return whole[len(before) + self._emitted :]

    def _begin(self, context: list[int]) -> None:
        """Decode what follows `context`."""
        self._context = context
        self._ids: list[int] = []
        self._emitted = 0
        self._stream = None

    def _restart(self) -> str:
        """The decoder took back text that has been handed out, as byte-fallback decoders do when a byte turns out to
        be invalid. Go on from here: the last token's text as it follows its predecessor."""
        last_two = (self._context + self._ids[-2:])[-2:]
        before, text = self._decode(last_two[:1]), self._decode(last_two)
        self._begin(last_two[1:])
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids)  # without special tokens
        return text
