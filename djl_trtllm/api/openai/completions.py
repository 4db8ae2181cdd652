"""The encoders of `/v1/completions`."""

from __future__ import annotations

from typing import Any

from djl_trtllm.api.openai.response import FINISH_REASONS, EventEncoder, ObjectEncoder, Response
from djl_trtllm.api.output import CollectedSequence, dump_line
from djl_trtllm.request import RankedToken, SequenceResult, Token


class CompletionEncoder(ObjectEncoder):
    """One `text_completion`. The choices of the first prompt come first."""

    kind = "text_completion"

    def choice(self, index: int, sequence: CollectedSequence, finished: SequenceResult) -> dict[str, Any]:
        echoed = self.response.prompts[index // self.response.n] if self.response.echo else ""
        return {
            "index": index,
            "text": echoed + sequence.text,
            "logprobs": logprobs(sequence.tokens, 0) if self.response.logprobs else None,
            "finish_reason": FINISH_REASONS[finished.reason],
        }


class CompletionStreamEncoder(EventEncoder):
    """`text_completion`s with new text. With `echo`, a choice begins with its prompt."""

    kind = "text_completion"

    def __init__(self, response: Response) -> None:
        super().__init__(response)
        count = response.n * response.generations
        self._echoed = [not response.echo] * count
        self._offsets = [0] * count
        self._text = [
            b'%b{"index":%d,"text":%%b,"logprobs":null,"finish_reason":null}%b'
            % (self._before.replace(b"%", b"%%"), index, self._after)
            for index in range(count)
        ]

    def events(self, index: int, tokens: list[Token], finished: SequenceResult | None) -> bytes:
        """See `EventEncoder`. Tokens without a text add nothing, unless their log-probabilities are wanted."""
        events = b""
        if not self._echoed[index]:
            self._echoed[index] = True
            events = self._text[index] % dump_line(self.response.prompts[index // self.response.n])
        text = tokens[0].text if len(tokens) == 1 else "".join([token.text for token in tokens])
        if self.response.logprobs and tokens:
            events += self._choice(index, text, logprobs(tokens, self._offsets[index]))
            self._offsets[index] += len(text)
        elif text:
            events += self._text[index] % dump_line(text)
        if finished is not None:
            events += self._choice(index, "", reason=FINISH_REASONS[finished.reason])
        return events

    def _choice(self, index: int, text: str, shown: dict[str, Any] | None = None, reason: str | None = None) -> bytes:
        return self._event({"index": index, "text": text, "logprobs": shown, "finish_reason": reason})


def logprobs(tokens: list[Token], offset: int) -> dict[str, Any]:
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
