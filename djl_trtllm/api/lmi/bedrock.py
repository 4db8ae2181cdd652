"""The encoders for `option.bedrock_compat`: `3p` and `3p_stream`, as in DJL's rolling batch.

`generation` of a whole response begins with the prompt, as in DJL; `stop_reason` is the LMI schema's finish reason.
One difference is on purpose: `prompt_token_count` is the real count (DJL with TensorRT-LLM: 0).
"""

from __future__ import annotations

from typing import Any

import orjson

from djl_trtllm.api.lmi.finish_reasons import FINISH_REASONS
from djl_trtllm.api.lmi.presentation import Presentation, PresentingEncoder, WholeResponseEncoder
from djl_trtllm.api.output import dump_line
from djl_trtllm.errors import RequestError
from djl_trtllm.request import OutputChunk

_ERROR_CODE = 400


class BedrockEncoder(WholeResponseEncoder):
    """`3p`: one object of `body`, `metering` and `content_type`."""

    def _body(self) -> bytes:
        presentation = self._presentation
        sequence = self._output.sequences[0]
        finished = sequence.finished
        assert finished is not None
        return orjson.dumps(
            {
                "body": {
                    "generation": presentation.shown_text(sequence.text),
                    "prompt_token_count": presentation.prompt_length,
                    "generation_token_count": finished.generated_tokens,
                    "stop_reason": FINISH_REASONS[finished.reason],
                },
                "metering": {
                    "inputTokenCount": presentation.prompt_length,
                    "outputTokenCount": finished.generated_tokens,
                },
                "content_type": self.content_type,
            }
        )


class BedrockStreamEncoder(PresentingEncoder):
    """`3p_stream`: an object per token; the first has the prompt's token count, the last the stop reason."""

    stream = True
    content_type = "application/jsonlines"

    def __init__(self, presentation: Presentation) -> None:
        super().__init__(presentation)
        self._count = 0
        self._begun = False

    def encode(self, chunk: OutputChunk) -> bytes:
        texts = [token.text for token in chunk.tokens]
        finished = chunk.finished
        if finished is None:
            return b"".join([self._line(text, None) for text in texts])
        if finished.error is not None:
            return b"".join([self._line(text, None) for text in texts]) + self.error(finished.error)
        lines = [self._line(text, None) for text in texts[:-1]]
        if texts:
            lines.append(self._line(texts[-1], FINISH_REASONS[finished.reason]))
        else:
            lines.append(self._line("", FINISH_REASONS[finished.reason], counted=False))
        return b"".join(lines)

    def error(self, error: RequestError) -> bytes:
        """A last line with stop reason `error` and the message."""
        return self._line("", "error", counted=False, error=str(error))

    def _line(self, text: str, reason: str | None, *, counted: bool = True, error: str | None = None) -> bytes:
        self._count += counted
        prompt_length = None if self._begun else self._presentation.prompt_length
        metering: dict[str, Any] = {"outputTokenCount": self._count}
        if prompt_length is not None:
            metering["inputTokenCount"] = prompt_length
        line: dict[str, Any] = {
            "body": {
                "generation": text,
                "prompt_token_count": prompt_length,
                "generation_token_count": self._count,
                "stop_reason": reason,
            },
            "metering": metering,
            "content_type": self.content_type,
        }
        if error is not None:
            line["error"] = {"error_code": _ERROR_CODE, "error_msg": error}
        self._begun = True
        return dump_line(line) + b"\n"
