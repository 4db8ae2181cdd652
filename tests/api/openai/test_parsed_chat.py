from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from djl_trtllm.api import Prompt
from djl_trtllm.api.openai.parsed_chat import Choice, ParsedChatEncoder, ParsedChatStreamEncoder, Parsing
from djl_trtllm.api.openai.response import Response
from djl_trtllm.api.openai.tools import ToolUse
from djl_trtllm.api.output_parsers import (
    CallArguments,
    CallStart,
    Content,
    Event,
    NamedParser,
    OutputParser,
    Reasoning,
    ToolFormat,
)
from djl_trtllm.api.output_parsers.hermes import HermesParser
from djl_trtllm.config import ReasoningFormat
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult, Token
from tests.api.scripts import FAILURE, check_golden, parse_lines

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OUTPUT = f"<think>\nWhere?\n</think>\n\nI look.\n{CALL}\n{CALL}"
THINKING = ReasoningFormat.QWEN3


class Format(ToolFormat):
    """Calls have the same id every time."""

    def new_id(self) -> str:
        return "call_0"


def tools(parallel: bool = True) -> ToolUse:
    return ToolUse(HermesParser, Format(lambda names: HermesParser()), ("<tool_call>",), None, parallel)


def chunks(text: str, size: int, reason: FinishReason = FinishReason.END_TOKEN, index: int = 0) -> list[OutputChunk]:
    """The text in tokens of some characters, then its end."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    tokens = [OutputChunk(index, [Token(at, piece, -0.5, False)], None) for at, piece in enumerate(pieces)]
    return [*tokens, OutputChunk(index, [], SequenceResult(reason, len(pieces), None, None))]


def encode(
    text: str,
    size: int = 7,
    *,
    stream: bool = True,
    parsing: Parsing | None = None,
    prompt: str = "?",
    reason: FinishReason = FinishReason.END_TOKEN,
    **view: Any,
) -> bytes:
    response = Response("id", "wolf", id="0123", created=1700000000, stream=stream, **view)
    encoder = (ParsedChatStreamEncoder if stream else ParsedChatEncoder)(
        response, parsing or Parsing(tools(), THINKING)
    )
    encoder.begin(Prompt(prompt, 3))
    parts = [chunk for index in range(response.n) for chunk in chunks(text, size, reason, index)]
    return b"".join([encoder.encode(chunk) for chunk in parts])


def whole(text: str, **view: Any) -> Any:
    return json.loads(encode(text, stream=False, **view))["choices"][0]


def joined(body: bytes, index: int = 0) -> dict[str, Any]:
    """The message that a client puts together of the deltas."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": [], "reason": None}
    for event in parse_lines(body):
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["calls"]) and call["type"] == "function"
                    message["calls"].append([call["function"]["name"], ""])
                message["calls"][call["index"]][1] += call["function"]["arguments"]
            message["reason"] = choice["finish_reason"] or message["reason"]
    return message


ROME = ["weather", '{"city": "Rome"}']


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
def test_an_answer_with_everything_is_as_stored(stream: bool, logprobs: bool) -> None:
    name = "openai_tools" + "_stream" * stream + "-logprobs" * logprobs
    check_golden(name, encode(OUTPUT, 9, stream=stream, logprobs=logprobs, include_usage=True))


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_streams_and_whole_answers_are_the_same_however_the_text_comes(size: int) -> None:
    expected = {"content": "I look.", "reasoning_content": "Where?", "calls": [ROME, ROME], "reason": "tool_calls"}
    assert joined(encode(OUTPUT, size)) == expected
    choice = whole(OUTPUT, size=size)
    message = choice["message"]
    assert [message["content"], message["reasoning_content"]] == ["I look.", "Where?"]
    assert [list(call["function"].values()) for call in message["tool_calls"]] == [ROME, ROME]
    assert choice["finish_reason"] == "tool_calls"


def test_each_choice_is_parsed_by_itself() -> None:
    body = encode(OUTPUT, n=2)
    assert joined(body, 0) == joined(body, 1)
    assert joined(body)["calls"] == [ROME, ROME]


def test_an_answer_of_calls_has_no_content() -> None:
    message = whole(CALL)["message"]
    assert message["content"] is None and "reasoning_content" not in message
    plain = whole("The wolf.")
    assert plain["message"] == {"role": "assistant", "content": "The wolf.", "refusal": None}
    assert (plain["finish_reason"], whole("")["message"]["content"]) == ("stop", "")


