"""What whole answers and streams of chats and completions have in common."""

from __future__ import annotations

import pytest

from djl_trtllm.api import ResponseEncoder
from djl_trtllm.api.openai.response import FINISH_REASONS
from djl_trtllm.errors import RequestTimeoutError
from djl_trtllm.request import FinishReason
from tests.api.openai.encoders import ENCODERS, STREAMS, check_stored, make, text_of
from tests.api.scripts import (
    EOS,
    FAILED,
    FAILURE,
    STOP,
    TEXT,
    answer,
    parse_lines,
)


@pytest.mark.parametrize("name", ENCODERS)
def test_an_answer_is_as_stored(name: str) -> None:
    check_stored(name)


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_joins_to_the_text_and_ends(name: str) -> None:
    for script, reason in ((EOS, "stop"), (STOP, "stop")):
        for logprobs in (False, True):
            body = answer(make(name, logprobs=logprobs), script)
            assert text_of(body) == TEXT
            assert parse_lines(body)[-1]["choices"][0]["finish_reason"] == reason
            assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("name", STREAMS)
def test_usage_comes_last_if_it_is_asked_for(name: str) -> None:
    *events, last = parse_lines(answer(make(name, include_usage=True), EOS))
    assert (last["choices"], last["usage"]) == (
        [],
        {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8},
    )
    assert {event["usage"] for event in events} == {None}
    assert all("usage" not in event for event in parse_lines(answer(make(name), EOS)))


@pytest.mark.parametrize("name", STREAMS)
def test_every_event_has_the_usage_so_far_if_it_is_asked_for(name: str) -> None:
    *events, last = parse_lines(answer(make(name, include_usage=True, continuous_usage=True), EOS))
    counted = [event["usage"]["completion_tokens"] for event in events]
    assert counted == sorted(counted) and counted[-1] == last["usage"]["completion_tokens"] == 5
    assert all(event["usage"]["total_tokens"] == 3 + count for event, count in zip(events, counted, strict=True))
    plain = parse_lines(answer(make(name, continuous_usage=True), EOS))
    assert all("usage" not in event for event in plain)
    failed = parse_lines(answer(make(name, include_usage=True, continuous_usage=True), FAILED))
    assert "usage" not in failed[-1] and all(event["usage"] for event in failed[:-1])


@pytest.mark.parametrize("name", STREAMS)
def test_an_error_is_the_last_event_and_nothing_follows(name: str) -> None:
    encoder = make(name)
    body = answer(encoder, FAILED)
    *_, last = parse_lines(body)
    assert last == {"error": {"message": str(FAILURE), "type": "server_error", "param": None, "code": None}}
    assert body.endswith(b"[DONE]\n\n")
    assert encoder.encode(EOS[-1]) == b""
    timeout = parse_lines(make(name).error(RequestTimeoutError("late")))[0]["error"]
    assert (timeout["message"], timeout["code"]) == ("late", "timeout")


@pytest.mark.parametrize("name", ["chat", "completion"])
def test_a_whole_answer_comes_at_the_end_and_never_with_an_error(name: str) -> None:
    encoder: ResponseEncoder = make(name)
    assert not encoder.stream and not encoder.wants_prompt_tokens
    assert [bool(encoder.encode(chunk)) for chunk in EOS] == [False, False, False, True]
    assert answer(make(name), FAILED) == make(name).error(FAILURE) == b""


def test_every_finish_reason_has_a_word() -> None:
    assert FINISH_REASONS.keys() == set(FinishReason)


def test_every_end_has_a_word() -> None:
    assert FINISH_REASONS == {
        FinishReason.END_TOKEN: "stop",
        FinishReason.STOP: "stop",
        FinishReason.LENGTH: "length",
        FinishReason.CANCELLED: "abort",
        FinishReason.ERROR: "error",
    }
