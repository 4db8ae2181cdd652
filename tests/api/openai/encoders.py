"""The encoders by name, with ids and times that never change."""

from __future__ import annotations

from typing import Any

from djl_trtllm.api.openai.chat import ChatEncoder, ChatStreamEncoder
from djl_trtllm.api.openai.completions import CompletionEncoder, CompletionStreamEncoder
from djl_trtllm.api.openai.response import Response
from tests.api.scripts import EOS, answer, check_golden, parse_lines, several

ENCODERS: dict[str, Any] = {
    "chat": ChatEncoder,
    "chat_stream": ChatStreamEncoder,
    "completion": CompletionEncoder,
    "completion_stream": CompletionStreamEncoder,
}
STREAMS = ("chat_stream", "completion_stream")


def make(name: str, **view: Any) -> Any:
    """An encoder with an id and a time that never change."""
    return ENCODERS[name](Response("id", "100% wolf", id="0123", created=1700000000, stream=name in STREAMS, **view))


def text_of(body: bytes, index: int = 0) -> str:
    """The text of a choice in a stream."""
    choices = [choice for event in parse_lines(body) for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


def check_stored(name: str) -> None:
    """Compare what an encoder makes of the scripts with the stored answers."""
    for logprobs in (False, True):
        check_golden(f"openai_{name}" + "-logprobs" * logprobs, answer(make(name, logprobs=logprobs), EOS))
    check_golden(f"openai_{name}-n", answer(make(name, n=2, include_usage=True), several(2)))
