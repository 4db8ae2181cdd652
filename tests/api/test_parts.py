"""Answers in parts: however an output is cut, events join to the body that comes whole."""

from __future__ import annotations

import itertools
import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.api.base import Prompt
from djl_trtllm.api.chat import Parsing, ToolUse
from djl_trtllm.api.dialects.messages import MessageEncoder
from djl_trtllm.api.dialects.responses import Answer, AnswerEncoder
from djl_trtllm.api.output_parsers import call_parser, tool_format
from djl_trtllm.api.parts import PartsEncoder
from djl_trtllm.config import ReasoningFormat, ToolCallFormat
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult, Token
from tests.api.scripts import seconds
from tests.integration.server.test_agents import joined, parts

CALL = '<tool_call>\n{"name": "sky.weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OUTPUT = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}"
FORMAT = tool_format(ToolCallFormat.HERMES, "")
assert FORMAT is not None


def parsing(*, parallel: bool = True) -> Parsing:
    assert FORMAT is not None
    tools = ToolUse(partial(call_parser, FORMAT, {"sky.weather": {}}), FORMAT, parallel=parallel)
    return Parsing(tools, ReasoningFormat.QWEN3)


def message(*, stream: bool, parallel: bool = True, omits: bool = False) -> PartsEncoder:
    return MessageEncoder("0123", "story", parsing(parallel=parallel), stream=stream, omits_thinking=omits)


def response(*, stream: bool, parallel: bool = True, omits: bool = False) -> PartsEncoder:
    answer = Answer("0123", {"model": "story"}, {"sky.weather": ("sky", "weather")}, encodes_reasoning=omits)
    return AnswerEncoder(answer, parsing(parallel=parallel), stream=stream, logprobs=False)


def answered(encoder: PartsEncoder, pieces: list[str], reason: FinishReason = FinishReason.END_TOKEN) -> Any:
    """The body, or what the events join to."""
    encoder.begin(Prompt("The wolf", 7))
    chunks = [OutputChunk(0, [Token(5, piece, None, False)], None) for piece in pieces]
    end = SequenceResult(reason, len(pieces) + 1, None, None, cached_tokens=4)
    data = b"".join([encoder.encode(chunk) for chunk in (*chunks, OutputChunk(0, [], end))]).decode()
    if not encoder.stream:
        return json.loads(data)
    events = [json.loads(line.removeprefix("data: ")) for line in data.split("\n") if line.startswith("data: ")]
    return joined(events) if events[0]["type"] == "message_start" else events[-1]["response"]


def plain(answer: Any) -> Any:
    """Without what is another one every time."""
    return [
        {name: value for name, value in part.items() if name not in ("id", "call_id")}
        for part in answer.get("content") or answer["output"]
    ]


CUTS = st.lists(st.integers(0, len(OUTPUT)), max_size=6)


@pytest.mark.parametrize("made", [message, response])
@given(CUTS, st.booleans())
def test_events_join_to_the_whole_body(made: Any, cuts: list[int], parallel: bool) -> None:
    bounds = [0, *sorted(cuts), len(OUTPUT)]
    pieces = [OUTPUT[begin:end] for begin, end in itertools.pairwise(bounds)]
    whole = answered(made(stream=False, parallel=parallel), [OUTPUT])
    streamed = answered(made(stream=True, parallel=parallel), pieces)
    assert plain(streamed) == plain(whole)
    assert [kind for kind, _ in parts(whole)].count("") == 2 and len(parts(whole)) == 3 + parallel


def test_thinking_and_calls_have_the_form_of_messages() -> None:
    answer = answered(message(stream=False), [OUTPUT])
    assert answer["stop_reason"] == "tool_use"
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer["content"][0]["thinking"] == "Hm." and answer["content"][2]["input"] == {"city": "Rome"}
    assert (answer["usage"]["input_tokens"], answer["usage"]["cache_read_input_tokens"]) == (3, 4)
    for stream in (False, True):
        hidden = answered(message(stream=stream, omits=True), [OUTPUT])["content"][0]
        assert hidden["thinking"] == "" and "Hm" not in json.dumps(hidden)


def test_functions_get_their_namespaces_back_in_responses() -> None:
    answer = answered(response(stream=False, omits=True), [OUTPUT])
    reasoning, text, call, _ = answer["output"]
    assert reasoning["content"][0]["text"] == "Hm." and reasoning["encrypted_content"]
    assert text["content"][0]["text"] == "I look."
    assert (call["namespace"], call["name"]) == ("sky", "weather")
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_limit_cut_off_is_not_complete(stream: bool) -> None:
    cut = OUTPUT[: OUTPUT.index('"Rome')]
    answer = answered(response(stream=stream), [cut], FinishReason.LENGTH)
    assert [answer["status"], *(item["status"] for item in answer["output"])] == [
        *("incomplete", "completed", "completed", "incomplete")
    ]
    answer = answered(message(stream=False), [cut], FinishReason.LENGTH)
    assert answer["stop_reason"] == "max_tokens" and answer["content"][-1]["input"] == {"INVALID_JSON": '{"city": '}


def test_what_a_limit_did_not_cut_off_is_complete_in_each_event() -> None:
    encoder = response(stream=True)
    encoder.begin(Prompt("The wolf", 7))
    end = SequenceResult(FinishReason.LENGTH, 1, None, None)
    events = encoder.encode(OutputChunk(0, [Token(5, OUTPUT[:-30], None, False)], end)).decode().split("\n")
    items = [json.loads(event[6:])["item"]["status"] for event in events if '"response.output_item.done"' in event]
    assert items == ["completed"] * 3 + ["incomplete"]


@pytest.mark.parametrize("made", [message, response])
def test_the_cost_grows_with_the_answer_and_no_faster(made: Any) -> None:
    def encode(count: int) -> None:
        encoder = made(stream=True)
        for _ in range(count):
            encoder.encode(OutputChunk(0, [Token(5, "The wolf. " * 400, None, False)], None))

    short, long = (seconds(partial(encode, count)) for count in (128, 2048))
    assert long < 80 * short  # 16 times as long; 256 if each token cost as much as all before it


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("made", [message, response])
def test_an_answer_without_output_is_an_empty_text(made: Any, stream: bool) -> None:
    assert parts(answered(made(stream=stream), [])) == [("", "")]
