"""Answers that an output formatter of dictionaries changes, object by object."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.api.dialects.lmi import djl_python_shim
from djl_trtllm.api.dialects.lmi.custom import FormattedEncoder, TokenEncoder
from djl_trtllm.api.dialects.lmi.responses import lmi_token
from djl_trtllm.errors import GenerationError
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult, Token
from tests.api.models import (
    END,
    EOS,
    FAILED,
    FAILURE,
    PROMPT,
    STOP,
    STREAM,
    TEXT,
    TOKENS,
    WHOLE,
    answer,
    load,
    make,
    parse,
    several,
)

pytestmark = pytest.mark.usefixtures("clean_imports")

# -- output formatters of dictionaries ---------------------------------------------------------------------------------

DICTIONARIES = """
    from djl_python.output_formatter import output_formatter

    @output_formatter
    def add(response_data: dict) -> dict:
        if "generated_text" in response_data:
            response_data["original_length"] = len(response_data["generated_text"])
            response_data["generated_text"] = "[BASE] " + response_data["generated_text"]
        response_data["seen"] = True
        return response_data
"""


def test_a_formatter_of_dictionaries_changes_whole_answers(tmp_path: Path) -> None:
    formatters = load(tmp_path, DICTIONARIES)
    changed = {"generated_text": f"[BASE] {TEXT}", "original_length": len(TEXT), "seen": True}
    assert json.loads(answer(parse(formatters, WHOLE).encoder, EOS)) == changed
    tgi = parse(formatters, {**WHOLE, "parameters": {"details": False}}, tgi_compat=True)
    assert json.loads(answer(tgi.encoder, EOS)) == [changed]


def test_a_formatter_of_dictionaries_changes_every_line(tmp_path: Path) -> None:
    formatters = load(tmp_path, DICTIONARIES)
    lines = answer(parse(formatters, STREAM).encoder, EOS).decode().splitlines()
    assert all(json.loads(line)["seen"] for line in lines)
    assert len(lines) == 5
    encoder = parse(formatters, STREAM, tgi_compat=True).encoder
    events = answer(encoder, EOS).decode()
    assert encoder.content_type == "text/event-stream"
    assert events.count("data: {") == events.count("}\n\n") == 5
    assert events.endswith("\n\n")


def test_a_formatter_of_dictionaries_leaves_plain_text_and_done_alone(tmp_path: Path) -> None:
    formatters = load(tmp_path, DICTIONARIES)
    plain = parse(formatters, {**WHOLE, "parameters": {"output_formatter": "none"}})
    assert answer(plain.encoder, EOS).decode() == TEXT
    chat = {"messages": [{"role": "user", "content": "a"}], "stream": True, "output_formatter": "sse_chat"}
    assert answer(parse(formatters, chat).encoder, EOS).endswith(b"data: [DONE]\n\n")


def test_a_failing_output_formatter_fails_its_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    formatters = load(
        tmp_path,
        """
        from djl_python.output_formatter import output_formatter

        @output_formatter
        def fail(response_data):
            raise RuntimeError("intended")
        """,
    )
    encoder = parse(formatters, STREAM).encoder
    with pytest.raises(GenerationError, match="output formatter raised RuntimeError: intended") as caught:
        encoder.encode(EOS[0])
    assert "Traceback" in caplog.text
    assert json.loads(encoder.error(caught.value))["details"] == {"finish_reason": "error"}


# -- objects of any encoder --------------------------------------------------------------------------------------------


def around(name: str, formatter: Callable[[Any], Any], **view: Any) -> FormattedEncoder:
    return FormattedEncoder(formatter, make(name, **view))


def test_an_object_framer_is_like_the_framer_inside() -> None:
    for name in ("json", "jsonlines", "sse", "none"):
        inner = make(name, prefill=True)
        encoder = FormattedEncoder(dict, inner)
        assert (encoder.stream, encoder.content_type) == (inner.stream, inner.content_type)
        assert encoder.wants_prompt_tokens is inner.wants_prompt_tokens


def test_objects_that_stay_as_they_are_make_the_same_answer() -> None:
    for name in ("json", "jsonlines", "sse", "none"):
        assert answer(around(name, dict), EOS) == answer(make(name), EOS)
    assert answer(around("json", dict, tgi_compat=True), EOS) == answer(make("json", tgi_compat=True), EOS)


def test_plain_text_that_looks_like_an_object_is_text() -> None:
    updates = [OutputChunk(0, [Token(1, '{"a": 1}', None, False)], STOP[-1].finished)]
    assert answer(around("none", lambda shown: {}), updates) == b'{"a": 1}'


def test_a_formatter_of_dictionaries_may_return_a_text() -> None:
    assert answer(around("json", lambda shown: shown["generated_text"]), EOS).decode() == TEXT
    events = answer(around("sse", lambda shown: shown["token"]["text"].strip()), EOS[:1]).decode()
    assert events == 'data: said: "\n\n'


@pytest.mark.parametrize("result", [None, 3, ["a"], b"a"])
def test_a_formatter_of_dictionaries_that_returns_something_else_fails_its_request(result: object) -> None:
    with pytest.raises(GenerationError) as caught:
        answer(around("json", lambda shown: result), EOS)
    assert str(caught.value) == (
        f"The model's output formatter returned {type(result).__name__}: expected a dict or a str"
    )


def test_an_error_is_reported_by_the_framer_inside_behind_the_tokens_before_it() -> None:
    lines = answer(around("jsonlines", lambda shown: {"seen": True}), FAILED).decode().splitlines()
    assert [json.loads(line) for line in lines[:2]] == [{"seen": True}] * 2
    assert json.loads(lines[2])["token"]["error_msg"] == str(FAILURE)
    assert len(lines) == 3
    assert around("jsonlines", dict).error(FAILURE) == make("jsonlines").error(FAILURE)


STEPS = """
    import json

    from djl_python.output_formatter import output_formatter
    from djl_python.request_io import TextGenerationOutput

    @output_formatter
    def per_token(request_output: TextGenerationOutput) -> str:
        best_sequence = request_output.sequences[request_output.best_sequence_index]
        UNPACKED = best_sequence.get_next_token()
        result = {}
        if token:
            result = {"id": token.id, "text": token.text, "log_prob": token.log_prob, "first": first}
        if last:
            result["finish_reason"] = best_sequence.finish_reason
            result["parameters"] = request_output.input.parameters
            result["prompt"] = [request_output.input.input_text, len(request_output.prompt_tokens_details)]
        return json.dumps(result) + "\\n"
