"""Models with chat templates that know tools and reasoning."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.api.base import Prompt
from djl_trtllm.api.chat import Parsing, ToolUse, read_tool_use
from djl_trtllm.api.dialects.openai.responses import ParsedChatEncoder, ParsedChatStreamEncoder, Response
from djl_trtllm.api.output_parsers import (
    CallArguments,
    CallStart,
    Content,
    Event,
    OutputParser,
    PlainParser,
    Reasoning,
    ToolFormat,
    call_parser,
)
from djl_trtllm.api.parameters import Problems
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult, Token
from djl_trtllm.service.model import Model
from tests.api.models import check_golden, parse_lines
from tests.support.dialogues import parse
from tests.support.in_process import played_model
from tests.support.tables import by_rows, table

HERMES = "{# <tool_call> #}{% if tools %}{{ tools | tojson }}{% endif %}{{ messages | tojson }}"

WEATHER: dict[str, Any] = table(__file__, "WEATHER")
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "weather"}}


def tool_model(tokenizer: Tokenizer, template: str, **options: Any) -> Model:
    special: dict[str, str] = {}
    own = Tokenizer(
        tokenizer.raw, special_tokens=special, end_ids=[2], templates={"default": template}, origin=Path("model")
    )
    return played_model(own, **options)


Values = dict[str, Any]
ROME = ["weather", '{"city": "Rome"}']
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@by_rows(
    ("output", "calls", "options", "values"),
    [
        (CALL, [ROME], {}, {}),
        ('[{"name": "time"}]', [["time", "{}"]], {}, {"tool_choice": "required"}),
        ('{"city": "Rome"}', [ROME], {}, {"tool_choice": {"name": "weather"}}),
        ("", None, {"tool_call_parser": "none"}, {}),
    ],
)
def test_the_parser_is_that_of_the_model_or_of_a_forced_call(
    tokenizer: Tokenizer, output: str, calls: list[list[str]] | None, options: Values, values: Values
) -> None:
    problems, model = Problems(), tool_model(tokenizer, HERMES, **options)
    found = read_tool_use({"tools": [WEATHER, TIME], "parallel_tool_calls": False, **values}, model, problems)
    assert found is not None and problems == Problems() and not found.parallel
    made = None if found.parser is None else [list(call) for call in parse(found.parser(), output).calls]
    assert made == calls


OUTPUT = f"<think>\nWhere?\n</think>\n\nI look.\n{CALL}\n{CALL}"
QWEN3 = "qwen3"


class Format(ToolFormat):
    """Calls have the same id every time."""

    def new_id(self) -> str:
        return "call_0"


FORMAT = Format.read({"call": "<tool_call>$object</tool_call>"})


def tools(parallel: bool = True) -> ToolUse:
    return ToolUse(functools.partial(call_parser, FORMAT, {}), FORMAT, ("<tool_call>",), None, parallel)


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
    encoder = (ParsedChatStreamEncoder if stream else ParsedChatEncoder)(response, parsing or Parsing(tools(), QWEN3))
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
def test_an_answer_with_everything_is_as_stored(stream: bool, logprobs: bool) -> None:
    name = "openai_tools" + "_stream" * stream + "-logprobs" * logprobs
    check_golden(name, encode(OUTPUT, 9, stream=stream, logprobs=logprobs, include_usage=True))


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_streams_and_whole_answers_are_the_same_however_the_text_comes(size: int) -> None:
    expected = {"content": "I look.", "reasoning_content": "Where?", "calls": [ROME, ROME], "reason": "tool_calls"}
    body = encode(OUTPUT, size, n=2)
    assert joined(body) == joined(body, 1) == expected
    for choice in json.loads(encode(OUTPUT, size, stream=False, n=2))["choices"]:
        message = choice["message"]
        assert [message["content"], message["reasoning_content"]] == ["I look.", "Where?"]
        assert [list(call["function"].values()) for call in message["tool_calls"]] == [ROME, ROME]
        assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_parsed_as_it_comes_and_not_at_its_end(stream: bool) -> None:
    class Watched(PlainParser):
        def feed(self, text: str) -> list[Event]:
            fed.append(text)
            return super().feed(text)

    fed: list[str] = []
    response = Response("id", "wolf", stream=stream)
    parsing = Parsing(ToolUse(Watched, FORMAT), "none")
    encoder = (ParsedChatStreamEncoder if stream else ParsedChatEncoder)(response, parsing)
    encoder.begin(Prompt("?", 3))
    for number, chunk in enumerate(chunks("The wolf", 2)[:4], 1):
        encoder.encode(chunk)
        assert len(fed) == number


def test_an_answer_of_calls_has_no_content() -> None:
    message = whole(CALL)["message"]
    assert message["content"] is None and "reasoning_content" not in message
    plain = whole("The wolf.")
    assert plain["message"] == {"role": "assistant", "content": "The wolf.", "refusal": None}
    assert (plain["finish_reason"], whole("")["message"]["content"]) == ("stop", "")


def test_one_call_is_returned_if_they_must_not_be_parallel() -> None:
    parsing = Parsing(tools(parallel=False), QWEN3)
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
        (QWEN3, "<think>\n", "Hm.</think>Yes.", "Hm."),
        (QWEN3, "?", "Hm.</think>Yes.", ""),
        ("deepseek_r1", "?", "Hm.</think>Yes.", "Hm."),
        ("deepseek_r1", "<think>\n\n</think>\n\n", "Yes.", ""),
    ],
)
def test_the_prompt_may_have_begun_the_reasoning(reasoning: str, prompt: str, text: str, thought: str) -> None:
    parsing = Parsing(None, reasoning)
    assert joined(encode(text, parsing=parsing, prompt=prompt))["reasoning_content"] == thought
    assert whole(text, parsing=parsing, prompt=prompt)["message"].get("reasoning_content", "") == thought


def test_what_is_looked_for_decides_what_is_needed() -> None:
    none = "none"
    unparsed = ToolUse(None, FORMAT)
    assert [Parsing(None, none).needed, Parsing(unparsed, none).needed] == [False, False]
    assert [Parsing(tools(), none).needed, Parsing(None, QWEN3).needed] == [True, True]
    assert Parsing(tools(), none).shown_tokens == ("<tool_call>",)
    assert Parsing(None, QWEN3).shown_tokens == ("<think>", "</think>")


class Played(OutputParser):
    """Every feed has the same events."""

    def feed(self, text: str) -> list[Event]:
        return [Content("a"), Content("b"), Reasoning("c"), CallStart("f"), CallArguments("{"), CallArguments("}")]

    def finish(self) -> list[Event]:
        return [CallArguments(" "), Reasoning("d"), Reasoning("e")]


def test_events_of_one_kind_that_follow_each_other_are_one_delta() -> None:
    call = {"index": 0, "id": "call_0", "type": "function", "function": {"name": "f", "arguments": ""}}
    events = parse_lines(encode("x", 1, parsing=Parsing(ToolUse(Played, FORMAT), "none"), n=2))
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"][0]["index"] == 1]
    assert deltas[1:-1] == [
        {"content": "ab"},
        {"reasoning_content": "c"},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": " "}}]},
        {"reasoning_content": "de"},
    ]
