"""The text itself, as it comes, or `{"text"}` where the request does not stream."""

from __future__ import annotations

import orjson

from djl_trtllm.api.base import Prompt
from djl_trtllm.errors import RequestError
from djl_trtllm.request import OutputChunk


class TextEncoder:
    """Raw text, in the pieces in which it is generated.

    Raw text cannot express a failure: the body then has no end. (Truss's template puts an error object into the text,
    where it looks like the model's own words.)
    """

    stream = True
    content_type = "application/octet-stream"
    wants_prompt_tokens = False

    def begin(self, prompt: Prompt) -> None:
        pass

    def encode(self, chunk: OutputChunk) -> bytes:
        if chunk.finished is not None and chunk.finished.error is not None:
            raise chunk.finished.error
        return "".join([token.text for token in chunk.tokens]).encode()

    def error(self, error: RequestError) -> bytes:
        """Nothing; see the class."""
        return b""


class WholeTextEncoder:
    """`{"text"}` at the end."""

    stream = False
    content_type = "application/json"
    wants_prompt_tokens = False

    def __init__(self) -> None:
        self._texts: list[str] = []

    def begin(self, prompt: Prompt) -> None:
        pass

    def encode(self, chunk: OutputChunk) -> bytes:
        if chunk.finished is not None and chunk.finished.error is not None:
            raise chunk.finished.error
        self._texts += [token.text for token in chunk.tokens]
        return b"" if chunk.finished is None else orjson.dumps({"text": "".join(self._texts)})

    def error(self, error: RequestError) -> bytes:
        """Nothing: no byte of a whole response is sent before its end."""
        return b""
