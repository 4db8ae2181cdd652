"""An answer as a JSON line."""

from __future__ import annotations

import json

from djl_trtllm.api import Prompt
from djl_trtllm.errors import GenerationError, InvalidRequestError
from djl_trtllm.offline.prompt_file import Entry
from djl_trtllm.offline.result import OfflineResult
from djl_trtllm.offline.result_line import format_line
from djl_trtllm.request import FinishReason, GenerationRequest, OutputChunk, Sampling, SequenceResult, Token


def entry(n: int = 1) -> tuple[Entry, OfflineResult]:
    request = GenerationRequest(prompt="as given", sampling=Sampling(n=n))
    return Entry("x", request), OfflineResult(0, request, wants_prompt_tokens=False)


END = SequenceResult(FinishReason.END_TOKEN, 2, None, None)


def ended(text: str, index: int = 0, end: SequenceResult = END) -> OutputChunk:
    return OutputChunk(index, [Token(1, text, None, False)], end)


def test_a_line_has_the_prompt_as_the_model_saw_it_and_what_came_of_it() -> None:
    asked, answer = entry()
    answer.begin(Prompt("after the template", 3))
    answer.encode(ended("b"))
    line = format_line(asked, answer)
    assert line.endswith(b"}\n")
    assert json.loads(line) == {
        "id": "x",
        "prompt": "after the template",
        "generated_text": "b",
        "finish_reason": "eos_token",
        "tokens": 2,
        "error": None,
    }


def test_further_sequences_follow_the_best() -> None:
    asked, answer = entry(n=3)
    for index in range(3):
        answer.encode(ended(f"text {index}", index))
    line = json.loads(format_line(asked, answer))
    assert line["generated_text"] == "text 0"
    assert line["best_of_sequences"] == [
        {"generated_text": f"text {index}", "finish_reason": "eos_token", "tokens": 2} for index in (1, 2)
    ]


def test_a_failure_has_what_was_generated_until_then() -> None:
    asked, answer = entry()
    end = END._replace(reason=FinishReason.ERROR, error=GenerationError("broken"))
    answer.encode(ended("half", end=end))
    line = json.loads(format_line(asked, answer))
    assert (line["generated_text"], line["finish_reason"], line["tokens"], line["error"]) == (
        "half",
        "error",
        2,
        "broken",
    )


def test_a_refused_prompt_is_shown_as_it_was_given() -> None:
    asked, answer = entry()
    answer.fail(InvalidRequestError("too long"))
    line = json.loads(format_line(asked, answer))
    assert (line["prompt"], line["generated_text"], line["tokens"]) == ("as given", "", 0)
    assert (line["finish_reason"], line["error"]) == ("error", "too long")


def test_no_text_cuts_a_line() -> None:
    asked, answer = entry()
    answer.encode(ended("a\n\u2028\x85b"))
    assert len(format_line(asked, answer).decode().splitlines()) == 1
