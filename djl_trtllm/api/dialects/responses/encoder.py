"""Responses as OpenAI's API answers them: a `response`, or its events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from djl_trtllm import errors
from djl_trtllm.api.base import dump_line
from djl_trtllm.api.chat import Parsing, as_opaque
from djl_trtllm.api.choices import error_object, json_list
from djl_trtllm.api.parts import Part, PartKind, PartsEncoder
from djl_trtllm.request import FinishReason, SequenceResult

_PREFIXES = {PartKind.TEXT: "msg", PartKind.REASONING: "rs", PartKind.CALL: "fc"}
_NAMES = {PartKind.TEXT: "output_text", PartKind.REASONING: "reasoning_text", PartKind.CALL: "function_call_arguments"}
_COMPLETED, _INCOMPLETE, _CANCELLED = "completed", "incomplete", "cancelled"
_LAST_EVENTS = {_COMPLETED: "completed", _INCOMPLETE: "incomplete", _CANCELLED: "failed"}
"""The last event of a stream by the response's status: OpenAI has none for "cancelled"."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What is known of a response before its output.

    `code` is what its id and those of its items have in common, `members` are those that do not change. `functions` are
    the namespaces and names of functions by the names that the model is shown. `encodes_reasoning`: clients get the
    reasoning also as a field that they send back. `keep` keeps the finished response and its items.
    """

    code: str
    members: Mapping[str, Any]
    functions: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    encodes_reasoning: bool = False
    keep: Callable[[bytes, list[dict[str, Any]]], None] | None = None


class AnswerEncoder(PartsEncoder):
    """One `response`."""

    def __init__(self, answer: Answer, parsing: Parsing, *, stream: bool, logprobs: bool) -> None:
        super().__init__(parsing, stream=stream, logprobs=logprobs)
        self._answer = answer
        self._sent = 0

    def head(self) -> bytes:
        response = self._response("in_progress", [], None)
        return b"".join([self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress")])

    def opened(self, part: Part) -> bytes:
        item = self._item(part, "in_progress")
        content = item["content"].pop() if "content" in item else None
        data = self._event("response.output_item.added", output_index=part.index, item=item)
        return data if content is None else data + self._of_part("response.content_part.added", part, part=content)

    def more(self, part: Part, text: str, logprobs: list[bytes]) -> bytes:
        shown = {"logprobs": json_list(logprobs)} if part.kind is PartKind.TEXT else {}
        return self._of_part(f"response.{_NAMES[part.kind]}.delta", part, delta=text, **shown)

    def closed(self, part: Part) -> bytes:
        item, name = self._item(part, self._status), f"response.{_NAMES[part.kind]}.done"
        if part.kind is PartKind.CALL:
            data = self._of_part(name, part, arguments=part.text, name=item["name"])
        else:
            (content,) = item["content"]
            logprobs = {"logprobs": content["logprobs"]} if part.kind is PartKind.TEXT else {}
            data = self._of_part(name, part, text=part.text, **logprobs)
            data += self._of_part("response.content_part.done", part, part=content)
        return data + self._event("response.output_item.done", output_index=part.index, item=item)

    def end(self, finished: SequenceResult) -> bytes:
        status = _CANCELLED if finished.reason is FinishReason.CANCELLED else self._status
        items = [self._item(part, self._status if part is self.parts[-1] else _COMPLETED) for part in self.parts]
        usage = {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": finished.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": finished.generated_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.prompt_tokens + finished.generated_tokens,
        }
        response = self._response(status, items, usage)
        if self._answer.keep is not None:
            self._answer.keep(orjson.dumps(response), items)
        if not self.stream:
            return orjson.dumps(response)
        return self._event(f"response.{_LAST_EVENTS[status]}", response=response)

    def failure(self, error: errors.RequestError) -> bytes:
        shown = error_object(str(error), error)
        response = self._response("failed", [self._item(part, _INCOMPLETE) for part in self.parts], None)
        response["error"] = {"code": shown["code"] or "server_error", "message": shown["message"]}
        return self._event("response.failed", response=response)

    @property
    def _status(self) -> str:
        """The status of the last item: a limit or the end of its request may have cut it off."""
        cut = self.finished is not None and self.finished.reason > FinishReason.STOP
        return _INCOMPLETE if cut else _COMPLETED

    def _response(self, status: str, items: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        details = {"reason": "max_output_tokens"} if status == _INCOMPLETE else None
        head = {"id": f"resp_{self._answer.code}", "object": "response", "status": status, "error": None}
        return {**head, "incomplete_details": details, **self._answer.members, "output": items, "usage": usage}

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id(part), "status": status}
        if part.kind is PartKind.CALL:
            namespace, name = self._answer.functions.get(part.name, ("", part.name))
            call = {"type": "function_call", "call_id": part.call_id, "name": name, "arguments": part.text}
            return item | call | ({"namespace": namespace} if namespace else {})
        content: dict[str, Any] = {"type": _NAMES[part.kind], "text": part.text}
        if part.kind is PartKind.REASONING:
            encoded = {"encrypted_content": as_opaque(part.text)} if self._answer.encodes_reasoning else {}
            return item | {"type": "reasoning", "summary": [], "content": [content]} | encoded
        content |= {"annotations": [], "logprobs": json_list(part.logprobs)}
        return item | {"type": "message", "role": "assistant", "content": [content]}

    def _id(self, part: Part) -> str:
        return f"{_PREFIXES[part.kind]}_{self._answer.code}_{part.index}"

    def _of_part(self, kind: str, of: Part, **members: Any) -> bytes:
        place = {} if of.kind is PartKind.CALL else {"content_index": 0}
        return self._event(kind, item_id=self._id(of), output_index=of.index, **place, **members)

    def _event(self, kind: str, **members: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._sent, **members}
        self._sent += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), dump_line(event))
