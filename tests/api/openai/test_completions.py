from __future__ import annotations

import json

import pytest

from djl_trtllm.api import Prompt
from djl_trtllm.request import Alternative, FinishReason, OutputChunk, RankedToken, SequenceResult
from tests.api.openai.encoders import check_stored, make, text_of
from tests.api.scripts import EOS, PROMPT, TEXT, answer, parse_lines, several


def test_a_completion_of_several_prompts_numbers_their_sequences_in_order() -> None:
    chunks = [OutputChunk(chunk.index, chunk.tokens, chunk.finished, 1) for chunk in several(2)] + several(2)
    whole = json.loads(answer(make("completion", n=2, generations=2), chunks))
    assert [choice["text"] for choice in whole["choices"]] == ["00 01", "10 11"] * 2
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"]["completion_tokens"] == 8
    body = answer(make("completion_stream", n=2, generations=2), chunks)
    assert [text_of(body, index) for index in range(4)] == ["00 01", "10 11"] * 2
    assert body.count(b"[DONE]") == 1


def test_echo_puts_the_prompt_first() -> None:
    whole = json.loads(answer(make("completion", echo=True), EOS))
    assert whole["choices"][0]["text"] == PROMPT.text + TEXT
    assert text_of(answer(make("completion_stream", echo=True), EOS)) == PROMPT.text + TEXT


def test_offsets_of_a_streams_tokens_go_on() -> None:
    body = answer(make("completion_stream", logprobs=True), EOS)
    shown = [event["choices"][0]["logprobs"] for event in parse_lines(body) if event["choices"][0]["logprobs"]]
    offsets = [offset for each in shown for offset in each["text_offset"]]
    texts = [text for each in shown for text in each["tokens"]]
    assert offsets == [len("".join(texts[:position])) for position in range(len(texts))]


def test_the_most_likely_tokens_are_shown_by_their_text() -> None:
    top = [Alternative(5, " a", -0.1), Alternative(6, " b", -2.0)]
    chunk = OutputChunk(0, [RankedToken(6, " b", -2.0, False, top)], SequenceResult(FinishReason.LENGTH, 1, -2.0, None))
    whole = json.loads(answer(make("completion", logprobs=True), [chunk]))
    assert whole["choices"][0]["logprobs"]["top_logprobs"] == [{" a": -0.1, " b": -2.0}]


@pytest.mark.parametrize("name", ["completion", "completion_stream"])
def test_an_answer_is_as_stored(name: str) -> None:
    check_stored(name)


def test_each_sequence_of_several_prompts_follows_its_own() -> None:
    chunks = [OutputChunk(each.index, each.tokens, each.finished, number) for number in (0, 1) for each in several(3)]
    expected = [f"{prompt}{index}0 {index}1" for prompt in ("a ", "b ") for index in range(3)]

    def encoded(name: str) -> bytes:
        encoder = make(name, n=3, generations=2, echo=True)
        for prompt in ("a ", "b "):
            encoder.begin(Prompt(prompt, 1))
        return b"".join([encoder.encode(chunk) for chunk in chunks])

    assert [choice["text"] for choice in json.loads(encoded("completion"))["choices"]] == expected
    body = encoded("completion_stream")
    assert [text_of(body, index) for index in range(6)] == expected
