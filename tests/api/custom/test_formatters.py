"""Formatters of a model directory: how they are found, and what they make of requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from djl_trtllm.api.custom.encoders import ObjectEncoder, TokenEncoder
from djl_trtllm.api.custom.formatters import CustomFormatters
from djl_trtllm.errors import InvalidRequestError, OverloadedError
from tests.api.models import HEAD, STREAM, WHOLE, load, parse, parse_bytes
from tests.api.scripts import EOS, FAILURE, TEXT, answer, several

pytestmark = pytest.mark.usefixtures("clean_imports")

# -- input formatters --------------------------------------------------------------------------------------------------


def test_a_formatter_of_payloads_changes_the_request(tmp_path: Path) -> None:
    formatters = load(
        tmp_path,
        """
        from djl_python.input_parser import input_formatter

        @input_formatter
        def rename(decoded_payload: dict, tokenizer=None, **kwargs) -> dict:
            decoded_payload["inputs"] = tokenizer + decoded_payload.pop("inputPrompt")
            decoded_payload.setdefault("parameters", {}).setdefault("max_new_tokens", 256)
            return decoded_payload
        """,
        tokenizer="<s>",
        configs={},
    )
    call = parse(formatters, {"inputPrompt": "The wolf"})
    assert call.requests[0].prompt == "<s>The wolf"
    assert call.requests[0].sampling.max_new_tokens == 256
    assert json.loads(answer(call.encoder, EOS)) == {"generated_text": TEXT}


def test_a_formatter_gets_only_the_arguments_it_takes(tmp_path: Path) -> None:
    formatters = load(
        tmp_path,
        """
        from djl_python.input_parser import input_formatter

        @input_formatter
        def shout(payload):
            return {"inputs": payload["inputs"].upper()}
        """,
        tokenizer="<s>",
    )
    assert parse(formatters, WHOLE).requests[0].prompt == "THE WOLF"


def test_a_formatter_of_inputs_reads_the_request_itself(tmp_path: Path) -> None:
    formatters = load(
        tmp_path,
        """
        from typing import Any

        from djl_python import Input
        from djl_python.encode_decode import decode
        from djl_python.input_parser import input_formatter
        from djl_python.request_io import RequestInput, TextInput

        class MyInput(TextInput):
            my_own_fields: Any

        @input_formatter
        def read(input_item: Input, **kwargs) -> RequestInput:
            input_map = decode(input_item, input_item.get_property("content-type"))
            request_input = MyInput()
            request_input.input_text = input_map.pop("inputs", input_map)
            request_input.parameters = input_map.pop("parameters", {}) | {"stream": True}
            request_input.my_own_fields = input_item.get_property("X-Team")
            return request_input
        """,
    )
    call = parse(formatters, {"inputs": "The wolf", "parameters": {"top_k": 3}})
    assert call.requests[0].prompt == "The wolf"
    assert call.requests[0].sampling.top_k == 3
    assert call.encoder.content_type == "application/jsonlines"


def test_postponed_annotations_are_understood(tmp_path: Path) -> None:
    formatters = load(
        tmp_path,
        """
        from __future__ import annotations

        import djl_python
        from djl_python.input_parser import input_formatter
        from djl_python.request_io import TextInput

        @input_formatter
        def read(item: djl_python.Input) -> TextInput:
            return TextInput(input_text=[item.get_as_json()["inputs"]])
        """,
    )
    assert parse(formatters, WHOLE).requests[0].prompt == "The wolf"


def test_a_failing_input_formatter_fails_its_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    formatters = load(
        tmp_path,
        """
        from djl_python.input_parser import input_formatter

        @input_formatter
        def fail(decoded_payload, **kwargs):
            raise RuntimeError("no such field")
        """,
    )
    with pytest.raises(InvalidRequestError, match="input formatter raised RuntimeError: no such field"):
        parse(formatters, WHOLE)
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("result", ["None", "object()", "3"])
@pytest.mark.parametrize("argument", ["decoded_payload", "input_item"])
def test_an_input_formatter_that_returns_something_else_fails(tmp_path: Path, argument: str, result: str) -> None:
    formatters = load(
        tmp_path,
        f"""
        from djl_python.input_parser import input_formatter

        @input_formatter
        def wrong({argument}):
            return {result}
        """,
    )
    with pytest.raises(InvalidRequestError):
        parse(formatters, WHOLE)


# -- what a formatter gets and gives -----------------------------------------------------------------------------------


def test_a_formatter_of_inputs_may_return_a_payload(tmp_path: Path) -> None:
    formatters = load(
        tmp_path,
        HEAD
        + """
    def read(input_item):
        assert isinstance(input_item, Input)
        return {"inputs": input_item.get_as_string().upper()}
        """,
    )
    assert parse_bytes(formatters, b"the wolf", content_type="text/plain").requests[0].prompt == "THE WOLF"


@pytest.mark.parametrize("argument", ["item: Input", "input_item", "inputs", "input", "item: 'Input'"])
def test_the_first_argument_says_that_a_formatter_reads_the_request_itself(tmp_path: Path, argument: str) -> None:
    formatters = load(
        tmp_path,
        HEAD
        + f"""
    def read({argument}):
        return TextInput(input_text=type({argument.partition(":")[0]}).__name__)
        """,
    )
    assert parse(formatters, WHOLE).requests[0].prompt == "Input"


@pytest.mark.parametrize("argument", ["payload", "inputs: dict", "input: InputPayload = None", "*inputs"])
def test_other_arguments_get_the_payload(tmp_path: Path, argument: str) -> None:
    name = argument.lstrip("*").partition(":")[0]
    formatters = load(
        tmp_path,
        f"""
        from __future__ import annotations
        from djl_python.input_parser import input_formatter

        @input_formatter
        def read({argument}):
            given = {name}[0] if isinstance({name}, tuple) else {name}
            given["inputs"] += "!" if isinstance(given, dict) else "?"
            return given
        """,
    )
    if argument == "*inputs":  # its name says that it reads the request itself
        with pytest.raises(InvalidRequestError):
            parse(formatters, WHOLE)
    else:
        assert parse(formatters, WHOLE).requests[0].prompt == "The wolf!"


def test_a_request_is_an_input_with_its_headers_and_its_content_type(tmp_path: Path) -> None:
    formatters = load(
        tmp_path,
        HEAD
        + """
    def read(input_item):
        properties = input_item.get_properties()
        return {"inputs": repr((sorted(properties.items()), input_item.get_as_bytes()))}
        """,
    )
    headers = {"x-team": "blue"}
    shown = parse_bytes(formatters, b"body", headers, "text/plain").requests[0].prompt
    assert shown == repr(([("Content-Type", "text/plain"), ("x-team", "blue")], b"body"))
    shown = parse_bytes(formatters, b"body", headers, None).requests[0].prompt
    assert shown == repr(([("x-team", "blue")], b"body"))


def test_a_formatter_with_keyword_arguments_gets_all_of_them(tmp_path: Path) -> None:
    formatters = load(
        tmp_path,
        HEAD
        + """
    def read(payload, /, **kwargs):
        return {"inputs": " ".join(f"{name}={value}" for name, value in sorted(kwargs.items()))}
        """,
        tokenizer="t",
        configs="c",
    )
    assert parse(formatters, WHOLE).requests[0].prompt == "configs=c tokenizer=t"


def test_an_attribute_does_not_take_the_place_of_the_request(tmp_path: Path) -> None:
    source = HEAD + "    def read(tokenizer, configs=None):\n        return {'inputs': configs}\n"
    formatters = load(tmp_path, source, tokenizer="t", configs="c", other="o")
    assert parse(formatters, WHOLE).requests[0].prompt == "c"


def text_input(tmp_path: Path, expression: str) -> CustomFormatters:
    """A formatter that returns what an expression makes."""
    return load(tmp_path, HEAD + f"    def read(input_item):\n        return {expression}\n")


def test_parameters_and_the_stream_of_a_text_input_are_the_requests(tmp_path: Path) -> None:
    formatters = text_input(tmp_path, "TextInput(input_text='a', parameters={'top_k': 3, 'stream': True})")
    call = parse(formatters, WHOLE)
    assert (call.requests[0].prompt, call.requests[0].sampling.top_k, call.encoder.stream) == ("a", 3, True)
    formatters = text_input(tmp_path, "TextInput(input_text=['a'])")
    assert (parse(formatters, STREAM).requests[0].prompt, parse(formatters, STREAM).encoder.stream) == ("a", False)


def test_an_output_formatter_of_a_text_input_is_taken_by_name_unless_the_parameters_have_one(tmp_path: Path) -> None:
    formatters = text_input(tmp_path, "TextInput(input_text='a', output_formatter='sse')")
    assert parse(formatters, WHOLE).encoder.content_type == "text/event-stream"
    formatters = text_input(
        tmp_path, "TextInput(input_text='a', output_formatter='sse', parameters={'output_formatter': 'none'})"
    )
    assert parse(formatters, WHOLE).encoder.content_type == "text/plain"


def test_an_output_formatter_of_a_text_input_may_be_a_function(tmp_path: Path) -> None:
    formatters = text_input(tmp_path, "TextInput(input_text='a', output_formatter=lambda data: {'seen': len(data)})")
    assert json.loads(answer(parse(formatters, WHOLE).encoder, EOS)) == {"seen": 1}


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("RequestInput()", '"RequestInput('),
        ("TextInput(input_text='a', parameters=None)", '"TextInput('),
        ("None", '"None"'),
        ("3", '"3"'),
    ],
)
def test_a_result_of_another_kind_is_shown_with_what_is_expected(tmp_path: Path, expression: str, shown: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(text_input(tmp_path, expression), WHOLE)
    message = str(caught.value)
    assert message.startswith("Input Parsing failed. ") and f"input formatter returned {shown}" in message
    assert message.endswith("expected a dict or a TextInput with 'input_text' and 'parameters'")


def test_several_texts_are_refused_as_several_prompts_are(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="send one request per prompt"):
        parse(text_input(tmp_path, "TextInput(input_text=['a', 'b'])"), WHOLE)


def test_what_a_formatter_refuses_with_an_error_of_requests_is_reported_as_it_is(tmp_path: Path) -> None:
    formatters = load(
        tmp_path,
        """
        from djl_python.input_parser import input_formatter
        from djl_trtllm.errors import OverloadedError

        @input_formatter
        def read(payload):
            raise OverloadedError("later", queue_depth=1, capacity=1, retry_after=1)
        """,
    )
    with pytest.raises(OverloadedError, match=r"^later$"):
        parse(formatters, WHOLE)


def test_without_an_input_formatter_requests_are_read_as_ever(tmp_path: Path) -> None:
    formatters = load(
        tmp_path,
        """
        from djl_python.output_formatter import output_formatter

        @output_formatter
        def shout(data):
            return {"text": data["generated_text"].upper()}
        """,
    )
    assert json.loads(answer(parse_bytes(formatters, b"The wolf", content_type="text/plain").encoder, EOS)) == {
        "text": TEXT.upper()
    }
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        parse_bytes(formatters, b"{", content_type=None)


# -- which encoder an output formatter gets ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argument", ["output: TextGenerationOutput", "output: RequestOutput", "request_output", "output: 'RequestOutput'"]
)
def test_the_first_argument_says_that_an_output_formatter_is_called_per_token(tmp_path: Path, argument: str) -> None:
    formatters = load(
        tmp_path,
        f"""
        from djl_python.output_formatter import RequestOutput, TextGenerationOutput, output_formatter

        @output_formatter
        def write({argument}):
            output = {argument.partition(":")[0]}
            shown = (output.input.parameters, output.input.tgi_compat, len(output.sequences))
            return repr(shown) if output.finished else ""
        """,
    )
    payload = {"inputs": "The wolf", "parameters": {"top_k": 3}}
    call = parse(formatters, payload)
    assert isinstance(call.encoder, TokenEncoder) and not call.encoder.stream
    assert call.requests[0].logprobs
    assert answer(call.encoder, EOS).decode() == repr(({"top_k": 3}, False, 1))
    streamed = parse(formatters, payload | {"stream": True}, tgi_compat=True)
    assert streamed.encoder.stream
    assert answer(streamed.encoder, EOS).decode() == repr(({"top_k": 3}, True, 1))
    several_call = parse(formatters, {"inputs": "The wolf", "parameters": {"n": 2}})
    assert answer(several_call.encoder, several(2)).decode() == repr(({"n": 2}, False, 2))


def test_an_error_before_the_prompt_was_tokenised_finds_what_was_sent(tmp_path: Path) -> None:
    formatters = load(
        tmp_path,
        """
        from djl_python.output_formatter import RequestOutput, output_formatter

        @output_formatter
        def write(request_output: RequestOutput) -> str:
            return request_output.input.input_text
        """,
    )
    assert parse(formatters, STREAM).encoder.error(FAILURE) == b"The wolf"
    headers = {"x-amzn-sagemaker-forwarded-api": "InvokeEndpointWithResponseStream"}
    call = parse_bytes(formatters, b'{"prompt": "The fox"}', headers, None, bedrock_compat=True)
    assert call.encoder.error(FAILURE) == b"The fox"


def test_an_output_formatter_without_arguments_or_signature_gets_dictionaries() -> None:
    for formatter in (lambda *shown: {"seen": len(shown)}, dict):
        call = parse(CustomFormatters(output_formatter=formatter), WHOLE)
        assert isinstance(call.encoder, ObjectEncoder)
    assert CustomFormatters().indexed_tokens
    assert isinstance(parse(CustomFormatters(output_formatter=lambda: {}), WHOLE).encoder, ObjectEncoder)


def test_the_form_of_sequences_is_that_of_the_file(tmp_path: Path) -> None:
    source = """
        from djl_python.output_formatter import RequestOutput, output_formatter

        @output_formatter
        def write(request_output: RequestOutput) -> str:
            VALUES = request_output.sequences[0].get_next_token()
            return token.text if token else ""
        """
    for values in ("token, first, last", "token, index, first, last"):
        formatters = load(tmp_path, source.replace("VALUES", values))
        assert answer(parse(formatters, STREAM).encoder, EOS).decode() == TEXT


def test_djls_own_input_may_keep_its_contents_in_a_list_of_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PairList:
        def __init__(self) -> None:
            self.pairs: list[tuple[str, bytes]] = []

        def add(self, key: str, value: bytes) -> None:
            self.pairs.append((key, value))

    formatters = load(
        tmp_path, HEAD + "    def read(input_item):\n        return {'inputs': repr(input_item.content.pairs)}\n"
    )
    monkeypatch.setattr(
        "djl_python.inputs.Input", type("Input", (), {"__init__": lambda self: setattr(self, "content", PairList())})
    )
    assert parse_bytes(formatters, b"body", content_type=None).requests[0].prompt == "[('data', b'body')]"
