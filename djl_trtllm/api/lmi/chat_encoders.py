"""The encoders of LMI's chat responses: `json_chat`, `jsonlines_chat` and `sse_chat`.

OpenAI's format without a `model` field, as in DJL's rolling batch. Where DJL's values made OpenAI's own clients fail,
the values are OpenAI's, because the format exists for those clients:

- `finish_reason` is `stop` (end token or stop string) or `length`; DJL put `eos_token` there, which typed clients
  refuse. OpenAI has no value for errors and cancelled requests: `error` and `cancelled` are LMI's.
- `logprobs` is an object in chunks too (DJL: a list of one), `bytes` are UTF-8 (DJL: code points), and
  `top_logprobs[].token` is the token (DJL: the number). Only the chosen token is in `top_logprobs`.
- `usage.prompt_tokens` is counted (DJL: 0); streams send `usage` when `stream_options.include_usage` asks for it.
- `n` above 1 works, in streams by `choices[0].index` (DJL ignored it).
"""

from __future__ import annotations

from typing import Any

import orjson

from djl_trtllm.api.lmi.finish_reasons import FINISH_REASONS
from djl_trtllm.api.lmi.presentation import Presentation, PresentingEncoder, WholeResponseEncoder
from djl_trtllm.api.output import dump_line
from djl_trtllm.errors import RequestError
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult, Token

_FINISH = {FinishReason.END_TOKEN: "stop", FinishReason.STOP: "stop"}


class ChatEncoder(WholeResponseEncoder):
    """`json_chat`: one `chat.completion`."""

    def _body(self) -> bytes:
        presentation = self._presentation
        choices: list[dict[str, Any]] = []
        generated = 0
        for index, sequence in enumerate(self._output.sequences):
            assert sequence.finished is not None
            generated += sequence.finished.generated_tokens
            choices.append(
                {
                    "index": index,
                    "message": {"role": "assistant", "content": sequence.text},
                    "logprobs": _logprobs(sequence.tokens) if presentation.logprobs else None,
                    "finish_reason": _reason(sequence.finished),
                }
            )
        return orjson.dumps(
            {
                "id": f"chatcmpl-{presentation.id}",
                "object": "chat.completion",
                "created": presentation.created,
                "choices": choices,
                "usage": _usage(presentation, generated),
            }
        )


class ChatStreamEncoder(PresentingEncoder):
    """`jsonlines_chat`: a `chat.completion.chunk` per token and line; `sse_chat`: as events, and `[DONE]`.

    The last token's chunk has the `finish_reason`; if the end has no token, a chunk with an empty content has it.
    """

    stream = True

    def __init__(self, presentation: Presentation, *, sse: bool) -> None:
        super().__init__(presentation)
        self._running = presentation.n
        self._begun = [False] * presentation.n
        self._generated = 0
        self._before, self._after = (b"data: ", b"\n\n") if sse else (b"", b"\n")
        self._done = b"data: [DONE]\n\n" if sse else b""
        self.content_type = "text/event-stream" if sse else "application/jsonlines"
        # The same in every chunk: everything before the choice.
        self._head = b'%b{"id":"chatcmpl-%b","object":"chat.completion.chunk","created":%d,"choices":[' % (
            self._before,
            presentation.id.encode(),
            presentation.created,
        )
        # The hot path: between the first and the last chunk of a choice only the content differs.
        self._middle = [
            b'%b{"index":%d,"delta":{"content":%%b},"logprobs":null,"finish_reason":null}]}%b'
            % (self._head, index, self._after)
            for index in range(presentation.n)
        ]
        self._failed = False

    def encode(self, chunk: OutputChunk) -> bytes:
        index, tokens, finished = chunk.index, chunk.tokens, chunk.finished
        if self._failed:
            return b""
        if finished is None:
            return self._chunks(index, tokens)
        if finished.error is not None:
            return self._chunks(index, tokens) + self.error(finished.error)
        chunks = [self._chunks(index, tokens[:-1])]
        chunks.append(self._chunk(index, tokens[-1] if tokens else None, _reason(finished)))
        self._generated += finished.generated_tokens
        self._running -= 1
        if self._running == 0:
            if self._presentation.include_usage:
                usage = dump_line(_usage(self._presentation, self._generated))
                chunks.append(b'%b],"usage":%b}%b' % (self._head, usage, self._after))
            chunks.append(self._done)
        return b"".join(chunks)

    def error(self, error: RequestError) -> bytes:
        """A last chunk with finish reason `error` and an `error` object, which OpenAI's clients raise."""
        self._failed = True  # the other choices end too
        choice = {"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": "error"}
        failure = {"message": str(error), "type": type(error).__name__}
        last = b'%b%b],"error":%b}%b' % (self._head, dump_line(choice), dump_line(failure), self._after)
        return last + self._done

    def _chunks(self, index: int, tokens: list[Token]) -> bytes:
        if not self._begun[index] or self._presentation.logprobs:
            return b"".join([self._chunk(index, token, None) for token in tokens])
        middle = self._middle[index]
        if len(tokens) == 1:
            return middle % dump_line(tokens[0].text)
        return b"".join([middle % dump_line(token.text) for token in tokens])

    def _chunk(self, index: int, token: Token | None, reason: str | None) -> bytes:
        delta = {"content": "" if token is None else token.text}
        if not self._begun[index]:
            self._begun[index] = True
            delta["role"] = "assistant"
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": _logprobs([token]) if self._presentation.logprobs and token is not None else None,
            "finish_reason": reason,
        }
        return b"%b%b]}%b" % (self._head, dump_line(choice), self._after)


def _logprobs(tokens: list[Token]) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    for token in tokens:
        chosen = {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.text.encode()) if token.text else None,
        }
        content.append(chosen | {"top_logprobs": [chosen]})
    return {"content": content}


def _usage(presentation: Presentation, generated: int) -> dict[str, int]:
    return {
        "prompt_tokens": presentation.prompt_length,
        "completion_tokens": generated,
        "total_tokens": presentation.prompt_length + generated,
    }


def _reason(finished: SequenceResult) -> str:
    return _FINISH.get(finished.reason) or FINISH_REASONS[finished.reason]
