"""Every encoder's bytes for scripted output, step by step: the table is `responses.json`, UPDATE_GOLDEN=1 writes it.

A line of the table is what one chunk adds to the response, so that a change of any byte, or of when it is sent, shows.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, strategies as st

from djl_trtllm.api.base import Prompt, RawRequest, ResponseEncoder
from djl_trtllm.api.chat import Parsing, ToolUse
from djl_trtllm.api.dialects.lmi.dialect import FORMATTERS
from djl_trtllm.api.dialects.lmi.responses import LinesEncoder
from djl_trtllm.api.dialects.messages import MessageEncoder
from djl_trtllm.api.dialects.openai.responses import (
    ChatEncoder,
    ChatStreamEncoder,
    CompletionEncoder,
    CompletionStreamEncoder,
    Response,
)
from djl_trtllm.api.dialects.rerank import RERANK, ScoreEncoder
from djl_trtllm.api.dialects.responses import Answer, AnswerEncoder
from djl_trtllm.api.dialects.tgi import GenerateEncoder, GenerateStreamEncoder, Timing
from djl_trtllm.api.dialects.triton.dialect import parse_generate
from djl_trtllm.api.dialects.truss import WholeTextEncoder
from djl_trtllm.api.output_parsers import call_parser, tool_format
from djl_trtllm.api.parts import PartsEncoder
from djl_trtllm.api.pooling import score_of
from djl_trtllm.api.texts import PlainTextEncoder, Presentation
from djl_trtllm.errors import GenerationError
from djl_trtllm.request import Alternative, FinishReason, OutputChunk, RankedToken, SequenceResult, Token
from tests.api.models import (
    END,
    EOS,
    FAILED,
    FAILURE,
    PROMPT,
    STOP,
    TEXT,
    TOKENS,
    PlayedModel,
    answer,
    client_lines,
    make,
    parse_lines,
    seconds,
    several,
)
from tests.integration.server.test_agents import joined, parts

TABLE = Path(__file__).with_name("responses.json")
PLAIN = Parsing(None, "none")
LINE_ENDS = "\0\n\r\x7f\x85\u2028\u2029\ufeff"


def ended(reason: FinishReason, count: int) -> SequenceResult:
    return SequenceResult(reason, count, -0.5, 7)


def batch(n: int) -> list[OutputChunk]:
    """Two generations with `n` sequences each, the second one's first."""
    return several(n, 1) + several(n)


SCRIPTS: dict[str, list[OutputChunk]] = {
    "end token": EOS,
    "stop string": STOP,
    "failed, and a chunk after it": [*FAILED, EOS[-1]],
    "nothing new": [OutputChunk(0, [], None), OutputChunk(0, [], ended(FinishReason.CANCELLED, 0))],
    "together": [OutputChunk(0, [*TOKENS[:2], END], ended(FinishReason.LENGTH, 3))],
    "special, then line ends": [
        OutputChunk(0, [END, Token(1, LINE_ENDS, 0.0, False)], None),
        OutputChunk(0, [Token(1, LINE_ENDS, None, False)], ended(FinishReason.STOP, 3)),
    ],
    "most likely": [
        OutputChunk(
            0,
            [RankedToken(6, " b", -2.0, False, [Alternative(5, " a", -0.1), Alternative(6, "", -2.0)])],
            ended(FinishReason.LENGTH, 1),
        )
    ],
}

LMI_VIEWS: dict[str, dict[str, bool]] = {
    "": {},
    ", details": {"details": True, "return_full_text": True},
    ", tgi_compat": {"tgi_compat": True},
    ", all": dict.fromkeys(("details", "tgi_compat", "prefill", "return_full_text", "stream"), True),
}
OPENAI: dict[str, Any] = {
    "chat": ChatEncoder,
    "chat stream": ChatStreamEncoder,
    "completion": CompletionEncoder,
    "completion stream": CompletionStreamEncoder,
}
OPENAI_VIEWS: dict[str, dict[str, bool]] = {
    "": {},
    ", logprobs": {"logprobs": True},
    ", usage": {"include_usage": True, "echo": True},
    ", usage in each": {"include_usage": True, "continuous_usage": True},
    ", continuous alone": {"continuous_usage": True},
}


