"""Answers that a model directory's own output formatter makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.api import Defaults
from djl_trtllm.errors import GenerationError

from .models import STREAM, WHOLE, load, parse
from .scripts import EOS, FAILED, FAILURE, PROMPT, STOP, TEXT, answer

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
    assert json.loads(answer(parse(formatters, WHOLE).framer, EOS)) == changed
    tgi = parse(formatters, {**WHOLE, "parameters": {"details": False}}, Defaults(tgi_compat=True))
    assert json.loads(answer(tgi.framer, EOS)) == [changed]


def test_a_formatter_of_dictionaries_changes_every_line(tmp_path: Path) -> None:
    formatters = load(tmp_path, DICTIONARIES)
    lines = answer(parse(formatters, STREAM).framer, EOS).decode().splitlines()
    assert all(json.loads(line)["seen"] for line in lines)
    assert len(lines) == 5
    framer = parse(formatters, STREAM, Defaults(tgi_compat=True)).framer
    events = answer(framer, EOS).decode()
    assert framer.content_type == "text/event-stream"
    assert events.count("data: {") == events.count("}\n\n") == 5
    assert events.endswith("\n\n")


def test_a_formatter_of_dictionaries_leaves_plain_text_and_done_alone(tmp_path: Path) -> None:
    formatters = load(tmp_path, DICTIONARIES)
    plain = parse(formatters, {**WHOLE, "parameters": {"output_formatter": "none"}})
    assert answer(plain.framer, EOS).decode() == TEXT
    chat = {"messages": [{"role": "user", "content": "a"}], "stream": True, "output_formatter": "sse_chat"}
    assert answer(parse(formatters, chat).framer, EOS).endswith(b"data: [DONE]\n\n")


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
    framer = parse(formatters, STREAM).framer
    with pytest.raises(GenerationError, match="output formatter raised RuntimeError: intended") as caught:
        framer.frame(EOS[0])
    assert "Traceback" in caplog.text
    assert json.loads(framer.error(caught.value))["details"] == {"finish_reason": "error"}


# -- output formatters of TextGenerationOutput -------------------------------------------------------------------------

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
    assert call.request.logprobs
    assert call.framer.stream is (payload is STREAM)
    lines = [json.loads(line) for line in answer(call.framer, updates).splitlines()]
    assert "".join(line["text"] for line in lines) == TEXT
    assert [line["first"] for line in lines] == [True, False, False, False, False]
    assert ["finish_reason" in line for line in lines] == [False, False, False, False, True]
    assert lines[-1]["finish_reason"] in ("eos_token", "stop_sequence")
    assert lines[-1]["parameters"] == {"top_k": 3}
    assert lines[-1]["prompt"] == [PROMPT.text, PROMPT.length]


def test_a_formatter_of_steps_words_errors_itself(tmp_path: Path) -> None:
    formatters = load(tmp_path, STEPS.replace("UNPACKED", "token, first, last"))
    lines = answer(parse(formatters, STREAM).framer, FAILED).splitlines()
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
    framer = parse(formatters, STREAM).framer
    with pytest.raises(GenerationError, match="ZeroDivisionError"):
        framer.frame(EOS[0])
    assert json.loads(framer.error(FAILURE)) == {"error": str(FAILURE), "code": 424}


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
    assert answer(parse(formatters, WHOLE).framer, EOS).decode() == f"blue: {TEXT}"
