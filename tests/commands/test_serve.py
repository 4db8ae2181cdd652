"""`djl-trtllm serve` and `generate`: what their arguments mean, and which are refused."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from djl_trtllm.cli import app
from djl_trtllm.commands import console, serve
from djl_trtllm.commands.console import bearer, check_seconds, find_model, json_object
from djl_trtllm.commands.serve import demo_model
from djl_trtllm.errors import DjlTrtllmError, ModelError
from tests.support.tables import by_table

runner = CliRunner()


@pytest.fixture(autouse=True)
def no_sagemaker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_MODEL_ID", "OPTION_MODEL_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(console, "SAGEMAKER_MODEL_DIR", tmp_path / "opt-ml-model")


@by_table("words", "environ", "status", "texts")
def test_what_is_wrong_is_a_message_that_names_it(
    tmp_path: Path, words: str, environ: dict[str, str], status: int, texts: tuple[str, ...]
) -> None:
    (tmp_path / "serving.properties").write_text("option.max_input_len=many\noption.max_output_len=0\n")
    paths = {"FOLDER": str(tmp_path), "FILE": __file__}
    given = [paths.get(word, word) for word in words.split()]
    result = runner.invoke(app, ["serve", *given], env={"COLUMNS": "400", **environ})
    assert result.exit_code == status
    assert "Traceback" not in result.output
    for text in texts:
        assert text in result.stderr


@pytest.mark.parametrize("variable", ["SERVING_API_KEY", "SERVING_Api_Key"])
def test_flags_are_options_and_the_key_is_no_variable_of_other_programs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    served: list[Any] = []
    logged: list[tuple[str, bool]] = []
    monkeypatch.setattr(serve, "configure", lambda level, *, json: logged.append((level, json)))

    def run(*given: Any) -> int:
        served.append(given)
        return 7

    monkeypatch.setattr("djl_trtllm.server.app.run", run)
    monkeypatch.setenv(variable, "secret")
    flags = ["--port", "81", "--host", "::1", "--strict-memory", "--log-level", "error", "--log-format", "json"]
    result = runner.invoke(app, ["serve", "--demo", "-o", "max_input_len=7", "--model-store", str(tmp_path), *flags])
    assert (result.exit_code, variable in os.environ) == (7, False), result.stderr
    options = served[0][0]
    assert (options.port, options.host, options.model_store) == (81, "::1", str(tmp_path))
    assert (options.log_level, options.log_format, options.strict_memory) == ("error", "json", True)
    assert options.api_key is not None and options.max_input_len == 7
    assert logged == [("error", True)] * 2, "before and after the model's files are read"


def test_the_model_of_demo_is_that_of_a_clone_or_of_the_installed_package(tmp_path: Path, tiny_stories: Path) -> None:
    assert demo_model() == tiny_stories
    package = tmp_path / "site-packages" / "djl_trtllm"
    (package / "demo" / "tiny-stories").mkdir(parents=True)
    assert demo_model(package) == package / "demo" / "tiny-stories"
    with pytest.raises(ModelError, match=r"no demonstration model.*djl-trtllm\[cpu\]"):
        demo_model(tmp_path / "djl_trtllm")


def test_generate_without_a_model_says_what_to_name(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("tell me a story\n")
    words = ["generate", "--prompts", str(tmp_path / "prompts.txt")]
    for more, text in (([], "no model given"), (["--parameters", "[]"], "--parameters []: expected a JSON object")):
        refused = runner.invoke(app, [*words, *more])
        assert (refused.exit_code, text in refused.stderr) == (1, True)


def test_flags_of_generate_are_parameters_of_each_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    ends: list[int | BaseException] = [0]

    def generate_file(*arguments: Any, **more: Any) -> int:
        given.append((*arguments[:4], more))
        if isinstance(ends[0], BaseException):
            raise ends[0]
        return ends[0]

    monkeypatch.setattr("djl_trtllm.offline.command.generate_file", generate_file)
    monkeypatch.setattr("djl_trtllm.commands.generate.drop_stdout", lambda: None)
    words = ["generate", "m", "--prompts", "in.txt"]
    assert runner.invoke(app, words).exit_code == 0
    assert given.pop() == ("m", Path("in.txt"), Path("-"), {}, {"text": False})
    flags = "--max-new-tokens 3 --temperature 0.5 --top-p 0.9 --top-k 4 --seed 0 --stop a --stop b -n 2 --text --out o"
    ends[0] = 2
    parameters = '{"top_k": 9, "min_p": 0.1}'
    assert runner.invoke(app, [*words, *flags.split(), "--parameters", parameters]).exit_code == 3
    assert given.pop()[2:] == (
        Path("o"),
        {
            "max_new_tokens": 3,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 4,
            "seed": 0,
            "stop": ["a", "b"],
            "n": 2,
            "min_p": 0.1,
        },
        {"text": True},
    )
    for end, status in ((KeyboardInterrupt(), 130), (BrokenPipeError(), 141)):
        ends[0] = end
        assert runner.invoke(app, words).exit_code == status


# -- arguments of all commands -----------------------------------------------------------------------------------------


def test_seconds_are_above_0_and_below_a_million() -> None:
    check_seconds(duration=0.001, timeout=999_999.0)
    for value in (0.0, -1.0, 1e6, math.nan, math.inf):
        with pytest.raises(DjlTrtllmError, match=r"^--timeout "):
            check_seconds(duration=1.0, timeout=value)


def test_a_key_is_a_bearer_token() -> None:
    assert [bearer(key) for key in ("secret", "", None)] == [{"Authorization": "Bearer secret"}, {}, {}]


def test_a_model_is_found_in_this_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "opt-ml-model"
    assert find_model(None) is None
    monkeypatch.setenv("OPTION_MODEL_ID", "owner/b")
    assert find_model(None) == "owner/b"
    monkeypatch.setenv("HF_MODEL_ID", "owner/a")
    assert find_model(None) == "owner/a"
    folder.mkdir()
    assert find_model(None) == "owner/a"
    (folder / "config.json").write_text("{}")
    assert find_model(None) == str(folder)
    assert find_model("named") == "named"


@pytest.mark.parametrize(("text", "reason"), [("[1]", "not an object"), ("{", "Expecting property name")])
def test_json_that_is_no_object_is_refused_with_the_option_and_the_reason(text: str, reason: str) -> None:
    assert json_object("--parameters", '{"top_k": 3}') == {"top_k": 3}
    with pytest.raises(DjlTrtllmError) as refused:
        json_object("--parameters", text)
    assert str(refused.value).startswith(f"--parameters {text}: expected a JSON object: {reason}")
