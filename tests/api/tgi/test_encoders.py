from __future__ import annotations

import json
from typing import Any

import pytest

from djl_trtllm.api.tgi.encoders import FINISH_REASONS, GenerateEncoder, GenerateStreamEncoder, Shown
from djl_trtllm.api.tgi.timing import Timing
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult
from tests.api.scripts import EOS, FAILED, FAILURE, PROMPT, STOP, TEXT, answer, check_golden, several


def events(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data:")) for line in body.decode().splitlines() if line]


@pytest.mark.parametrize("details", [False, True])
def test_answers_are_as_stored(details: bool) -> None:
    suffix = "-details" * details
    check_golden(f"tgi_generate{suffix}", answer(GenerateEncoder(Shown(details=details), Timing(8)), EOS))
    for name, script in (("", EOS), ("-stop", STOP)):
        check_golden(f"tgi_stream{name}{suffix}", answer(GenerateStreamEncoder(Shown(details=details)), script))


def test_the_root_answers_a_list_with_the_prompt_if_that_is_wanted() -> None:
    (shown,) = json.loads(answer(GenerateEncoder(Shown(as_list=True, full_text=True), Timing(8)), EOS))
    assert shown == {"generated_text": PROMPT.text + TEXT}


def test_the_prompts_tokens_are_prefill() -> None:
    shown = json.loads(answer(GenerateEncoder(Shown(details=True, prefill=True), Timing(8)), EOS))
    assert [token["id"] for token in shown["details"]["prefill"]] == [token.id for token in PROMPT.tokens]


def test_other_sequences_are_best_of_sequences() -> None:
    shown = json.loads(answer(GenerateEncoder(Shown(details=True, n=2), Timing(8)), several(2)))
    (other,) = shown["details"]["best_of_sequences"]
    assert (shown["generated_text"], other["generated_text"], other["finish_reason"]) == ("00 01", "10 11", "length")


def test_a_stream_numbers_its_tokens_and_joins_to_the_text() -> None:
    for script in (EOS, STOP):
        shown = events(answer(GenerateStreamEncoder(Shown(full_text=True)), script))
        assert [event["index"] for event in shown] == list(range(1, len(shown) + 1))
        assert "".join(event["token"]["text"] for event in shown) == TEXT
        assert [event["generated_text"] for event in shown] == [None] * (len(shown) - 1) + [PROMPT.text + TEXT]


def test_an_error_is_the_last_event_of_a_stream() -> None:
    *before, last = events(answer(GenerateStreamEncoder(Shown()), FAILED))
    assert len(before) == 2
    assert last == {"error": str(FAILURE), "error_type": "generation"}


def test_a_whole_answer_has_no_place_for_an_error() -> None:
    encoder = GenerateEncoder(Shown(), Timing(8))
    assert answer(encoder, FAILED) == encoder.error(FAILURE) == b""


def test_every_finish_reason_has_a_word() -> None:
    assert FINISH_REASONS.keys() == set(FinishReason)
    assert set(FINISH_REASONS.values()) == {"eos_token", "stop_sequence", "length", "cancelled", "error"}


def test_only_a_whole_answer_wants_the_prompts_tokens_if_they_are_shown() -> None:
    whole = [GenerateEncoder(Shown(prefill=prefill), Timing(8)) for prefill in (False, True)]
    assert [encoder.wants_prompt_tokens for encoder in whole] == [False, True]
    assert not GenerateStreamEncoder(Shown()).wants_prompt_tokens
    answer(whole[0], EOS)
    assert dict(whole[0].headers())["x-prompt-tokens"] == str(PROMPT.length)
    assert (whole[0].content_type, GenerateStreamEncoder(Shown()).content_type) == (
        "application/json",
        "text/event-stream",
    )


def test_a_stream_without_a_token_ends_with_one_that_is_none() -> None:
    end = OutputChunk(0, [], SequenceResult(FinishReason.CANCELLED, 0, None, None))
    (event,) = events(answer(GenerateStreamEncoder(Shown(details=True)), [end]))
    assert event["token"] == {"id": -1, "text": "", "logprob": 0.0, "special": True}
    assert event["details"]["finish_reason"] == "cancelled"
