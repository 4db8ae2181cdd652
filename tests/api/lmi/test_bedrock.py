"""Answers under option.bedrock_compat: 3p and 3p_stream."""

from __future__ import annotations

import json

import pytest

from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult, Token
from tests.api.scripts import EOS, FAILED, FAILURE, PROMPT, STOP, TEXT, TOKENS, answer, check_golden, make, parse_lines


def test_answer_is_as_stored() -> None:
    check_golden("3p-return_full_text", answer(make("3p", return_full_text=True), EOS))
    check_golden("3p_stream", answer(make("3p_stream"), EOS))


@pytest.mark.parametrize("tgi_compat", [False, True])
@pytest.mark.parametrize("ending", ["stop", "error"])
def test_end_without_a_token_is_as_stored(ending: str, tgi_compat: bool) -> None:
    body = answer(make("3p_stream", details=True, tgi_compat=tgi_compat), STOP if ending == "stop" else FAILED)
    check_golden("-".join(("3p_stream", ending, *(["tgi_compat"] if tgi_compat else []))), body)


def test_a_whole_answer_comes_in_one_piece_at_the_end() -> None:
    encoder = make("3p")
    assert (encoder.stream, encoder.content_type) == (False, "application/json")
    assert [bool(encoder.encode(update)) for update in EOS] == [False, False, False, True]


def test_every_token_is_sent_with_its_update() -> None:
    encoder = make("3p_stream", prefill=True)
    assert (encoder.stream, encoder.content_type) == (True, "application/jsonlines")
    assert not encoder.wants_prompt_tokens
    assert [len(parse_lines(encoder.encode(update))) for update in EOS] == [1, 2, 1, 1]
    assert encoder.encode(OutputChunk(0, [], None)) == b""


def test_the_prompt_is_before_the_text_where_that_is_asked_for() -> None:
    assert json.loads(answer(make("3p"), EOS))["body"]["generation"] == TEXT
    assert json.loads(answer(make("3p", return_full_text=True), EOS))["body"]["generation"] == PROMPT.text + TEXT


def test_tokens_are_counted_line_by_line_and_the_prompts_in_the_first() -> None:
    lines = parse_lines(answer(make("3p_stream"), EOS))
    assert [line["body"]["generation_token_count"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["metering"]["outputTokenCount"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["body"]["prompt_token_count"] for line in lines] == [PROMPT.length, None, None, None, None]
    assert [line["metering"].get("inputTokenCount") for line in lines] == [PROMPT.length, None, None, None, None]
    assert [line["body"]["stop_reason"] for line in lines] == [None, None, None, None, "eos_token"]


def test_an_end_without_a_token_counts_none() -> None:
    lines = parse_lines(answer(make("3p_stream"), STOP))
    assert lines[-1]["body"] == {
        "generation": "",
        "prompt_token_count": None,
        "generation_token_count": 4,
        "stop_reason": "stop_sequence",
    }
    assert len(lines) == 5


def test_several_tokens_may_end_together() -> None:
    finished = SequenceResult(FinishReason.LENGTH, 2, None, None)
    first, last = parse_lines(answer(make("3p_stream"), [OutputChunk(0, TOKENS[:2], finished)]))
    assert (first["body"]["stop_reason"], last["body"]["stop_reason"]) == (None, "length")
    assert (first["body"]["generation"], last["body"]["generation"]) == (TOKENS[0].text, TOKENS[1].text)


def test_an_error_is_the_last_line_with_what_came_before_it() -> None:
    *before, last = parse_lines(answer(make("3p_stream"), FAILED))
    assert [line["body"]["generation"] for line in before] == [TOKENS[0].text, TOKENS[1].text]
    assert [line["body"]["stop_reason"] for line in before] == [None, None]
    assert last["error"] == {"error_code": 400, "error_msg": str(FAILURE)}
    assert (last["body"]["stop_reason"], last["body"]["generation"]) == ("error", "")
    assert last["body"]["generation_token_count"] == 2
    assert not any("error" in line for line in before)


def test_a_whole_answer_cannot_tell_an_error() -> None:
    encoder = make("3p")
    assert [encoder.encode(update) for update in FAILED] == [b"", b""]
    assert encoder.error(FAILURE) == b""


def test_no_text_cuts_a_line() -> None:
    text = "".join(map(chr, (*range(0x20), 0x7F, 0x85, 0x2028, 0x2029, 0xFEFF)))
    lines = parse_lines(answer(make("3p_stream"), [OutputChunk(0, [Token(1, text, 0.0, False)], None), STOP[-1]]))
    assert [line["body"]["generation"] for line in lines] == [text, ""]
