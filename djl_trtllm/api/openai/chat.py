"""The encoders of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from djl_trtllm.api.openai.response import FINISH_REASONS, EventEncoder, ObjectEncoder, Response
from djl_trtllm.api.output import CollectedSequence, dump_line
from djl_trtllm.request import RankedToken, SequenceResult, Token


class ChatEncoder(ObjectEncoder):
    """One `chat.completion`."""

    kind = "chat.completion"

    def choice(self, index: int, sequence: CollectedSequence, finished: SequenceResult) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": sequence.text, "refusal": None},
            "logprobs": logprobs(sequence.tokens) if self.response.logprobs else None,
            "finish_reason": FINISH_REASONS[finished.reason],
        }


class ChatStreamEncoder(EventEncoder):
    """`chat.completion.chunk`s. Each choice begins with an empty chunk that has its role."""

    kind = "chat.completion.chunk"

    def __init__(self, response: Response) -> None:
        super().__init__(response)
        self._begun = [False] * response.n
        # The hot path: only the content differs.
        self._content = [
            b'%b{"index":%d,"delta":{"content":%%b},"logprobs":null,"finish_reason":null}%b'
            % (self._before.replace(b"%", b"%%"), index, self._after)
            for index in range(response.n)
        ]

    def events(self, index: int, tokens: list[Token], finished: SequenceResult | None) -> bytes:
        """See `EventEncoder`. Tokens without a text add nothing, unless their log-probabilities are wanted."""
        events = b"" if self._begun[index] else self.first(index)
        text = tokens[0].text if len(tokens) == 1 else "".join([token.text for token in tokens])
        if self.response.logprobs and tokens:
            events += self._delta(index, {"content": text}, tokens)
        elif text:
            events += self._content[index] % dump_line(text)
        if finished is not None:
            events += self._delta(index, {}, reason=FINISH_REASONS[finished.reason])
        return events

    def first(self, index: int) -> bytes:
        """The event that a choice begins with, b"" if it has begun."""
        if self._begun[index]:
            return b""
        self._begun[index] = True
        return self._delta(index, {"role": "assistant", "content": "", "refusal": None})

    def _delta(
        self, index: int, delta: dict[str, Any], tokens: list[Token] | None = None, reason: str | None = None
    ) -> bytes:
        shown = None if tokens is None else logprobs(tokens)
        return self._event({"index": index, "delta": delta, "logprobs": shown, "finish_reason": reason})


def logprobs(tokens: list[Token]) -> dict[str, Any]:
    """The `logprobs` of a choice. A log-probability that the engine did not report is null."""
    content = [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": _bytes(token.text),
            "top_logprobs": _alternatives(token) if isinstance(token, RankedToken) else [],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _alternatives(token: RankedToken) -> list[dict[str, Any]]:
    return [{"token": each.text, "logprob": each.logprob, "bytes": _bytes(each.text)} for each in token.top]


def _bytes(text: str) -> list[int] | None:
    return list(text.encode()) if text else None
