"""The chat answers: json_chat, jsonlines_chat and sse_chat."""

from __future__ import annotations

import json
from typing import Any

import pytest

from djl_trtllm.errors import RequestTimeoutError
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult, Token
from tests.api.scripts import (
    EOS,
    FAILED,
    FAILURE,
    PROMPT,
    STOP,
    TEXT,
    TOKENS,
    answer,
    check_golden,
    client_lines,
    make,
    parse_lines,
    several,
)

STREAMS = ("jsonlines_chat", "sse_chat")


@pytest.mark.parametrize(
    ("name", "view"),
    [
        ("json_chat", {}),
        ("json_chat", {"logprobs": True}),
        ("jsonlines_chat", {}),
        ("jsonlines_chat", {"logprobs": True}),
        ("sse_chat", {"include_usage": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_answer_is_as_stored(name: str, view: dict[str, bool]) -> None:
    check_golden("-".join((name, *view)), answer(make(name, **view), EOS))


@pytest.mark.parametrize("tgi_compat", [False, True])
@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("ending", ["stop", "error"])
def test_end_without_a_token_is_as_stored(name: str, ending: str, tgi_compat: bool) -> None:
    body = answer(make(name, details=True, tgi_compat=tgi_compat), STOP if ending == "stop" else FAILED)
    check_golden("-".join((name, ending, *(["tgi_compat"] if tgi_compat else []))), body)


def test_several_choices_are_as_stored() -> None:
    check_golden("json_chat-n", answer(make("json_chat", n=2), several(2)))
    check_golden("sse_chat-n", answer(make("sse_chat", n=2, stream=True), several(2)))


def test_a_whole_answer_comes_in_one_piece_at_the_end() -> None:
    encoder = make("json_chat")
    assert not encoder.stream
    assert [bool(encoder.encode(update)) for update in EOS] == [False, False, False, True]


def test_every_token_is_sent_with_its_update() -> None:
    for name in STREAMS:
        for logprobs in (False, True):
            encoder = make(name, logprobs=logprobs)
            assert encoder.stream
            assert [len(parse_lines(encoder.encode(update))) for update in EOS] == [1, 2, 1, 1]


def test_media_types() -> None:
    assert [make(name).content_type for name in ("json_chat", *STREAMS)] == [
        "application/json",
        "application/jsonlines",
        "text/event-stream",
    ]
    assert not any(make(name, prefill=True).wants_prompt_tokens for name in STREAMS)


def test_a_chunk_without_news_adds_nothing() -> None:
    for name in ("json_chat", *STREAMS):
        assert make(name).encode(OutputChunk(0, [], None)) == b""


def choices(body: bytes) -> list[dict[str, Any]]:
    return [choice for line in parse_lines(body) for choice in line["choices"]]


def test_only_the_first_chunk_of_a_choice_has_the_role() -> None:
    found = choices(answer(make("jsonlines_chat", n=2), several(2)))
    assert [(choice["index"], choice["delta"].get("role")) for choice in found] == [
        (0, "assistant"),
        (1, "assistant"),
        (0, None),
        (1, None),
    ]


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        (FinishReason.END_TOKEN, "stop"),
        (FinishReason.STOP, "stop"),
        (FinishReason.LENGTH, "length"),
        (FinishReason.CANCELLED, "cancelled"),
    ],
)
def test_the_finish_reason_is_openais_where_it_has_a_word(reason: FinishReason, word: str) -> None:
    updates = [OutputChunk(0, TOKENS[:2], SequenceResult(reason, 2, None, None))]
    assert json.loads(answer(make("json_chat"), updates))["choices"][0]["finish_reason"] == word
    assert [choice["finish_reason"] for choice in choices(answer(make("sse_chat"), updates))] == [None, word]


def test_an_end_without_a_token_has_an_empty_content_and_no_log_probabilities() -> None:
    for logprobs in (False, True):
        *_, last = choices(answer(make("jsonlines_chat", logprobs=logprobs), STOP))
        assert last == {"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": "stop"}


def test_log_probabilities_are_those_of_the_chosen_tokens() -> None:
    updates = [OutputChunk(0, [Token(7, "é", -0.5, False), Token(2, "", None, True)], STOP[-1].finished)]
    e = {"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]}
    end = {"token": "", "logprob": None, "bytes": None}
    content = [chosen | {"top_logprobs": [chosen]} for chosen in (e, end)]
    (whole,) = json.loads(answer(make("json_chat", logprobs=True), updates))["choices"]
    assert whole["logprobs"] == {"content": content}
    chunks = choices(answer(make("sse_chat", logprobs=True), updates))
    assert [chunk["logprobs"] for chunk in chunks] == [{"content": [token]} for token in content]


def test_usage_counts_the_prompt_and_all_choices() -> None:
    usage = {"prompt_tokens": PROMPT.length, "completion_tokens": 4, "total_tokens": PROMPT.length + 4}
    assert json.loads(answer(make("json_chat", n=2), several(2)))["usage"] == usage
    body = answer(make("sse_chat", n=2, include_usage=True), several(2))
    assert [line.get("usage") for line in parse_lines(body)] == [None] * 4 + [usage]
    assert parse_lines(body)[-1]["choices"] == []


def test_done_is_reported_once_when_the_last_choice_has_ended() -> None:
    encoder = make("sse_chat", n=2)
    encoder.begin(PROMPT)
    assert [b"[DONE]" in encoder.encode(update) for update in several(2)] == [False, False, False, True]
    assert b"[DONE]" not in answer(make("jsonlines_chat"), EOS)


def test_an_error_is_the_last_chunk_with_what_came_before_it() -> None:
    *before, last = parse_lines(answer(make("sse_chat"), FAILED))
    assert [line["choices"][0]["delta"]["content"] for line in before] == [TOKENS[0].text, TOKENS[1].text]
    assert last["choices"] == [{"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": "error"}]
    assert last["error"] == {"message": str(FAILURE), "type": "GenerationError"}
    (line,) = parse_lines(make("jsonlines_chat").error(RequestTimeoutError("too late")))
    assert line["error"] == {"message": "too late", "type": "RequestTimeoutError"}


def test_after_an_error_other_choices_are_silent() -> None:
    encoder = make("sse_chat", n=2)
    assert encoder.error(FAILURE).endswith(b"data: [DONE]\n\n")
    assert encoder.encode(several(2)[1]) == b""


def test_a_whole_answer_cannot_tell_an_error() -> None:
    encoder = make("json_chat")
    assert [encoder.encode(update) for update in FAILED] == [b"", b""]
    assert encoder.error(FAILURE) == b""


@pytest.mark.parametrize("name", STREAMS)
def test_no_text_cuts_a_line(name: str) -> None:
    text = "".join(map(chr, (*range(0x20), 0x7F, 0x85, 0x2028, 0x2029, 0xFEFF)))
    tokens = [Token(1, text, 0.0, False)]
    found = choices(answer(make(name), [OutputChunk(0, tokens, None), OutputChunk(0, tokens, None), STOP[-1]]))
    assert [choice["delta"]["content"] for choice in found] == [text, text, ""]


def test_huggingface_client_reads_chat_streams() -> None:
    common = pytest.importorskip("huggingface_hub.inference._common")
    outputs = list(common._stream_chat_completion_response(client_lines(answer(make("sse_chat"), EOS))))
    assert "".join(output.choices[0].delta.content for output in outputs) == TEXT
    assert outputs[-1].choices[0].finish_reason == "stop"
