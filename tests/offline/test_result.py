"""What is kept of an answer until it is whole."""

from __future__ import annotations

from djl_trtllm.api import Prompt
from djl_trtllm.errors import GenerationError, InvalidRequestError
from djl_trtllm.offline.result import OfflineResult
from djl_trtllm.request import FinishReason, GenerationRequest, OutputChunk, Sampling, SequenceResult, Token


def answer(n: int = 1) -> OfflineResult:
    return OfflineResult(3, GenerationRequest(sampling=Sampling(n=n)), wants_prompt_tokens=True)


def update(index: int, *texts: str, finished: SequenceResult | None = None) -> OutputChunk:
    return OutputChunk(index, [Token(len(text), text, -0.5, False) for text in texts], finished)


END = SequenceResult(FinishReason.LENGTH, 3, None, None)


def test_the_texts_and_tokens_of_a_sequence_join() -> None:
    kept = answer()
    assert kept.encode(update(0, "a", "bc")) == b""
    kept.encode(update(0, "def", finished=END))
    (sequence,) = kept.sequences
    assert sequence.text == "abcdef"
    assert [(token.id, token.logprob) for token in sequence.tokens] == [(1, -0.5), (2, -0.5), (3, -0.5)]
    assert sequence.finished is END


def test_it_is_complete_when_the_last_sequence_has_ended() -> None:
    kept = answer(n=2)
    kept.encode(update(1, "a", finished=END))
    after_one = kept.complete
    kept.encode(update(0, "b", finished=END))
    assert (after_one, kept.complete) == (False, True)
    assert [sequence.text for sequence in kept.sequences] == ["b", "a"]


def test_the_first_failure_is_the_reason() -> None:
    kept = answer(n=2)
    first, second = GenerationError("first"), GenerationError("second")
    kept.encode(update(0, finished=END._replace(reason=FinishReason.ERROR, error=first)))
    kept.encode(update(1, finished=END._replace(reason=FinishReason.ERROR, error=second)))
    assert kept.failure is first


def test_a_request_that_is_refused_is_complete_and_has_no_text() -> None:
    kept = answer(n=2)
    refusal = InvalidRequestError("no")
    assert kept.error(refusal) == b""
    assert (kept.complete, kept.failure, kept.prompt) == (True, refusal, None)
    assert [(sequence.text, sequence.finished) for sequence in kept.sequences] == [("", None)] * 2


def test_the_prompt_is_kept_as_the_model_sees_it() -> None:
    kept = answer()
    prompt = Prompt("a", 1)
    kept.begin(prompt)
    assert kept.prompt is prompt
    assert (kept.number, kept.stream, kept.wants_prompt_tokens) == (3, False, True)
