from __future__ import annotations

from djl_trtllm.request import OutputChunk
from tests.api.openai.encoders import make
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