def openai(name: str, **view: Any) -> ResponseEncoder:
    encoder: ResponseEncoder = OPENAI[name](Response("id", "100% wolf", id="0123", created=1700000000, **view))
    return encoder


def message(*, stream: bool, logprobs: bool) -> ResponseEncoder:
    return MessageEncoder("0123", "100% wolf", PLAIN, stream=stream)


def response(*, stream: bool, logprobs: bool) -> ResponseEncoder:
    return AnswerEncoder(Answer("0123", {"model": "100% wolf"}), PLAIN, stream=stream, logprobs=logprobs)


def triton(verb: str, **body: Any) -> ResponseEncoder:
    data = orjson.dumps({"text_input": "a wolf", "max_tokens": 5, "id": "100%", **body})
    request = RawRequest(data, {}, f"/v2/models/{{model}}/{verb}")
    return parse_generate(request, PlayedModel(), "ensemble").encoder


def shown(as_list: bool = False, **view: Any) -> Callable[[], ResponseEncoder]:
    return lambda: GenerateEncoder(Presentation(**view), Timing(8), as_list=as_list)


CASES: dict[str, Callable[[], ResponseEncoder]] = {
    **{
        f"lmi {name}{title}": lambda name=name, view=view: make(name, **view)  # type: ignore[misc]
        for name in FORMATTERS
        for title, view in LMI_VIEWS.items()
    },
    **{
        f"openai {name}{title}": lambda name=name, view=view: openai(name, **view)  # type: ignore[misc]
        for name in OPENAI
        for title, view in OPENAI_VIEWS.items()
    },
    "tgi": shown(),
    "tgi, details": shown(details=True, return_full_text=True),
    "tgi, prefill": shown(details=True, prefill=True, as_list=True),
    "tgi stream": lambda: GenerateStreamEncoder(Presentation()),
    "tgi stream, details": lambda: GenerateStreamEncoder(Presentation(details=True, return_full_text=True)),
    "truss": WholeTextEncoder,
    "truss stream": lambda: PlainTextEncoder(Presentation(), "application/octet-stream"),
    **{
        f"{name}{' stream' * stream}{', logprobs' * logprobs}": lambda made=made, stream=stream, logprobs=logprobs: (
            made(  # type: ignore[misc]
                stream=stream, logprobs=logprobs
            )
        )
        for name, made in (("messages", message), ("responses", response))
        for stream in (False, True)
        for logprobs in ((False, True) if made is response else (False,))
    },
    **{
        f"triton {verb}{', logprobs' * logprobs}": lambda verb=verb, logprobs=logprobs: triton(  # type: ignore[misc]
            verb, return_log_probs=logprobs
        )
        for verb in ("generate", "generate_stream")
        for logprobs in (False, True)
    },
    "triton generate, prompt": lambda: triton("generate", exclude_input_in_output=False),
    "triton one event": lambda: triton("generate_stream", stream=False, exclude_input_in_output=False),
}
SEVERAL: dict[str, tuple[Callable[[], ResponseEncoder], list[OutputChunk]]] = {
    **{
        f"lmi {name}": (lambda name=name: make(name, n=2, details=True), several(2))  # type: ignore[misc]
        for name in ("json", "none")
    },
    **{
        f"openai {name}": (
            lambda name=name: openai(name, n=2, generations=1 if "chat" in name else 2, include_usage=True),  # type: ignore[misc]
            several(2) if "chat" in name else batch(2),
        )
        for name in OPENAI
    },
    "openai chat, one fails": (lambda: openai("chat stream", n=2), [*several(2)[:2], *FAILED, *several(2)[2:]]),
    "tgi": (shown(details=True, return_full_text=True, n=2), several(2)),
    "triton generate": (lambda: triton("generate", num_return_sequences=2, return_log_probs=True), several(2)),
    "triton stream": (lambda: triton("generate_stream", num_return_sequences=2, return_log_probs=True), several(2)),
}