def test_one_call_is_returned_if_they_must_not_be_parallel() -> None:
    parsing = Parsing(tools(parallel=False), THINKING)
    assert joined(encode(OUTPUT, parsing=parsing))["calls"] == [ROME]
    assert len(whole(OUTPUT, parsing=parsing)["message"]["tool_calls"]) == 1


def test_an_output_that_was_cut_short_says_so() -> None:
    cut = OUTPUT[:-30]
    assert joined(encode(cut, reason=FinishReason.LENGTH))["reason"] == "length"
    assert whole(cut, reason=FinishReason.LENGTH)["finish_reason"] == "length"


def test_every_token_has_its_log_probability_once() -> None:
    events = [choice for event in parse_lines(encode(OUTPUT, logprobs=True)) for choice in event["choices"]]
    shown = [token["token"] for choice in events if choice["logprobs"] for token in choice["logprobs"]["content"]]
    assert "".join(shown) == OUTPUT


@pytest.mark.parametrize(
    ("reasoning", "prompt", "text", "thought"),
    [
        (THINKING, "<think>\n", "Hm.</think>Yes.", "Hm."),
        (THINKING, "?", "Hm.</think>Yes.", ""),
        (ReasoningFormat.DEEPSEEK_R1, "?", "Hm.</think>Yes.", "Hm."),
        (ReasoningFormat.DEEPSEEK_R1, "<think>\n\n</think>\n\n", "Yes.", ""),
    ],
)
def test_the_prompt_may_have_begun_the_reasoning(
    reasoning: ReasoningFormat, prompt: str, text: str, thought: str
) -> None:
    parsing = Parsing(None, reasoning)
    assert joined(encode(text, parsing=parsing, prompt=prompt))["reasoning_content"] == thought
    assert whole(text, parsing=parsing, prompt=prompt)["message"].get("reasoning_content", "") == thought


def test_a_named_call_is_all_of_the_output() -> None:
    named = ToolUse(functools.partial(NamedParser, "f"), Format(lambda names: HermesParser()))
    assert joined(encode('{"a": 1}', parsing=Parsing(named, ReasoningFormat.NONE)))["calls"] == [["f", '{"a": 1}']]


def test_what_is_looked_for_decides_what_is_needed() -> None:
    none = ReasoningFormat.NONE
    unparsed = ToolUse(None, Format(lambda names: HermesParser()))
    assert [Parsing(None, none).needed, Parsing(unparsed, none).needed] == [False, False]
    assert [Parsing(tools(), none).needed, Parsing(None, THINKING).needed] == [True, True]
    assert Parsing(tools(), none).shown_tokens == ("<tool_call>",)
    assert Parsing(None, THINKING).shown_tokens == ("<think>", "</think>")


def test_a_stream_that_fails_ends_with_the_error() -> None:
    encoder = ParsedChatStreamEncoder(Response("id", "wolf", stream=True), Parsing(tools(), THINKING))
    encoder.begin(Prompt("?", 3))
    failed = SequenceResult(FinishReason.ERROR, 1, None, None, error=FAILURE)
    body = encoder.encode(OutputChunk(0, [Token(1, "The wolf", None, False)], failed))
    assert [*parse_lines(body)[-1]] == ["error"] and body.endswith(b"[DONE]\n\n")
    assert b"The wolf" in body


class Played(OutputParser):
    """Every feed has the same events."""

    def feed(self, text: str) -> list[Event]:
        return [Content("a"), Content("b"), Reasoning("c"), CallStart("f"), CallArguments("{"), CallArguments("}")]

    def finish(self) -> list[Event]:
        return [CallArguments(" "), Reasoning("d"), Reasoning("e")]


def test_events_of_one_kind_that_follow_each_other_are_one_delta() -> None:
    call = {"index": 0, "id": "call_0", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert Choice(Played(), tools()).deltas("x", end=True) == [
        {"content": "ab"},
        {"reasoning_content": "c"},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{} "}}]},
        {"reasoning_content": "de"},
    ]


def test_what_looks_like_the_beginning_of_a_call_is_content_at_the_end() -> None:
    text = "The wolf. <tool_"
    assert whole(text)["message"]["content"] == joined(encode(text))["content"] == text
