"""Messages as Anthropic's API answers them: a `message`, or its events."""

from __future__ import annotations

from typing import Any

import orjson

from djl_trtllm import errors
from djl_trtllm.api.base import dump_line, nearest_row
from djl_trtllm.api.chat import Parsing, as_opaque
from djl_trtllm.api.parts import Part, PartKind, PartsEncoder
from djl_trtllm.bounded_json import read_json
from djl_trtllm.request import FinishReason, SequenceResult

_ERROR_TYPES: dict[type[errors.RequestError], str] = {
    errors.InvalidRequestError: "invalid_request_error",
    errors.UnknownAdapterError: "not_found_error",
    errors.UnknownModelError: "not_found_error",
    errors.UnknownPathError: "not_found_error",
    errors.AuthenticationError: "authentication_error",
    errors.ForbiddenError: "permission_error",
    errors.MethodNotAllowedError: "invalid_request_error",
    errors.RequestTooLargeError: "request_too_large",
    errors.TooManyRequestsError: "rate_limit_error",
    errors.OverloadedError: "overloaded_error",
    errors.NotReadyError: "overloaded_error",
    errors.RequestTimeoutError: "timeout_error",
    errors.GenerationError: "api_error",
}


def error_body(message: str, error: errors.RequestError | None) -> dict[str, Any]:
    """The JSON of an error."""
    return {"type": "error", "error": {"type": nearest_row(_ERROR_TYPES, error), "message": message}}


_STOP_REASONS = {
    FinishReason.END_TOKEN: "end_turn",
    FinishReason.STOP: "end_turn",  # a stop token id; a stop string has a reason of its own
    FinishReason.LENGTH: "max_tokens",
    FinishReason.CANCELLED: "pause_turn",
    FinishReason.ERROR: "pause_turn",
}

_DELTAS = {
    PartKind.TEXT: b'{"type":"text_delta","text":%b}',
    PartKind.REASONING: b'{"type":"thinking_delta","thinking":%b}',
    PartKind.CALL: b'{"type":"input_json_delta","partial_json":%b}',
}


class MessageEncoder(PartsEncoder):
    """One `message`. With `omits_thinking`, thinking has no text but a signature, from which its text is read again."""

    def __init__(self, code: str, model: str, parsing: Parsing, *, stream: bool, omits_thinking: bool = False) -> None:
        super().__init__(parsing, stream=stream)
        self._id = f"msg_{code}"
        self._model = model
        self._omits_thinking = omits_thinking

    def head(self) -> bytes:
        message = self._message([], None, None, self._usage(0))
        return _event("message_start", {"message": message}) + _event("ping", {})

    def opened(self, part: Part) -> bytes:
        if part.kind is PartKind.CALL:
            block = {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
        elif part.kind is PartKind.REASONING:
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "text", "text": ""}
        return _event("content_block_start", {"index": part.index, "content_block": block})

    def more(self, part: Part, text: str, logprobs: list[bytes]) -> bytes:
        if part.kind is PartKind.REASONING and self._omits_thinking:
            return b""
        return self._delta(part, _DELTAS[part.kind] % dump_line(text))

    def closed(self, part: Part) -> bytes:
        signature = b""
        if part.kind is PartKind.REASONING:
            signature = self._delta(part, dump_line({"type": "signature_delta", "signature": self._signature(part)}))
        return signature + _event("content_block_stop", {"index": part.index})

    def end(self, finished: SequenceResult) -> bytes:
        reason, stop = _STOP_REASONS[finished.reason], None
        if finished.reason is FinishReason.STOP and finished.stop_sequence is not None:
            reason, stop = "stop_sequence", finished.stop_sequence
        elif self.calls and finished.reason <= FinishReason.STOP:
            reason = "tool_use"
        usage = self._usage(finished.generated_tokens, finished.cached_tokens)
        if self.stream:
            delta = {"stop_reason": reason, "stop_sequence": stop}
            return _event("message_delta", {"delta": delta, "usage": usage}) + _event("message_stop", {})
        return orjson.dumps(self._message([self._block(part) for part in self.parts], reason, stop, usage))

    def failure(self, error: errors.RequestError) -> bytes:
        return _event("error", error_body(str(error), error))

    def _message(self, content: list[Any], reason: str | None, stop: str | None, usage: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    def _usage(self, generated: int, reused: int = 0) -> dict[str, Any]:
        """The prompt's tokens are those that the prefix cache did not have."""
        return {
            "input_tokens": self.prompt_tokens - reused,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": reused,
            "output_tokens": generated,
            "output_tokens_details": {"thinking_tokens": self.reasoning_tokens},
        }

    def _block(self, part: Part) -> dict[str, Any]:
        if part.kind is PartKind.CALL:
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": _input(part.text)}
        if part.kind is PartKind.REASONING:
            text = "" if self._omits_thinking else part.text
            return {"type": "thinking", "thinking": text, "signature": self._signature(part)}
        return {"type": "text", "text": part.text}

    def _signature(self, part: Part) -> str:
        return as_opaque(part.text) if self._omits_thinking else self._id

    def _delta(self, part: Part, delta: bytes) -> bytes:
        return b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b}\n\n' % (
            part.index,
            delta,
        )


def _event(kind: str, members: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), dump_line({"type": kind, **members}))


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call. What is no JSON object, as where a limit cut it off, is shown as text."""
    try:
        value = read_json(arguments.encode() or b"{}")
    except (orjson.JSONDecodeError, errors.InvalidRequestError):
        value = None
    return value if type(value) is dict else {"INVALID_JSON": arguments}