def readable(data: bytes) -> str:
    return data.decode(errors="backslashreplace")


def steps(encoder: ResponseEncoder, chunks: list[OutputChunk]) -> list[str]:
    """What each chunk adds, and how an error would end the response."""
    encoder.begin(PROMPT)
    made: list[str] = []
    for chunk in chunks:
        try:
            made.append(readable(encoder.encode(chunk)))
        except GenerationError as error:
            made.append(f"raises {type(error).__name__}: {error}")
    return [*made, f"error: {readable(encoder.error(FAILURE))}"]


def responses() -> dict[str, Any]:
    table: dict[str, Any] = {}
    for case, made in CASES.items():
        encoder = made()
        head = [encoder.content_type, "stream" if encoder.stream else "whole", bool(encoder.wants_prompt_tokens)]
        table[case] = {"": head} | {name: steps(made(), script) for name, script in SCRIPTS.items()}
    return table | {f"several: {case}": {"": steps(made(), chunks)} for case, (made, chunks) in SEVERAL.items()}


def test_every_response_is_that_of_the_table() -> None:
    made = responses()
    if os.environ.get("UPDATE_GOLDEN"):
        TABLE.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")
    expected = json.loads(TABLE.read_text())
    assert made.keys() == expected.keys()
    for case, scripts in made.items():
        for name, lines in scripts.items():
            assert lines == expected[case][name], (case, name)


# -- clients -----------------------------------------------------------------------------------------------------------


def test_huggingface_client_reads_streams() -> None:
    common = pytest.importorskip("huggingface_hub.inference._common")
    body = answer(make("sse", tgi_compat=True, details=True), EOS)
    outputs = list(common._stream_text_generation_response(client_lines(body), details=True))
    assert "".join(output.token.text for output in outputs) == TEXT == outputs[-1].generated_text
    details = outputs[-1].details
    assert (details.finish_reason, details.seed, details.input_length) == ("eos_token", 7, PROMPT.length)
    chunks = list(common._stream_chat_completion_response(client_lines(answer(openai("chat stream"), EOS))))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_huggingface_client_raises_errors_in_streams() -> None:
    common = pytest.importorskip("huggingface_hub.inference._common")
    errors = pytest.importorskip("huggingface_hub.errors")
    body = answer(make("sse", tgi_compat=True), FAILED)
    with pytest.raises(errors.GenerationError, match="died"):
        list(common._stream_text_generation_response(client_lines(body), details=False))


# -- any text ----------------------------------------------------------------------------------------------------------

texts = st.lists(
    st.text(st.characters(codec="utf-8") | st.sampled_from('\n\r"\\\x85\u2028\u2029'), max_size=8),
    max_size=12,
)


@given(texts, st.data())
def test_every_answer_parses_and_joins_to_the_same_text(pieces: list[str], data: st.DataObject) -> None:
    special = st.booleans()
    tokens = [Token(i, piece, -float(i), piece == "" and data.draw(special)) for i, piece in enumerate(pieces)]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=5)))
    bounds = [0, *cuts, len(tokens)]
    groups = [tokens[start:end] for start, end in itertools.pairwise(bounds)]
    finished = SequenceResult(FinishReason.LENGTH, len(tokens), None, None)
    updates = [OutputChunk(0, group, None) for group in groups]
    if data.draw(st.booleans()):
        updates[-1] = OutputChunk(0, groups[-1], finished)
    else:
        updates.append(OutputChunk(0, [], finished))
    text = "".join(pieces)
    view = {
        "details": data.draw(st.booleans()),
        "tgi_compat": data.draw(st.booleans()),
    }
    logprobs = data.draw(st.booleans())

    whole = json.loads(answer(make("json", **view), updates))
    assert (whole[0] if view["tgi_compat"] else whole)["generated_text"] == text
    chat = json.loads(answer(openai("chat", logprobs=logprobs), updates))
    assert chat["choices"][0]["message"]["content"] == text
    for stream in (False, True):
        assert answer(make("none", stream=stream), updates).decode() == text
    for name in ("jsonlines", "sse"):
        lines = parse_lines(answer(make(name, **view), updates))
        assert "".join(line["token"]["text"] for line in lines) == text
        assert lines[-1]["generated_text"] == text
        assert not any("generated_text" in line for line in lines[:-1])
    for wrapped in (lambda encoder: encoder, LinesEncoder):
        lines = parse_lines(answer(wrapped(openai("chat stream", logprobs=logprobs)), updates))
        choices = [line["choices"][0] for line in lines]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == text
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        assert ["role" in choice["delta"] for choice in choices] == [True] + [False] * (len(choices) - 1)


