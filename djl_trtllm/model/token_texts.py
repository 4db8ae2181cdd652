"""The texts of tokens that have the same text wherever they stand."""

from __future__ import annotations

import json
from typing import Any

import tokenizers

_BYTE = "<0x"
_UNFINISHED = "\ufffd"


class TokenTexts(dict[int, str | None]):
    """The text that a token adds to a text, by id; None if that depends on the tokens around it.

    It is the same everywhere for whole characters, if the decoder joins the texts of its tokens (`_joins`) and the
    token is not the first one: decoders of SentencePiece's kind take the first space away. Filled when it is asked.
    """

    def __init__(self, raw: tokenizers.Tokenizer) -> None:
        super().__init__()
        self.raw = raw
        anchor = raw.token_to_id("a")
        self._anchor: int | None = anchor if _joins(raw.decoder) else None

    def __missing__(self, token_id: int) -> str | None:
        text = self[token_id] = self._text(token_id)
        return text

    def _text(self, token_id: int) -> str | None:
        if self._anchor is None:
            return None
        token: str | None = self.raw.id_to_token(token_id)
        if token is None or token.startswith(_BYTE):
            return None
        before: str = self.raw.decode([self._anchor])
        text: str = self.raw.decode([self._anchor, token_id])
        if not text.startswith(before) or _UNFINISHED in text:
            return None
        return text[len(before) :] or None


def _joins(decoder: Any) -> bool:
    """Whether the decoder turns each token into text, or bytes, and joins these; at most it then strips the start."""
    if decoder is None:
        return False
    try:
        state = json.loads(decoder.__getstate__())
    except Exception:  # a decoder written in Python
        return False
    kinds = [_kind(step) for step in (state["decoders"] if state["type"] == "Sequence" else [state])]
    if "Fuse" not in kinds:
        return kinds in (["ByteLevel"], ["Metaspace"])
    fuse = kinds.index("Fuse")
    return set(kinds[:fuse]) <= {"Replace", "ByteFallback"} and set(kinds[fuse + 1 :]) <= {"Strip"}


def _kind(step: dict[str, Any]) -> str:
    kind: str = step["type"]
    # A regular expression may look at more than a token, and the end of a text is not known yet.
    beyond = (kind == "Replace" and "String" not in step["pattern"]) or (kind == "Strip" and step["stop"])
    return "" if beyond else kind
