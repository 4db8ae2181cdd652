"""Answers that an output formatter of dictionaries changes, object by object."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.api.custom.encoders import ObjectEncoder
from djl_trtllm.errors import GenerationError
from djl_trtllm.request import OutputChunk, Token
from tests.api.models import STREAM, WHOLE, load, parse
from tests.api.scripts import EOS, FAILED, FAILURE, STOP, TEXT, answer, make

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


def around(name: str, formatter: Callable[[Any], Any], **view: Any) -> ObjectEncoder:
    return ObjectEncoder(formatter, make(name, **view))


def test_an_object_framer_is_like_the_framer_inside() -> None:
    for name in ("json", "jsonlines", "sse", "none"):
        inner = make(name, prefill=True)
        encoder = ObjectEncoder(dict, inner)
        assert (encoder.stream, encoder.content_type) == (inner.stream, inner.content_type)
        assert encoder.wants_prompt_tokens is inner.wants_prompt_tokens


def test_objects_that_stay_as_they_are_make_the_same_answer() -> None:
    for name in ("json", "jsonlines", "sse", "json_chat", "sse_chat", "3p_stream", "none"):
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
