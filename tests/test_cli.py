from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
import tarfile
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from djl_trtllm import cli
from djl_trtllm.commands import find_model

runner = CliRunner()


@pytest.fixture(autouse=True)
def no_sagemaker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(find_model, "SAGEMAKER_MODEL_DIR", tmp_path / "opt-ml-model")


def options_of(*arguments: str, **environ: str) -> dict[str, dict[str, object]]:
    result = runner.invoke(cli.app, ["config", "--json", *arguments], env=environ)
    assert not result.stderr, result.output
    options: dict[str, dict[str, object]] = json.loads(result.stdout)["options"]
    return options


@pytest.mark.parametrize("line", [["serv"], ["cache", "lss"]])
def test_an_unknown_command_is_answered_with_one_suggestion_at_most(line: list[str]) -> None:
    refused = runner.invoke(cli.app, line, env={"COLUMNS": "200"})
    assert refused.exit_code == 2
    assert f"No such command '{line[-1]}'" in refused.stderr
    assert refused.stderr.count("Did you mean") <= 1


def test_config_without_a_model_shows_the_environment() -> None:
    options = options_of(OPTION_MAX_NUM_TOKENS="4096")
    names = ("max_num_tokens", "max_input_len", "max_output_len", "max_rolling_batch_size")
    assert [options[name]["value"] for name in names] == [4096, 4096, 4096, 256]
    origins = [options[name]["origin"]["text"] for name in names]  # type: ignore[index]
    assert all("OPTION_MAX_NUM_TOKENS" in str(origin) for origin in origins)


def test_a_batch_size_alone_is_taken_as_it_is() -> None:
    assert options_of(OPTION_MAX_ROLLING_BATCH_SIZE="8")["max_rolling_batch_size"]["value"] == 8


def test_config_names_a_directory_that_is_not_there(tmp_path: Path) -> None:
    result = runner.invoke(cli.app, ["config", str(tmp_path / "nowhere")])
    assert result.exit_code == 1
    assert "no model at" in result.stderr


def test_config_reads_an_archive(tmp_path: Path, tiny_stories: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(tiny_stories / "tokenizer.json", model)
    (model / "serving.properties").write_text("option.max_input_len=77\n")
    with tarfile.open(tmp_path / "model.tar.gz", "w:gz") as archive:
        archive.add(model, "model")
    options = options_of(str(tmp_path / "model.tar.gz"), OPTION_ENGINE_CACHE_DIR=str(tmp_path / "cache"))
    assert options["max_input_len"]["value"] == 77


def test_config_shows_what_is_set_and_on_request_all(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.max_input_len=77\n")
    few = runner.invoke(cli.app, ["config", str(tmp_path)]).stdout
    assert "option.max_input_len" in few
    assert "option.max_output_len" not in few
    assert "option.max_output_len" in runner.invoke(cli.app, ["config", str(tmp_path), "--all"]).stdout


def test_config_tells_why_a_model_cannot_be_served(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.max_input_len=77\n")
    result = runner.invoke(cli.app, ["config", str(tmp_path)])
    assert result.exit_code == 1
    assert "cannot be served: " in result.stdout
    assert "expected one of" in result.stdout


@pytest.mark.parametrize("arguments", [("--help",), ("version",), ("config", "--json")])
def test_output_that_cannot_be_written_is_told_in_one_line(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "djl_trtllm.cli", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "error: cannot write the output: No space left on device\n")


def test_hf_model_id_names_the_model_where_none_is_given(tmp_path: Path) -> None:
    result = runner.invoke(cli.app, ["serve"], env={"HF_MODEL_ID": str(tmp_path / "nowhere")})
    assert result.exit_code == 1
    assert "no model at" in result.stderr
    (tmp_path / "serving.properties").write_text("option.max_input_len=77\n")
    assert options_of(HF_MODEL_ID=str(tmp_path))["max_input_len"]["value"] == 77


@pytest.mark.parametrize("variable", ["HF_MODEL_ID", "OPTION_MODEL_ID"])
def test_a_model_may_be_named_by_a_variable_alone(
    monkeypatch: pytest.MonkeyPatch, tiny_stories: Path, variable: str
) -> None:
    monkeypatch.setenv(variable, str(tiny_stories))
    assert find_model.find_model(None) == str(tiny_stories)
    result = runner.invoke(cli.app, ["config", "--json"])
    assert "backend openvino" in "".join(json.loads(result.stdout)["summary"])


def test_sigterm_ends_a_command_as_ctrl_c_does_so_that_it_can_clean_up() -> None:
    program = (
        "import os, signal\n"
        "from djl_trtllm import cli\n"
        "def app():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    finally:\n"
        "        print('cleaned up')\n"
        "cli.app = app\n"
        "cli.main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (143, "cleaned up\n")


@pytest.mark.parametrize("name", cli.SUMMARIES)
def test_the_list_of_commands_has_the_first_line_of_each_ones_help(name: str) -> None:
    command = typer.main.get_command(import_module(f"djl_trtllm.commands.{name}").app)
    assert cli.SUMMARIES[name] == inspect.cleandoc(command.help or "").partition("\n\n")[0]


def test_a_command_with_a_typing_error_is_told_the_right_one() -> None:
    result = runner.invoke(cli.app, ["serv"])
    assert result.exit_code == 2
    assert "Did you mean 'serve'?" in result.stderr


def test_a_shell_completes_commands() -> None:
    program = "import sys; sys.argv[0] = 'djl-trtllm'; from djl_trtllm.cli import main; main()"
    environ = {"_DJL_TRTLLM_COMPLETE": "complete_bash", "COMP_WORDS": "djl-trtllm ser", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["serve"]
