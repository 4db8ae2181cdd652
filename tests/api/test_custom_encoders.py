"""Answers that an output formatter of dictionaries changes, object by object."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

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


def test_a_formatter_of_dictionaries_changes_every_object_of_an_answer_and_nothing_else(tmp_path: Path) -> None:
    formatters = load(tmp_path, DICTIONARIES)
    changed = {"generated_text": f"[BASE] {TEXT}", "original_length": len(TEXT), "seen": True}
    assert json.loads(answer(parse(formatters, WHOLE).encoder, EOS)) == changed
    tgi = parse(formatters, {**WHOLE, "parameters": {"details": False}}, tgi_compat=True)
    assert json.loads(answer(tgi.encoder, EOS)) == [changed]
    lines = answer(parse(formatters, STREAM).encoder, EOS).decode().splitlines()
    assert len(lines) == 5 and all(json.loads(line)["seen"] for line in lines)
    encoder = parse(formatters, STREAM, tgi_compat=True).encoder
    events = answer(encoder, EOS).decode()
    assert events.count("data: {") == events.count("}\n\n") == 5
    assert events.endswith("\n\n") and encoder.content_type == "text/event-stream"
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


def test_objects_that_stay_as_they_are_make_the_same_answer() -> None:
    for name, view in (("json", {}), ("json", {"tgi_compat": True}), ("jsonlines", {}), ("sse", {}), ("none", {})):
        inner, encoder = make(name, prefill=True, **view), around(name, dict, prefill=True, **view)
        for member in ("stream", "content_type", "wants_prompt_tokens"):
            assert getattr(encoder, member) == getattr(inner, member)
        assert answer(encoder, EOS) == answer(inner, EOS)


def test_plain_text_that_looks_like_an_object_is_text() -> None:
    updates = [OutputChunk(0, [Token(1, '{"a": 1}', None, False)], STOP[-1].finished)]
    assert answer(around("none", lambda shown: {}), updates) == b'{"a": 1}'


def test_a_formatter_of_dictionaries_may_return_a_text() -> None:
    assert answer(around("json", lambda shown: shown["generated_text"]), EOS).decode() == TEXT
    events = answer(around("sse", lambda shown: shown["token"]["text"].strip()), EOS[:1]).decode()
    assert events == 'data: said: "\n\n'


def test_an_error_is_reported_by_the_framer_inside_behind_the_tokens_before_it() -> None:
    lines = answer(around("jsonlines", lambda shown: {"seen": True}), FAILED).decode().splitlines()
    assert [json.loads(line) for line in lines[:2]] == [{"seen": True}] * 2
    assert json.loads(lines[2])["token"]["error_msg"] == str(FAILURE)
    assert len(lines) == 3
    assert around("jsonlines", dict).error(FAILURE) == make("jsonlines").error(FAILURE)


def test_tokens_before_an_error_stay_those_of_their_prompt(tmp_path: Path) -> None:
    body = {"prompt": ["a", "b"], "stream": True, "output_formatter": "sse"}
    encoder = parse(load(tmp_path, DICTIONARIES), body).encoder
    failed = replace(FAILED[1], tokens=TOKENS[:1], generation=1)
    (first, *_) = [json.loads(line[6:]) for line in encoder.encode(failed).split(b"\n") if line.startswith(b"data: {")]
    assert (first["choices"][0]["index"], first["seen"]) == (1, True)


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


def shown(output: Any) -> tuple[dict[str, Any], bool, str | None, bool, float]:
    """What a formatter of steps finds of a sequence: its last token, and what there is at its end."""
    sequence = output.sequences[0]
    ended = sequence.get_last_token() is not None
    return sequence.tokens[-1].as_dict(), output.finished, sequence.finish_reason, ended, sequence.cumulative_log_prob


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


def test_a_formatter_of_steps_finds_the_prompt_the_tokens_and_the_end(steps: Callable[..., TokenEncoder]) -> None:
    assert steps(str).wants_prompt_tokens
    look = lambda output: (output.input.input_text, output.get_prompt_tokens_as_dict())  # noqa: E731
    assert watch(steps, look, EOS[:1]) == [(PROMPT.text, [lmi_token(token) for token in PROMPT.tokens])]
    *before, last = [lmi_token(token) for token in (*TOKENS, END)]
    ended = (last, True, "eos_token", True, -1.8464)
    assert watch(steps, shown, EOS) == [*((token, False, None, False, 0.0) for token in before), ended]
    # Where the sum of the log-probabilities is not known, or the end comes without a token.
    reason, first = SequenceResult(FinishReason.LENGTH, 1, None, None), lmi_token(TOKENS[0])
    assert watch(steps, shown, [OutputChunk(0, TOKENS[:1], reason)]) == [(first, True, "length", True, 0.0)]
    for chunks, last_id in (([], -1), ([OutputChunk(0, TOKENS[:1], None)], TOKENS[0].id)):
        special = {"id": last_id, "text": "", "log_prob": 0.0, "special_token": True}
        found = watch(steps, shown, [*chunks, OutputChunk(0, [], reason)])
        assert found[-1] == (special, True, "length", True, 0.0)


def test_several_sequences_are_distinguished_and_finish_together(steps: Callable[..., TokenEncoder]) -> None:
    seen: list[Any] = []

    def write(output: Any) -> str:
        seen.append((list(output.sequences), output.other_sequences_indices, output.finished))
        return "".join(token.text for token in output.sequences[1].tokens) + ";" if output.finished else ""

    encoder = steps(write, stream=False, n=2)
    assert answer(encoder, several(2)) == b"10 11;"
    assert seen == [([0, 1], [1], False)] * 3 + [([0, 1], [1], True)]


@pytest.mark.parametrize("stream", [False, True])
def test_without_a_stream_everything_is_sent_at_the_end(steps: Callable[..., TokenEncoder], stream: bool) -> None:
    encoder = steps(lambda output: output.sequences[0].tokens[-1].text, stream=stream)
    assert encoder.content_type == ("application/jsonlines" if stream else "application/json")
    parts = [encoder.encode(update) for update in EOS]
    assert b"".join(parts) == TEXT.encode() and (encoder.stream, any(parts[:-1])) == (stream, stream)


def test_a_text_that_is_no_utf_8_is_sent_with_a_mark_in_its_place(steps: Callable[..., TokenEncoder]) -> None:
    assert answer(steps(lambda output: "a\ud800"), EOS[:1]) == b"a?"
    assert steps(lambda output: "a\ud800").error(FAILURE) == b"a?"


@pytest.mark.parametrize("result", [None, {"a": 1}, b"a", ["a"], 3])
def test_a_formatter_that_returns_something_else_fails_its_request(
    steps: Callable[..., TokenEncoder], result: object
) -> None:
    encoder = steps(lambda output: result)
    with pytest.raises(GenerationError, match=f"returned {type(result).__name__}: expected a str") as caught:
        encoder.encode(EOS[0])
    assert json.loads(encoder.error(caught.value)) == {"error": str(caught.value), "code": 424}
    if not isinstance(result, dict):
        with pytest.raises(GenerationError, match=f"returned {type(result).__name__}: expected a dict or a str"):
            answer(around("json", lambda shown: result), EOS)


def test_an_error_is_a_last_token_that_carries_the_message(steps: Callable[..., TokenEncoder]) -> None:
    seen: list[Any] = []

    def write(output: Any) -> str:
        seen.append(shown(output))
        return "broken"

    assert steps(write).error(FAILURE) == b"broken"
    error = {"id": -1, "text": "", "log_prob": -1.0, "special_token": True, "error_msg": str(FAILURE)}
    assert seen == [(error, True, "error", True, 0.0)]
    *_, last = answer(steps(lambda output: f"{output.sequences[0].finish_reason};"), FAILED).split(b";")[:-1]
    assert last == b"error"


def test_an_error_that_a_formatter_cannot_word_is_the_servers(
    steps: Callable[..., TokenEncoder], caplog: pytest.LogCaptureFixture
) -> None:
    def write(output: Any) -> str:
        called.append(output)
        raise KeyError("finish_reason")

    called: list[Any] = []
    wanted = {"error": str(FAILURE), "code": 424}
    assert json.loads(steps(write).error(FAILURE)) == wanted and "failed on an error" in caplog.text
    failed = steps(write)
    with pytest.raises(GenerationError, match="KeyError"):
        failed.encode(EOS[0])
    assert json.loads(failed.error(FAILURE)) == wanted and len(called) == 2  # it is not asked again
    line = steps(lambda output: "broken", stream=False).error(FAILURE)
    assert json.loads(line) == wanted and line.endswith(b"\n")


def test_djls_own_package_keeps_its_own_form_of_sequences(steps: Callable[..., TokenEncoder]) -> None:
    request_io: Any = sys.modules["djl_python.request_io"]

    def kind(indexed_tokens: bool) -> type:
        made = partial(steps, indexed_tokens=indexed_tokens)
        (found,) = watch(made, lambda output: type(output.sequences[0]), EOS[:1])
        assert isinstance(found, type)
        return found

    assert [kind(True), kind(False)] == [djl_python_shim.Sequence, djl_python_shim.ThreeValueSequence]
    request_io.Sequence = type("Sequence", (djl_python_shim.Sequence,), {})
    assert kind(False) is request_io.Sequence
