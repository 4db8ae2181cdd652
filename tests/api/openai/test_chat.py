from __future__ import annotations

import json

import pytest

from djl_trtllm.request import Alternative, FinishReason, OutputChunk, RankedToken, SequenceResult
from tests.api.openai.encoders import check_stored, make
from tests.api.scripts import EOS, PROMPT, TOKENS, answer, parse_lines, several


def test_the_first_chunk_of_a_choice_has_its_role() -> None:
    first, *others = parse_lines(answer(make("chat_stream", n=2), several(2)))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert ["role" in event["choices"][0]["delta"] for event in others].count(True) == 1


def test_tokens_of_one_iteration_are_one_event_and_those_without_text_none() -> None:
    encoder = make("chat_stream")
    encoder.begin(PROMPT)
    assert [len(parse_lines(encoder.encode(chunk))) for chunk in EOS] == [2, 1, 1, 1]
    assert encoder.encode(OutputChunk(0, [TOKENS[1]], None)) == b""


def test_the_most_likely_tokens_are_shown_whole_and_streamed() -> None:
    top = [Alternative(5, " a", -0.1), Alternative(6, "", -2.0)]
    chunk = OutputChunk(0, [RankedToken(6, " b", -2.0, False, top)], SequenceResult(FinishReason.LENGTH, 1, -2.0, None))
    shown = [
        {"token": " a", "logprob": -0.1, "bytes": [32, 97]},
        {"token": "", "logprob": -2.0, "bytes": None},
    ]
    whole = json.loads(answer(make("chat", logprobs=True), [chunk]))
    assert whole["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == shown
    events = [event["choices"][0] for event in parse_lines(answer(make("chat_stream", logprobs=True), [chunk]))]
    assert [event["logprobs"]["content"][0]["top_logprobs"] for event in events if event["logprobs"]] == [shown]


@pytest.mark.parametrize("name", ["chat", "chat_stream"])
def test_an_answer_is_as_stored(name: str) -> None:
    check_stored(name)