"""


@pytest.mark.parametrize("unpacked", ["token, first, last", "token, index, first, last"])
@pytest.mark.parametrize("payload", [WHOLE, STREAM])
@pytest.mark.parametrize("updates", [EOS, STOP])
def test_a_formatter_of_steps_is_called_per_token(
    tmp_path: Path, unpacked: str, payload: dict[str, Any], updates: list[Any]
) -> None:
    formatters = load(tmp_path, STEPS.replace("UNPACKED", unpacked))
    call = parse(formatters, {**payload, "parameters": {"top_k": 3}})
    assert call.requests[0].logprobs
    assert call.encoder.stream is (payload is STREAM)
    lines = [json.loads(line) for line in answer(call.encoder, updates).splitlines()]
    assert "".join(line["text"] for line in lines) == TEXT
    assert [line["first"] for line in lines] == [True, False, False, False, False]
    assert ["finish_reason" in line for line in lines] == [False, False, False, False, True]
    assert lines[-1]["finish_reason"] in ("eos_token", "stop_sequence")
    assert lines[-1]["parameters"] == {"top_k": 3}
    assert lines[-1]["prompt"] == [PROMPT.text, PROMPT.length]


def test_a_formatter_of_steps_words_errors_itself(tmp_path: Path) -> None:
    formatters = load(tmp_path, STEPS.replace("UNPACKED", "token, first, last"))
    lines = answer(parse(formatters, STREAM).encoder, FAILED).splitlines()
    assert len(lines) == 3
    assert json.loads(lines[-1])["finish_reason"] == "error"


def test_a_failing_formatter_of_steps_is_not_asked_again(tmp_path: Path) -> None:
    formatters = load(
        tmp_path,
        """
        from djl_python.output_formatter import RequestOutput, output_formatter

        @output_formatter
        def fail(request_output: RequestOutput) -> str:
            return 1 / 0
        """,
    )
    encoder = parse(formatters, STREAM).encoder
    with pytest.raises(GenerationError, match="ZeroDivisionError"):
        encoder.encode(EOS[0])
    assert json.loads(encoder.error(FAILURE)) == {"error": str(FAILURE), "code": 424}


def test_both_formatters_share_their_input(tmp_path: Path) -> None:
    formatters = load(
        tmp_path,
        """
        from djl_python import Input
        from djl_python.input_parser import input_formatter
        from djl_python.output_formatter import output_formatter
        from djl_python.request_io import RequestInput, TextGenerationOutput, TextInput

        class MyInput(TextInput):
            team = None

        @input_formatter
        def read(input_item: Input, **kwargs) -> RequestInput:
            request_input = MyInput(input_text=input_item.get_as_json()["inputs"])
            request_input.team = input_item.get_property("X-TEAM")
            return request_input

        @output_formatter
        def write(request_output: TextGenerationOutput) -> str:
            if not request_output.finished:
                return ""
            text = "".join(token["text"] for token in request_output.get_tokens_as_dict())
            return f"{request_output.input.team}: {text}"
        """,
    )
    assert answer(parse(formatters, WHOLE).encoder, EOS).decode() == f"blue: {TEXT}"


@pytest.fixture
def steps(clean_imports: None) -> Callable[..., TokenEncoder]:
    """Makes an encoder of steps."""
    djl_python_shim.install()

    def make_steps(
        formatter: Callable[[Any], Any], *, stream: bool = True, n: int = 1, indexed_tokens: bool = True
    ) -> TokenEncoder:
        request_input = djl_python_shim.TextInput()
        return TokenEncoder(formatter, request_input, stream=stream, n=n, indexed_tokens=indexed_tokens)

    return make_steps


def test_a_step_framer_wants_the_prompts_tokens_and_has_the_type_of_lines(steps: Callable[..., TokenEncoder]) -> None:
    assert steps(str).wants_prompt_tokens and steps(str).stream
    assert steps(str).content_type == "application/jsonlines"
    assert (steps(str, stream=False).content_type, steps(str, stream=False).stream) == ("application/json", False)


def watch(encoder: Callable[..., TokenEncoder], look: Callable[[Any], Any], chunks: list[OutputChunk]) -> list[Any]:
    """What a formatter of steps finds, step by step."""
    seen: list[Any] = []

    def write(output: Any) -> str:
        seen.append(look(output))
        return ""

    answer(encoder(write), chunks)
    return seen


def test_each_request_has_a_number_of_its_own(steps: Callable[..., TokenEncoder]) -> None:
    (first,), (second,) = (
        watch(steps, lambda output: (output.request_id, output.input.request_id), EOS[:1]) for _ in range(2)
    )
    assert second == (first[0] + 1, first[1] + 1) and first[0] == first[1]


def test_a_formatter_of_steps_finds_the_prompt_and_its_tokens(steps: Callable[..., TokenEncoder]) -> None:
    look = lambda output: (output.input.input_text, output.get_prompt_tokens_as_dict())  # noqa: E731
    assert watch(steps, look, EOS[:1]) == [(PROMPT.text, [lmi_token(token) for token in PROMPT.tokens])]


def test_a_formatter_of_steps_finds_the_tokens_and_the_end(steps: Callable[..., TokenEncoder]) -> None:
    def look(output: Any) -> Any:
        sequence = output.sequences[0]
        ended = sequence.get_last_token() is not None
        return sequence.tokens[-1].as_dict(), output.finished, sequence.finish_reason, ended

    *shown, last = [lmi_token(token) for token in (*TOKENS, END)]
    assert watch(steps, look, EOS) == [
        *((token, False, None, False) for token in shown),
        (last, True, "eos_token", True),
    ]


def test_the_end_brings_the_sum_of_log_probabilities_where_it_is_known(steps: Callable[..., TokenEncoder]) -> None:
    unknown = [OutputChunk(0, TOKENS[:1], SequenceResult(FinishReason.LENGTH, 1, None, None))]
    for chunks, sums in ((EOS, [0.0, 0.0, 0.0, 0.0, -1.8464]), (unknown, [0.0])):
        assert watch(steps, lambda output: output.sequences[0].cumulative_log_prob, chunks) == sums


def test_an_end_without_a_token_is_a_special_one_without_text(steps: Callable[..., TokenEncoder]) -> None:
    end = OutputChunk(0, [], SequenceResult(FinishReason.CANCELLED, 0, None, None))
    for chunks, last_id in (([end], -1), ([OutputChunk(0, TOKENS[:1], None), end], TOKENS[0].id)):
        found = watch(steps, lambda output: output.sequences[0].tokens[-1].as_dict(), chunks)
        assert found[-1] == {"id": last_id, "text": "", "log_prob": 0.0, "special_token": True}


def test_several_sequences_are_distinguished_and_finish_together(steps: Callable[..., TokenEncoder]) -> None:
    seen: list[Any] = []

    def write(output: Any) -> str:
        seen.append((list(output.sequences), output.other_sequences_indices, output.finished))
        return "".join(token.text for token in output.sequences[1].tokens) + ";" if output.finished else ""

    encoder = steps(write, stream=False, n=2)
    assert answer(encoder, several(2)) == b"10 11;"
    assert seen == [([0, 1], [1], False)] * 3 + [([0, 1], [1], True)]


def test_without_a_stream_everything_is_sent_at_the_end(steps: Callable[..., TokenEncoder]) -> None:
    encoder = steps(lambda output: output.sequences[0].tokens[-1].text, stream=False)
    assert [encoder.encode(update) for update in EOS] == [b"", b"", b"", TEXT.encode()]
    encoder = steps(lambda output: output.sequences[0].tokens[-1].text)
    assert b"".join([encoder.encode(update) for update in EOS]) == TEXT.encode()


def test_a_text_that_is_no_utf_8_is_sent_with_a_mark_in_its_place(steps: Callable[..., TokenEncoder]) -> None:
    assert answer(steps(lambda output: "a\ud800"), EOS[:1]) == b"a?"
    assert steps(lambda output: "a\ud800").error(FAILURE) == b"a?"


@pytest.mark.parametrize("result", [None, {"a": 1}, b"a"])
def test_a_formatter_of_steps_that_returns_no_text_fails_its_request(
    steps: Callable[..., TokenEncoder], result: object
) -> None:
    encoder = steps(lambda output: result)
    with pytest.raises(GenerationError) as caught:
        encoder.encode(EOS[0])
    assert str(caught.value) == f"The model's output formatter returned {type(result).__name__}: expected a str"
    assert json.loads(encoder.error(caught.value)) == {"error": str(caught.value), "code": 424}


def test_an_error_is_a_last_token_that_carries_the_message(steps: Callable[..., TokenEncoder]) -> None:
    seen: list[Any] = []

    def write(output: Any) -> str:
        sequence = output.sequences[0]
        seen.append((sequence.tokens[-1].as_dict(), output.finished, sequence.finish_reason))
        return "broken"

    assert steps(write).error(FAILURE) == b"broken"
    error = {"id": -1, "text": "", "log_prob": -1.0, "special_token": True, "error_msg": str(FAILURE)}
    assert seen == [(error, True, "error")]


def test_a_formatter_that_cannot_word_an_error_leaves_it_to_the_server(
    steps: Callable[..., TokenEncoder], caplog: pytest.LogCaptureFixture
) -> None:
    def write(output: Any) -> str:
        raise KeyError("finish_reason")

    assert json.loads(steps(write).error(FAILURE)) == {"error": str(FAILURE), "code": 424}
    assert "failed on an error" in caplog.text


def test_an_error_of_a_whole_answer_is_the_servers(steps: Callable[..., TokenEncoder]) -> None:
    line = steps(lambda output: "broken", stream=False).error(FAILURE)
    assert json.loads(line) == {"error": str(FAILURE), "code": 424} and line.endswith(b"\n")


def test_djls_own_package_keeps_its_own_form_of_sequences(steps: Callable[..., TokenEncoder]) -> None:
    request_io: Any = sys.modules["djl_python.request_io"]
    kinds: list[type] = []

    def write(output: Any) -> str:
        kinds.append(type(output.sequences[0]))
        return ""

    for indexed_tokens in (True, False):
        steps(write, indexed_tokens=indexed_tokens).encode(EOS[0])
    request_io.Sequence = type("Sequence", (djl_python_shim.Sequence,), {})
    steps(write, indexed_tokens=False).encode(EOS[0])
    assert kinds == [djl_python_shim.Sequence, djl_python_shim.ThreeValueSequence, request_io.Sequence]
