"""What becomes of tools and reasoning in a request for a chat."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from djl_trtllm.api import Call, RawRequest
from djl_trtllm.api.openai.chat import ChatEncoder, ChatStreamEncoder
from djl_trtllm.api.openai.dialect import OPENAI
from djl_trtllm.api.openai.parsed_chat import ParsedChatEncoder, ParsedChatStreamEncoder
from djl_trtllm.config import ReasoningFormat
from djl_trtllm.errors import InvalidRequestError, UnsupportedParameterError
from djl_trtllm.model import Tokenizer
from tests.api.openai.tool_models import HERMES, NAMED, THINKING, WEATHER, tool_model

USER = {"role": "user", "content": "Hello"}
SCHEMA = {"type": "json_object"}


def parse(tokenizer: Tokenizer, template: str, /, options: dict[str, Any] | None = None, **body: Any) -> Call:
    body = {"messages": [USER], **body}
    model = tool_model(tokenizer, template, **(options or {}))
    return OPENAI.parse(RawRequest(orjson.dumps(body), {}, "/v1/chat/completions"), model)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_without_tools_has_the_encoder_without_a_parser(tokenizer: Tokenizer, stream: bool) -> None:
    bodies: list[dict[str, Any]] = [{}, {"tools": [WEATHER], "tool_choice": "none"}]
    for body in bodies:
        call = parse(tokenizer, HERMES, stream=stream, **body)
        assert type(call.encoder) is (ChatStreamEncoder if stream else ChatEncoder)
        assert (call.requests[0].template, call.requests[0].shown_tokens) == (None, ())


@pytest.mark.parametrize("stream", [False, True])
def test_tools_reach_the_template_and_the_parser(tokenizer: Tokenizer, stream: bool) -> None:
    call = parse(tokenizer, HERMES, stream=stream, tools=[WEATHER])
    assert type(call.encoder) is (ParsedChatStreamEncoder if stream else ParsedChatEncoder)
    (request,) = call.requests
    assert request.template == {"tools": [WEATHER]}
    assert request.shown_tokens == ("<tool_call>", "</tool_call>")
    assert (request.guide, request.guide_from) == (None, None)


def test_forced_calls_have_a_guide_that_says_whose_it_is(tokenizer: Tokenizer) -> None:
    for choice in ("required", NAMED):
        (request,) = parse(tokenizer, THINKING, tools=[WEATHER], tool_choice=choice).requests
        assert request.guide is not None
        assert (request.guide_from, request.shown_tokens) == ("tool_choice", ())


def test_the_template_tells_of_reasoning_unless_an_option_or_a_guide_does(tokenizer: Tokenizer) -> None:
    assert parse(tokenizer, THINKING).requests[0].shown_tokens == ("<think>", "</think>")
    assert parse(tokenizer, THINKING, response_format=SCHEMA).requests[0].shown_tokens == ()
    assert type(parse(tokenizer, THINKING, {"reasoning_parser": ReasoningFormat.NONE}).encoder) is ChatEncoder
    assert type(parse(tokenizer, HERMES, {"reasoning_parser": ReasoningFormat.QWEN3}).encoder) is ParsedChatEncoder


def test_what_is_wrong_with_tools_is_the_requests_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(UnsupportedParameterError, match="no place for tools"):
        parse(tokenizer, "{{ messages }}", tools=[WEATHER])
    with pytest.raises(InvalidRequestError, match="'tools' is 3"):
        parse(tokenizer, HERMES, tools=3)
    with pytest.raises(InvalidRequestError, match=r"'messages\[0\].tool_calls\[0\]' is 3"):
        parse(tokenizer, HERMES, messages=[{"role": "assistant", "content": None, "tool_calls": [3]}])
