"""Formatters of a model directory: how they are found, and what they make of requests."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

from djl_trtllm.api.dialects.lmi.custom import CustomFormatters, FormattedEncoder, TokenEncoder, load_custom
from djl_trtllm.api.registry import LMI
from djl_trtllm.errors import InvalidRequestError, ModelError, NotReadyError
from tests.api.models import EOS, FAILURE, HEAD, STREAM, TEXT, WHOLE, answer, load, parse, parse_bytes, several
from tests.support.tables import by_table

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


# -- what a formatter gets and gives -----------------------------------------------------------------------------------


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


def test_an_output_formatter_without_arguments_or_signature_gets_dictionaries() -> None:
    for formatter in (lambda *shown: {"seen": len(shown)}, dict):
        call = parse(CustomFormatters(LMI.read, output_formatter=formatter), WHOLE)
        assert isinstance(call.encoder, FormattedEncoder)
    assert CustomFormatters(LMI.read).indexed_tokens
    assert isinstance(parse(CustomFormatters(LMI.read, output_formatter=lambda: {}), WHOLE).encoder, FormattedEncoder)


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


def test_no_model_py_or_none_with_formatters_is_none(tmp_path: Path) -> None:
    assert load_custom(tmp_path, LMI.read) is None
    (tmp_path / "model.py").write_text("x = 1\n")
    assert load_custom(tmp_path, LMI.read) is None


def test_siblings_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "wording.py").write_text("PREFIX = 'Once: '\n")
    formatters = load(
        tmp_path,
        """
        from djl_python.input_parser import input_formatter
        from wording import PREFIX

        @input_formatter
        def prefix(payload: dict) -> dict:
            return payload | {"inputs": PREFIX + payload["inputs"]}
        """,
    )
    assert parse(formatters, WHOLE).requests[0].prompt == "Once: The wolf"


@by_table("line", "four")
def test_the_file_tells_how_many_values_it_unpacks(tmp_path: Path, line: str, four: bool) -> None:
    source = f"""
        from djl_python.output_formatter import RequestOutput, output_formatter

        @output_formatter
        def write(request_output: RequestOutput) -> str:
            {line}
        """
    assert load(tmp_path, source).indexed_tokens is four


# -- what a formatter gets and gives -----------------------------------------------------------------------------------

ATTRIBUTES = {"tokenizer": "t", "configs": "c", "other": "o"}
ITSELF = "TextInput(input_text=type(item).__name__)"
PROMPTS = {
    "def read(payload): return {'inputs': payload['inputs'].upper()}": "THE WOLF",
    "def read(inputs: dict): return {'inputs': type(inputs).__name__}": "dict",
    "def read(input: 'Payload' = None): return {'inputs': type(input).__name__}": "dict",
    "def read(payload, /, **kwargs): return {'inputs': ' '.join(map('='.join, sorted(kwargs.items())))}": (
        "configs=c other=o tokenizer=t"
    ),
    "def read(tokenizer, configs=None): return {'inputs': configs}": "c",
    "def read(item: 'djl_python.Input'): return TextInput(input_text=[item.get_as_json()['inputs']])": "The wolf",
    "def read(input_item): return {'inputs': input_item.get_as_string().upper()}": '{"INPUTS": "THE WOLF"}',
    "def read(input_item): return {'inputs': repr(sorted(input_item.get_properties().items()))}": (
        "[('Content-Type', 'application/json'), ('x-team', 'blue')]"
    ),
    f"def read(item: Input): return {ITSELF}": "Input",
    f"def read(item: 'Input'): return {ITSELF}": "Input",
    **{f"def read({name}): item = {name}; return {ITSELF}": "Input" for name in ("input_item", "inputs", "input")},
    "def read(payload): return {'inputs': 'first'}\n\n@input_formatter\ndef second(payload): return {}": "first",
}
"""What an input formatter is, and the prompt that it makes of `{"inputs": "The wolf"}`."""
WANTED = "expected a dict or a TextInput with 'input_text' and 'parameters'"
RAISES = {
    "raise RuntimeError('no such field')": "The model's input formatter raised RuntimeError: no such field",
    "raise SystemExit(3)": "The model's input formatter raised SystemExit: 3",
    "return RequestInput()": f'input formatter returned "RequestInput(.*{WANTED}',
    "return TextInput(input_text='a', parameters=None)": f'input formatter returned "TextInput(.*{WANTED}',
    "return 3": f'input formatter returned "3": {WANTED}',
    "return None": f'input formatter returned "None": {WANTED}',
    "return TextInput(input_text=['a', 'b'])": "The 'inputs' field must be a string",
}
"""What an input formatter does, and the error of its request."""


def head(source: str) -> str:
    return textwrap.dedent(HEAD) + source + "\n"


@pytest.mark.parametrize("source", PROMPTS)
def test_an_input_formatter_gets_what_its_arguments_ask_for(tmp_path: Path, source: str) -> None:
    assert parse(load(tmp_path, head(source), **ATTRIBUTES), WHOLE).requests[0].prompt == PROMPTS[source]


@pytest.mark.parametrize("body", RAISES)
@pytest.mark.parametrize("argument", ["payload", "input_item"])
def test_an_input_formatter_that_fails_fails_its_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, argument: str, body: str
) -> None:
    formatters = load(tmp_path, head(f"def read({argument}):\n    {body}"))
    told = RAISES[body] if argument == "input_item" or body.startswith("raise") else "Input Parsing"
    with pytest.raises(InvalidRequestError, match=told.replace("Input(.", r"Input\(.")) as caught:
        parse(formatters, WHOLE)
    assert str(caught.value).startswith("Input Parsing failed. ")
    assert ("Traceback" in caplog.text) is body.startswith("raise")


def test_what_a_formatter_refuses_with_an_error_of_requests_is_reported_as_it_is(tmp_path: Path) -> None:
    source = "def read(payload):\n    from djl_trtllm.errors import NotReadyError\n    raise NotReadyError('later')"
    with pytest.raises(NotReadyError, match=r"^later$"):
        parse(load(tmp_path, head(source)), WHOLE)


@by_table("arguments", "shown")
def test_a_text_input_has_parameters_the_stream_and_the_output_formatter(
    tmp_path: Path, arguments: str, shown: list[object]
) -> None:
    formatters = load(tmp_path, head(f"def read(input_item): return TextInput(input_text='a', {arguments})"))
    call = parse(formatters, STREAM)
    assert [call.requests[0].sampling.top_k, call.encoder.stream, call.encoder.content_type] == shown


def test_a_text_input_of_a_class_of_ones_own_needs_no_output_formatter(tmp_path: Path) -> None:
    made = "type('Mine', (), {'input_text': 'a', 'parameters': {}})()"
    call = parse(load(tmp_path, head(f"def read(input_item): return {made}")), WHOLE)
    assert call.requests[0].prompt == "a"


def test_an_output_formatter_of_a_text_input_may_be_a_function(tmp_path: Path) -> None:
    made = "TextInput(input_text='a', output_formatter=lambda data: {'seen': len(data)})"
    call = parse(load(tmp_path, head(f"def read(input_item): return {made}")), WHOLE)
    assert json.loads(answer(call.encoder, EOS)) == {"seen": 1}


@by_table("source", "named")
def test_functions_that_are_not_called_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, source: str, named: str
) -> None:
    (tmp_path / "model.py").write_text(source)
    assert (load_custom(tmp_path, LMI.read) is None) is not source.startswith(textwrap.dedent(HEAD))
    expected = f"{tmp_path}/model.py: {named} not called: this server runs the model itself"
    assert (expected in caplog.text) if named else not caplog.text


@pytest.mark.parametrize(
    "source", ["def broken(:\n", "import no_such_module_anywhere\n", "1 / 0\n", "raise SystemExit(3) from OSError()\n"]
)
def test_a_file_that_cannot_run_is_an_error_that_says_what_to_do(tmp_path: Path, source: str) -> None:
    (tmp_path / "model.py").write_text(source)
    with pytest.raises(ModelError, match=r"/model\.py cannot be loaded: (\w+Error|SystemExit): .* remove it") as caught:
        load_custom(tmp_path, LMI.read)
    assert isinstance(caught.value.__cause__, (Exception, SystemExit))
    assert not any(name.startswith("djl_trtllm_model_") for name in sys.modules)


def test_each_directory_is_a_module_of_its_own_and_stands_on_the_path_once_and_last(tmp_path: Path) -> None:
    for name in ("a", "b", "b"):
        (tmp_path / name).mkdir(exist_ok=True)
        loaded = load(tmp_path / name, head(f"def read(payload): return {{'inputs': '{name}'}}"))
        assert parse(loaded, WHOLE).requests[0].prompt == name
    modules = [name for name in sys.modules if name.startswith("djl_trtllm_model_")]
    assert len(modules) == 2 and all(len(name) == len("djl_trtllm_model_") + 12 for name in modules)
    assert sys.path.count(str(tmp_path.resolve() / "b")) == 1
    assert sys.path[-1] == str(tmp_path.resolve() / "b")
