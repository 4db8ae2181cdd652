"""How the formatters of a model directory are found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from djl_trtllm.api.custom.formatters import load_custom
from djl_trtllm.errors import InvalidRequestError, ModelError
from tests.api.models import HEAD, WHOLE, load, parse

pytestmark = pytest.mark.usefixtures("clean_imports")


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
    assert parse(formatters, WHOLE).requests[0].prompt == "Once: The wolf"


@pytest.mark.parametrize(
    "source",
    [
        "def broken(:\n",
        "import no_such_module_anywhere\n",
        "raise ValueError('x')\n",
        "raise SystemExit(3) from OSError()\n",
        "import sys; sys.exit()\n",
    ],
)
def test_a_file_that_cannot_run_is_a_model_error(tmp_path: Path, source: str) -> None:
    (tmp_path / "model.py").write_text(source)
    with pytest.raises(ModelError, match=r"model\.py cannot be loaded: (\w+Error|SystemExit)"):
        load_custom(tmp_path)


def test_functions_that_are_not_called_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "model.py").write_text(
        "from djl_python.input_parser import init_handler\n"
        "@init_handler\ndef start(model_dir): pass\ndef handle(inputs): pass\n"
    )
    assert load_custom(tmp_path) is None
    assert "handle, start are not called" in caplog.text


def test_the_first_function_with_a_mark_counts(tmp_path: Path) -> None:
    formatters = load(
        tmp_path,
        """
        from djl_python.input_parser import input_formatter

        def unmarked(payload): return {"inputs": "unmarked"}
        unmarked.is_input_formatter = 1

        @input_formatter
        def first(payload): return {"inputs": "first"}

        @input_formatter
        def second(payload): return {"inputs": "second"}
        """,
    )
    assert parse(formatters, WHOLE).requests[0].prompt == "first"
    assert formatters.output_formatter is None


@pytest.mark.parametrize(
    ("line", "four"),
    [
        ("token, first, last = sequence.get_next_token()", False),
        ("(token, first, last) = sequence.get_next_token()", False),
        ("token, index, first, last = sequence.get_next_token()", True),
        ("token = sequence.get_next_token()", True),
        ("a, b, c = sequence.another()", True),
        ("a, b, c = get_next_token()", True),
        ("a, b, c = sequence.get_next_token", True),
        ("pass", True),
    ],
)
def test_the_file_tells_how_many_values_it_unpacks(tmp_path: Path, line: str, four: bool) -> None:
    source = f"""
        from djl_python.output_formatter import RequestOutput, output_formatter

        @output_formatter
        def write(request_output: RequestOutput) -> str:
            {line}
        """
    assert load(tmp_path, source).indexed_tokens is four


def test_each_directory_is_a_module_of_its_own(tmp_path: Path) -> None:
    loaded = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        loaded.append(load(tmp_path / name, HEAD + f"    def read(payload):\n        return {{'inputs': '{name}'}}\n"))
    assert [parse(formatters, WHOLE).requests[0].prompt for formatters in loaded] == ["a", "b"]
    modules = [name for name in sys.modules if name.startswith("djl_trtllm_model_")]
    assert len(modules) == 2 and all(len(name) == len("djl_trtllm_model_") + 12 for name in modules)


def test_a_directory_stands_on_the_path_once_and_last(tmp_path: Path) -> None:
    for _ in range(2):
        load(tmp_path, HEAD + "    def read(payload):\n        return payload\n")
    assert sys.path.count(str(tmp_path.resolve())) == 1
    assert sys.path[-1] == str(tmp_path.resolve())


def test_a_file_that_cannot_run_leaves_no_module_and_is_reported_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("1 / 0\n")
    with pytest.raises(ModelError) as caught:
        load_custom(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/model.py cannot be loaded: ZeroDivisionError: division by zero. Only its formatters are used: "
        "correct it, or remove it to serve the model without them."
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not any(name.startswith("djl_trtllm_model_") for name in sys.modules)


@pytest.mark.parametrize("name", ["handle", "model_fn", "input_fn", "predict_fn", "output_fn"])
def test_a_handler_of_djl_or_sagemaker_is_not_called_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    (tmp_path / "model.py").write_text(f"def {name}(inputs): pass\n")
    assert load_custom(tmp_path) is None
    assert f"{tmp_path}/model.py: {name} is not called: this server runs the model itself" in caplog.text


def test_a_name_of_a_handler_that_is_no_function_is_not_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model.py").write_text("handle = 'a word'\n")
    assert load_custom(tmp_path) is None
    assert caplog.text == ""


def test_a_prediction_handler_is_not_called_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = "from djl_python.input_parser import prediction_handler\n@prediction_handler\ndef predict(x): pass\n"
    (tmp_path / "model.py").write_text(source)
    assert load_custom(tmp_path) is None
    assert "predict is not called" in caplog.text


def test_nothing_is_logged_of_a_file_with_formatters_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(tmp_path, HEAD + "    def read(payload):\n        return payload\n")
    assert caplog.text == ""


def test_a_formatter_that_exits_ends_its_request_only(tmp_path: Path) -> None:
    formatters = load(
        tmp_path,
        """
        from djl_python.input_parser import input_formatter

        @input_formatter
        def leave(payload: dict) -> dict:
            raise SystemExit(3)
        """,
    )
    with pytest.raises(InvalidRequestError, match="The model's input formatter raised SystemExit: 3"):
        parse(formatters, WHOLE)
