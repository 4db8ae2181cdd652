"""The text itself, as it comes, or `{"text"}` where the request does not stream."""

from __future__ import annotations

import orjson

from djl_trtllm.api.base import Prompt
from djl_trtllm.api.output import WholeEncoder
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


class WholeTextEncoder(WholeEncoder):
    """`{"text"}` at the end."""

    def __init__(self) -> None:
        super().__init__(1)

    def begin(self, prompt: Prompt) -> None:
        pass

    def _body(self) -> bytes:
        return orjson.dumps({"text": self._output.sequences[0].text})
