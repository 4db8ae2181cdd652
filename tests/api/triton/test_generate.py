from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from djl_trtllm.api import Call, RawRequest
from djl_trtllm.api.triton.generate import parse_generate
from djl_trtllm.config import Options
from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.request import OutputChunk
from tests.api.scripts import EOS, FAILED, FAILURE, PROMPT, STOP, TEXT, answer, check_golden, several
from tests.api.triton.played import PlayedModel

WHOLE = "/v2/models/{model}/generate"
STREAM = "/v2/models/{model}/generate_stream"


def read(path: str = WHOLE, options: Options | None = None, **body: Any) -> Call:
    given = {"text_input": "a wolf", "max_tokens": 5} | body
    request = RawRequest(orjson.dumps(given), {"content-type": "application/x-www-form-urlencoded"}, path)
    return parse_generate(request, PlayedModel(options or Options()), "ensemble")


def events(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in body.decode().split("\n\n") if line]


@pytest.mark.parametrize("logprobs", [False, True])
def test_answers_are_as_stored(logprobs: bool) -> None:
    suffix = "-logprobs" * logprobs
    check_golden(f"triton_generate{suffix}", answer(read(return_log_probs=logprobs).encoder, EOS))
    for name, script in (("", EOS), ("-stop", STOP)):
        body = answer(read(STREAM, return_log_probs=logprobs, stream=True).encoder, script)
        check_golden(f"triton_stream{name}{suffix}", body)


@pytest.mark.parametrize("path", [WHOLE, STREAM])
def test_the_keys_are_in_alphabetical_order_and_the_id_comes_back(path: str) -> None:
    encoder = read(path, id="100%").encoder
    shown = answer(encoder, EOS)
    for event in events(shown):
        assert list(event) == sorted(event)
        assert event["id"] == "100%"


@pytest.mark.parametrize("script", [EOS, STOP])
def test_a_stream_joins_to_the_text_with_a_log_probability_for_each_token(script: list[OutputChunk]) -> None:
    shown = events(answer(read(STREAM).encoder, script))
    assert "".join(event["text_output"] for event in shown) == TEXT
    counts = [1 if event["output_log_probs"] == 0.0 else len(event["output_log_probs"]) for event in shown]
    assert sum(counts) == sum(len(chunk.tokens) for chunk in script)


def test_a_stream_without_stream_is_one_event() -> None:
    (event,) = events(answer(read(STREAM, stream=False).encoder, EOS))
    assert event == json.loads(answer(read().encoder, EOS))
    assert read(STREAM, stream=False).encoder.content_type == "text/event-stream; charset=utf-8"
    assert read(STREAM).encoder.stream and read(STREAM, stream=True).encoder.stream


def test_a_sequence_that_ends_without_a_token_is_an_event_if_it_is_the_only_one() -> None:
    (event,) = events(answer(read(STREAM).encoder, STOP[-1:]))
    assert (event["text_output"], event["output_log_probs"]) == ("", [])


def test_the_prompt_stands_before_a_whole_text_only_and_if_that_is_said() -> None:
    def text(path: str, **body: Any) -> str:
        shown = answer(read(path, **body).encoder, EOS)
        return "".join(event["text_output"] for event in (events(shown) if path == STREAM else [json.loads(shown)]))

    assert text(WHOLE) == text(WHOLE, exclude_input_in_output=True) == TEXT
    assert text(WHOLE, exclude_input_in_output=False) == PROMPT.text + TEXT
    assert text(STREAM, exclude_input_in_output=False) == TEXT
    assert text(STREAM, exclude_input_in_output=False, stream=False) == PROMPT.text + TEXT


def test_several_sequences_are_flat_lists_and_events_with_their_index() -> None:
    whole = json.loads(answer(read(num_return_sequences=2, return_log_probs=True).encoder, several(2)))
    assert whole["text_output"] == ["00 01", "10 11"]
    assert whole["cum_log_probs"] == pytest.approx([-0.2, -0.3])
    assert whole["output_log_probs"] == pytest.approx([-0.1, -0.1, -0.2, -0.1])
    shown = events(answer(read(STREAM, num_return_sequences=2, return_log_probs=True).encoder, several(2)))
    assert [event["sequence_index"] for event in shown] == [0, 1, 0, 1]
    assert [event["cum_log_probs"] for event in shown] == pytest.approx([-0.1, -0.2, -0.2, -0.3])
    assert all(list(event) == sorted(event) for event in shown)


def test_an_error_is_the_last_event_of_a_stream_and_ends_it() -> None:
    encoder = read(STREAM).encoder
    *before, last = events(answer(encoder, FAILED))
    assert (len(before), last) == (2, {"error": str(FAILURE)})
    assert encoder.encode(EOS[0]) == b""


def test_a_whole_answer_has_no_place_for_an_error() -> None:
    encoder = read().encoder
    assert answer(encoder, FAILED) == encoder.error(FAILURE) == b""


def test_parameters_may_be_nested() -> None:
    nested = read(parameters={"temperature": 0.5, "top_p": 0.5}, top_p=0.25).requests[0].sampling
    assert (nested.temperature, nested.top_p) == (0.5, 0.25)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (WHOLE, {"stream": True}, "exactly 1 response, use generate stream"),
        (WHOLE, {"text_input": ["a", "b"]}, "'text_input' has 2 values"),
        (WHOLE, {"hen": 1}, 'unknown input "hen"'),
        (WHOLE, {"parameters": 3}, "'parameters' is 3"),
        (WHOLE, {"id": 3}, "'id' is 3"),
        (STREAM, {"beam_width": 2}, "expected 1 in a stream"),
        (STREAM, {"beam_width": 2, "stream": True}, "which beam is the best"),
    ],
)
def test_what_is_wrong_is_named(path: str, body: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read(path, **body)


def test_beams_are_whole_on_both_paths() -> None:
    assert read(beam_width=2).requests[0].sampling.beam_width == 2
    assert read(STREAM, beam_width=2, stream=False).requests[0].sampling.beam_width == 2


@pytest.mark.parametrize("stream", [True, False, None])
def test_a_model_that_is_not_decoupled_refuses_generate_stream(stream: bool | None) -> None:
    with pytest.raises(InvalidRequestError, match="only supported if model is deployed using decoupled mode"):
        read(STREAM, Options(decoupled=False), stream=stream)
    read(WHOLE, Options(decoupled=False))


def test_beams_have_no_stream() -> None:
    message = "'beam_width' is above 1: expected 1 in a stream, or 'stream' to be false"
    with pytest.raises(InvalidRequestError) as refused:
        read(STREAM, beam_width=2)
    assert str(refused.value) == message
    assert read(STREAM, beam_width=2, stream=False).requests[0].sampling.n == 2
