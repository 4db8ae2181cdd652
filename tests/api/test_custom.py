from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from djl_trtllm.api import Call, Defaults, djl_python_shim
from djl_trtllm.api.custom import CustomFormatters, load_custom
from djl_trtllm.errors import GenerationError, InvalidRequestError, ModelError

from .scripts import EOS, FAILED, FAILURE, PROMPT, STOP, TEXT, answer


@pytest.fixture(autouse=True)
def clean_imports() -> Iterator[None]:
    modules, path = set(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in ("djl_python", "wording") or name.startswith("djl_trtllm_model_"):
            del sys.modules[name]
    sys.path[:] = path


def load(directory: Path, source: str, **attributes: Any) -> CustomFormatters:
    (directory / "model.py").write_text(textwrap.dedent(source))
    loaded = load_custom(directory, attributes)
    assert loaded is not None
    return loaded


def parse(formatters: CustomFormatters, payload: Any, defaults: Defaults = Defaults()) -> Call:  # noqa: B008
    return formatters.parse(json.dumps(payload).encode(), "application/json", defaults, {"x-team": "blue"})


WHOLE = {"inputs": "The wolf"}
STREAM = {"inputs": "The wolf", "stream": True}


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
    assert call.request.prompt == "<s>The wolf"
    assert call.request.sampling.max_new_tokens == 256
    assert json.loads(answer(call.framer, EOS)) == {"generated_text": TEXT}


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
    assert parse(formatters, WHOLE).request.prompt == "THE WOLF"


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
    assert call.request.prompt == "The wolf"
    assert call.request.sampling.top_k == 3
    assert call.framer.content_type == "application/jsonlines"


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
    assert parse(formatters, WHOLE).request.prompt == "The wolf"


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


# -- loading -----------------------------------------------------------------------------------------------------------


def test_no_model_py_or_none_with_formatters_is_none(tmp_path: Path) -> None:
    assert load_custom(tmp_path) is None
    (tmp_path / "model.py").write_text("x = 1\n")
    assert load_custom(tmp_path) is None


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
    assert parse(formatters, WHOLE).request.prompt == "Once: The wolf"


@pytest.mark.parametrize("source", ["def broken(:\n", "import no_such_module_anywhere\n", "raise ValueError('x')\n"])
def test_a_file_that_cannot_run_is_a_model_error(tmp_path: Path, source: str) -> None:
    (tmp_path / "model.py").write_text(source)
    with pytest.raises(ModelError, match=r"model\.py cannot be loaded: \w+Error"):
        load_custom(tmp_path)


def test_functions_that_are_not_called_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "model.py").write_text(
        "from djl_python.input_parser import init_handler\n"
        "@init_handler\ndef start(model_dir): pass\ndef handle(inputs): pass\n"
    )
    assert load_custom(tmp_path) is None
    assert "handle, start are not called" in caplog.text


def test_an_installed_djl_python_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleType("djl_python")
    monkeypatch.setitem(sys.modules, "djl_python", real)
    assert not djl_python_shim.install()
    assert sys.modules["djl_python"] is real
    assert "djl_python.inputs" not in sys.modules


def test_the_shim_can_be_installed_twice() -> None:
    assert djl_python_shim.install()
    assert djl_python_shim.install()