@pytest.mark.parametrize("case", ["openai chat, logprobs", "openai completion, logprobs", "responses, logprobs"])
def test_log_probabilities_are_encoded_as_they_come(case: str) -> None:
    """At the end, those of a long answer would be seconds of work at once."""
    encoder = CASES[case]()
    encoder.begin(PROMPT)
    top = [Alternative(5, "five", -1.5)]
    assert encoder.encode(OutputChunk(0, [RankedToken(4, "four", -0.5, False, top)], None)) == b""
    top.clear()
    assert b"five" in encoder.encode(OutputChunk(0, [], ended(FinishReason.STOP, 1)))


CALL = '<tool_call>\n{"name": "sky.weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OUTPUT = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}"
FORMAT = tool_format("hermes", "")
assert FORMAT is not None


def parsing(*, parallel: bool = True) -> Parsing:
    assert FORMAT is not None
    tools = ToolUse(partial(call_parser, FORMAT, {"sky.weather": {}}), FORMAT, parallel=parallel)
    return Parsing(tools, "qwen3")


def message_parts(*, stream: bool, parallel: bool = True, omits: bool = False) -> PartsEncoder:
    return MessageEncoder("0123", "story", parsing(parallel=parallel), stream=stream, omits_thinking=omits)


def response_parts(*, stream: bool, parallel: bool = True, omits: bool = False) -> PartsEncoder:
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


@pytest.mark.parametrize("made", [message_parts, response_parts])
@given(CUTS, st.booleans())
def test_events_join_to_the_whole_body(made: Any, cuts: list[int], parallel: bool) -> None:
    bounds = [0, *sorted(cuts), len(OUTPUT)]
    pieces = [OUTPUT[begin:end] for begin, end in itertools.pairwise(bounds)]
    whole = answered(made(stream=False, parallel=parallel), [OUTPUT])
    streamed = answered(made(stream=True, parallel=parallel), pieces)
    assert plain(streamed) == plain(whole)
    assert [kind for kind, _ in parts(whole)].count("") == 2 and len(parts(whole)) == 3 + parallel


def test_thinking_and_calls_have_the_form_of_messages() -> None:
    answer = answered(message_parts(stream=False), [OUTPUT])
    assert answer["stop_reason"] == "tool_use"
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer["content"][0]["thinking"] == "Hm." and answer["content"][2]["input"] == {"city": "Rome"}
    assert (answer["usage"]["input_tokens"], answer["usage"]["cache_read_input_tokens"]) == (3, 4)
    for stream in (False, True):
        hidden = answered(message_parts(stream=stream, omits=True), [OUTPUT])["content"][0]
        assert hidden["thinking"] == "" and "Hm" not in json.dumps(hidden)


