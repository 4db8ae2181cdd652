"""Responses with a generated text, as LMI, TGI and Truss have them: an object, tokens as they come, or the text."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec
import orjson

from djl_trtllm.api import parameters as kinds
from djl_trtllm.api.base import CollectedSequence, Prompt, ResponseEncoder, WholeEncoder
from djl_trtllm.api.parameters import Parameter
from djl_trtllm.api.sampling import MOST_TOKENS
from djl_trtllm.request import OutputChunk, SequenceResult, Token

PARAMETERS = (
    Parameter(("max_new_tokens",), kinds.integer(1, MOST_TOKENS), "max_new_tokens"),
    Parameter(("temperature",), kinds.number(0), "temperature"),
    Parameter(("details",), kinds.BOOLEAN, "details"),
    Parameter(("return_full_text",), kinds.BOOLEAN, "return_full_text"),
    Parameter(("decoder_input_details",), kinds.BOOLEAN, "prefill"),
)
"""The rows that LMI and TGI have in common, beside those of sampling."""


class Presentation(msgspec.Struct):
    """The choices that a request makes about the form of its response.

    `inputs` is the prompt for `details` and `return_full_text`. The response has `n` sequences, the best first.
    `stream` is the value in the request; an encoder may differ. `prompt_length` and `prompt_tokens` (with `prefill`)
    come when the prompt is tokenised.
    """

    inputs: str = ""
    stream: bool = False
    details: bool = False
    return_full_text: bool = False
    prefill: bool = False
    tgi_compat: bool = False
    n: int = 1
    prompt_length: int = 0
    prompt_tokens: Sequence[Token] = ()

    def begin(self, prompt: Prompt) -> None:
        self.inputs = prompt.text
        self.prompt_length = prompt.length
        if self.prefill:
            self.prompt_tokens = prompt.tokens

    def shown_text(self, generated: str) -> str:
        """The generated text, with `return_full_text` behind the prompt."""
        return self.inputs + generated if self.return_full_text else generated


def tgi_token(token: Token) -> dict[str, Any]:
    """A token in TGI's schema. `special` is always present: TGI's own client requires it."""
    return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special}


class TextEncoder(WholeEncoder):
    """`{"generated_text", "details"?}`. With more than one sequence, `best_of_sequences` of the details has the others.

    `as_list`: the object is in a list.
    """

    def __init__(self, presentation: Presentation, *, as_list: bool = False) -> None:
        super().__init__(presentation.n)
        self.wants_prompt_tokens = presentation.prefill
        self._presentation = presentation
        self._as_list = as_list

    def begin(self, prompt: Prompt) -> None:
        self._presentation.begin(prompt)

    def _body(self) -> bytes:
        best, *others = self._output.sequences
        response: dict[str, Any] = {"generated_text": self._presentation.shown_text(best.text)}
        if self._presentation.details or others:
            response["details"] = self.details(best)
            if others:
                response["details"]["best_of_sequences"] = [self.other(other) for other in others]
        return orjson.dumps([response] if self._as_list else response)

    @abstractmethod
    def details(self, sequence: CollectedSequence) -> dict[str, Any]:
        """The details of a sequence."""

    def other(self, sequence: CollectedSequence) -> dict[str, Any]:
        """The object of one further sequence in `best_of_sequences`."""
        return {"generated_text": self._presentation.shown_text(sequence.text), **self.details(sequence)}


class TokenStreamEncoder(ResponseEncoder):
    """A stream of tokens, each a line or an event: the bytes that `line` makes of it.

    Every token is sent at once. If the end is known with the last token, that token has the whole text beside it. If
    the end comes without a token (a stop string removed the text, or the request was cancelled), one more is sent: it
    repeats the last id with an empty text and is special, so that joined texts and summed log-probabilities are right;
    its id is -1 if nothing was generated. The last token is passed to `end`, when its text is among the kept texts
    already.
    """

    stream = True

    def __init__(self, presentation: Presentation) -> None:
        self._presentation = presentation
        self._texts: list[str] = []
        self._last_id = -1

    def begin(self, prompt: Prompt) -> None:
        self._presentation.begin(prompt)

    def encode(self, chunk: OutputChunk) -> bytes:
        tokens, finished, line = chunk.tokens, chunk.finished, self.line
        if finished is None:
            # Most chunks are one token, which needs no join.
            return line(tokens[0]) if len(tokens) == 1 else b"".join([line(token) for token in tokens])
        if finished.error is not None:
            return b"".join([line(token) for token in tokens]) + self.error(finished.error)
        before = b"".join([line(token) for token in tokens[:-1]])
        last = tokens[-1] if tokens else Token(self._last_id, "", 0.0, True)
        self._texts.append(last.text)
        return before + self.end(last, finished)

    @abstractmethod
    def line(self, token: Token) -> bytes:
        """The bytes of a token. Its text is added to the texts, and its id is kept as the last one."""

    @abstractmethod
    def end(self, token: Token, finished: SequenceResult) -> bytes:
        """The last line or event."""

    @property
    def _text(self) -> str:
        """The whole text, as it is shown."""
        return self._presentation.shown_text("".join(self._texts))


class PlainTextEncoder(ResponseEncoder):
    """Raw text, in the pieces in which it is generated.

    Raw text cannot express a failure: the body then has no end. (Truss's template puts an error object into the text,
    where it looks like the model's own words.)
    """

    stream = True

    def __init__(self, presentation: Presentation, content_type: str) -> None:
        self.content_type = content_type
        self._presentation = presentation
        self._begun = False

    def begin(self, prompt: Prompt) -> None:
        self._presentation.begin(prompt)

    def encode(self, chunk: OutputChunk) -> bytes:
        if chunk.finished is not None and chunk.finished.error is not None:
            raise chunk.finished.error
        text = "".join([token.text for token in chunk.tokens])
        if not self._begun:
            self._begun, text = True, self._presentation.shown_text(text)
        return text.encode()
