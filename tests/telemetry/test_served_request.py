from __future__ import annotations

import pytest

from djl_trtllm.request import FinishReason, GenerationRequest, Sampling
from djl_trtllm.telemetry import ServedRequest
from djl_trtllm.telemetry.served_request import Asked, Generated
from tests.telemetry.requests import served, state


@pytest.mark.parametrize(
    ("status", "failed"), [(200, False), (399, False), (400, True), (499, True), ("OK", False), ("UNAVAILABLE", True)]
)
def test_a_status_says_whether_the_request_failed(status: int | str, failed: bool) -> None:
    assert served(status=status).failed is failed


def test_a_request_that_never_was_queued_has_generated_nothing() -> None:
    assert served().generated() is None


def test_one_prompt_has_the_figures_of_its_record() -> None:
    assert served(state()).generated() == Generated(7, 5, 101.0, 103.0, 106.0, 110.0, ("length",), "")


def test_several_prompts_are_from_the_first_start_to_the_last_end() -> None:
    second = state(
        started=102.0, first_token_at=104.0, last_token_at=112.0, reason=FinishReason.ERROR, error="GenerationError"
    )
    third = state(started=None, first_token_at=None, last_token_at=None, generated_tokens=0, reason=None)
    found = served(state(), second, third).generated()
    assert found == Generated(21, 10, 101.0, 102.0, 104.0, 112.0, ("length", "error"), "GenerationError")


def test_what_did_not_happen_has_no_time() -> None:
    waiting = state(started=None, first_token_at=None, last_token_at=None, generated_tokens=0, reason=None)
    assert served(waiting).generated() == Generated(7, 0, 101.0, None, None, None, (), "")


def test_what_was_asked_has_the_names_of_the_conventions() -> None:
    sampled = Sampling(max_new_tokens=9, do_sample=True, temperature=0.5, top_p=0.9, n=2)
    assert Asked.of(GenerationRequest(prompt="x", sampling=sampled)) == Asked("text_completion", 9, 0.5, 0.9, 2)
    greedy = GenerationRequest(messages=[], default_new_tokens=30)
    assert Asked.of(greedy) == Asked("chat", 30, 0.0, 1.0, 1)


def test_a_request_is_one_whose_client_left_until_there_is_a_status() -> None:
    request = ServedRequest("r-1", "GET", "/")
    assert (request.status, request.reads, request.quiet, request.generated()) == (499, False, False, None)