def test_functions_get_their_namespaces_back_in_responses() -> None:
    answer = answered(response_parts(stream=False, omits=True), [OUTPUT])
    reasoning, text, call, _ = answer["output"]
    assert reasoning["content"][0]["text"] == "Hm." and reasoning["encrypted_content"]
    assert text["content"][0]["text"] == "I look."
    assert (call["namespace"], call["name"]) == ("sky", "weather")
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_limit_cut_off_is_not_complete(stream: bool) -> None:
    cut = OUTPUT[: OUTPUT.index('"Rome')]
    answer = answered(response_parts(stream=stream), [cut], FinishReason.LENGTH)
    assert [answer["status"], *(item["status"] for item in answer["output"])] == [
        *("incomplete", "completed", "completed", "incomplete")
    ]
    answer = answered(message_parts(stream=False), [cut], FinishReason.LENGTH)
    assert answer["stop_reason"] == "max_tokens" and answer["content"][-1]["input"] == {"INVALID_JSON": '{"city": '}


def test_what_a_limit_did_not_cut_off_is_complete_in_each_event() -> None:
    encoder = response_parts(stream=True)
    encoder.begin(Prompt("The wolf", 7))
    end = SequenceResult(FinishReason.LENGTH, 1, None, None)
    events = encoder.encode(OutputChunk(0, [Token(5, OUTPUT[:-30], None, False)], end)).decode().split("\n")
    items = [json.loads(event[6:])["item"]["status"] for event in events if '"response.output_item.done"' in event]
    assert items == ["completed"] * 3 + ["incomplete"]


@pytest.mark.parametrize("made", [message_parts, response_parts])
def test_the_cost_grows_with_the_answer_and_no_faster(made: Any) -> None:
    def encode(count: int) -> None:
        encoder = made(stream=True)
        for _ in range(count):
            encoder.encode(OutputChunk(0, [Token(5, "The wolf. " * 400, None, False)], None))

    short, long = (seconds(partial(encode, count)) for count in (128, 2048))
    assert long < 80 * short  # 16 times as long; 256 if each token cost as much as all before it


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("made", [message_parts, response_parts])
def test_an_answer_without_output_is_an_empty_text(made: Any, stream: bool) -> None:
    assert parts(answered(made(stream=stream), [])) == [("", "")]


ENDED = SequenceResult(FinishReason.CANCELLED, 0, None, None)


def test_an_end_without_a_vector_is_no_result() -> None:
    encoder = ScoreEncoder(2, "story", 0)
    score = np.float32(0.25).tobytes()
    assert encoder.encode(OutputChunk(0, [], ENDED)) == b""
    assert encoder.encode(OutputChunk(0, [], ENDED, generation=1, vector=score)) == b""
    assert b'"score":0.25' in encoder.encode(OutputChunk(0, [], ENDED, vector=score))


@pytest.mark.parametrize(
    ("path", "more", "shown"),
    [
        ("/v1/rerank", {}, [(2, 0.75, None), (0, 0.5, None), (1, 0.25, None)]),
        ("/v1/rerank", {"top_n": 2, "return_documents": True}, [(2, 0.75, {"text": "c"}), (0, 0.5, {"text": "a"})]),
        ("/rerank", {"texts": ["a", "b", "c"]}, [(2, 0.75, None), (0, 0.5, None), (1, 0.25, None)]),
    ],
)
def test_documents_are_ranked_from_the_best_one_on(path: str, more: dict[str, Any], shown: list[Any]) -> None:
    texts = {} if "texts" in more else {"documents": ["a", "b", "c"], "return_documents": False}
    body = orjson.dumps({"query": "q", **texts, **more})
    call = RERANK.parse(RawRequest(body, {}, path=path), PlayedModel())
    for place, score in enumerate((0.5, 0.25, 0.75)):
        vector = np.float32(score).tobytes()
        answer = call.encoder.encode(OutputChunk(0, [], ENDED, generation=place, vector=vector))
    found = orjson.loads(answer)
    results = found if "texts" in more else found["results"]
    scores = [each.get("score", each.get("relevance_score")) for each in results]
    ranked = [(each["index"], score, each.get("document")) for each, score in zip(results, scores, strict=True)]
    assert ranked == shown


@pytest.mark.parametrize("score", [0.1, -3.5, 1e-30, float("inf")])
def test_a_score_has_the_digits_of_its_32_bits(score: float) -> None:
    assert score_of(np.float32(score).tobytes()) == score
