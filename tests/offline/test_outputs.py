"""What `LLM.generate` returns."""

from __future__ import annotations

import pytest

from djl_trtllm.api import Prompt
from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.offline.outputs import CompletionOutput, Logprob, RequestOutput
from djl_trtllm.offline.result import OfflineResult
from djl_trtllm.request import FinishReason, GenerationRequest, OutputChunk, SequenceResult, Token

TOKENS = [Token(5, "a", -0.25, False), Token(6, "b", None, False)]


def output(request: GenerationRequest, finished: SequenceResult) -> RequestOutput:
    answer = OfflineResult(4, request, wants_prompt_tokens=True)
    answer.begin(Prompt("as the model sees it", 1, [Token(9, "x", None, False)]))
    answer.encode(OutputChunk(0, TOKENS, finished))
    return RequestOutput.of(answer, request)


def ended(reason: FinishReason = FinishReason.LENGTH, stop: str | None = None) -> SequenceResult:
    return SequenceResult(reason, 2, -0.25, None, stop_sequence=stop)


def test_an_output_has_the_tokens_and_their_text() -> None:
    assert output(GenerationRequest(prompt="p"), ended()) == RequestOutput(
        4, "p", [9], [CompletionOutput(0, "ab", [5, 6], None, [], "length", None)], None
    )


def test_log_probabilities_are_there_where_they_were_asked_for_and_known() -> None:
    (completion,) = output(GenerationRequest(prompt="p", logprobs=True), ended()).outputs
    assert completion.logprobs == [{5: Logprob(-0.25)}, {}]
    assert completion.cumulative_logprob == -0.25


@pytest.mark.parametrize(
    ("finished", "reason", "stop"),
    [
        (ended(FinishReason.END_TOKEN), "stop", None),
        (ended(FinishReason.STOP, "wolf"), "stop", "wolf"),
        (ended(FinishReason.STOP), "stop", 6),
        (ended(FinishReason.LENGTH), "length", None),
        (ended(FinishReason.CANCELLED), "cancelled", None),
        (ended(FinishReason.ERROR), "error", None),
    ],
)
def test_reasons_are_tensorrt_llms(finished: SequenceResult, reason: str, stop: str | int | None) -> None:
    (completion,) = output(GenerationRequest(prompt="p"), finished).outputs
    assert (completion.finish_reason, completion.stop_reason) == (reason, stop)


def test_a_chat_is_shown_after_its_template_and_token_ids_have_no_text() -> None:
    messages = [{"role": "user", "content": "a"}]
    assert output(GenerationRequest(messages=messages), ended()).prompt == "as the model sees it"
    assert output(GenerationRequest(prompt_ids=[9]), ended()).prompt is None


def test_a_refused_prompt_has_an_output_that_says_why() -> None:
    request, refusal = GenerationRequest(prompt="p"), InvalidRequestError("too long")
    answer = OfflineResult(0, request, wants_prompt_tokens=True)
    answer.fail(refusal)
    assert RequestOutput.of(answer, request) == RequestOutput(
        0, "p", [], [CompletionOutput(0, "", [], None, [], "error", None)], refusal
    )
