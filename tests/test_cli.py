from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

import djl_trtllm
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


def test_wrong_configuration_is_a_message_and_not_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.max_input_len=many\noption.max_output_len=0\n")
    result = runner.invoke(cli.app, ["serve", str(tmp_path)])
    assert result.exit_code == 1
    assert "2 configuration problems" in result.stderr
    assert "serving.properties:1" in result.stderr
    assert "Traceback" not in result.output


def test_serve_without_a_model_says_what_to_name() -> None:
    result = runner.invoke(cli.app, ["serve"])
    assert result.exit_code == 1
    assert "name a model directory" in result.stderr


def test_compile_refuses_what_is_no_checkpoint(tmp_path: Path) -> None:
    result = runner.invoke(cli.app, ["compile", str(tmp_path), str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "expected one of" in result.stderr


def test_compile_takes_the_flags_of_trtllm_build(tmp_path: Path) -> None:
    flags = [f"--checkpoint_dir={tmp_path}", "--output_dir", str(tmp_path / "out"), "--workers=2"]
    result = runner.invoke(cli.app, ["compile", *flags, "--max_batch_size", "many"])
    assert result.exit_code == 1
    assert "--workers: no effect" in result.stderr
    assert "option.max_num_sequences=many (command line)" in result.stderr
    result = runner.invoke(cli.app, ["compile", *flags])
    assert (result.exit_code, "expected one of" in result.stderr) == (1, True)
    result = runner.invoke(cli.app, ["compile", str(tmp_path)])
    assert "name a checkpoint and an output" in result.stderr
    assert runner.invoke(cli.app, ["compile", "--help"]).exit_code == 0


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


@pytest.mark.parametrize("word", ["version", "--version"])
def test_version_is_the_packages(word: str) -> None:
    result = runner.invoke(cli.app, [word])
    assert result.exit_code == 0
    assert result.stdout.strip() == djl_trtllm.__version__


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


def test_a_shell_completes_commands() -> None:
    program = "import sys; sys.argv[0] = 'djl-trtllm'; from djl_trtllm.cli import main; main()"
    environ = {"_DJL_TRTLLM_COMPLETE": "complete_bash", "COMP_WORDS": "djl-trtllm ser", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["serve"]


@pytest.mark.parametrize(("option", "names"), [("--log-level", "'debug', 'info',"), ("--log-format", "'text', 'json'")])
def test_an_unknown_level_or_format_of_the_log_is_an_error_that_names_them(option: str, names: str) -> None:
    result = runner.invoke(cli.app, ["serve", option, "loud"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert names in result.stderr


def test_a_level_in_the_environment_is_checked_too() -> None:
    result = runner.invoke(cli.app, ["serve", str(Path.cwd())], env={"SERVING_LOG_LEVEL": "loud"})
    assert result.exit_code == 1
    assert "expected one of debug, info, warning, error, critical" in result.stderr


def test_a_level_is_one_in_capitals_too(tmp_path: Path) -> None:
    result = runner.invoke(cli.app, ["serve", str(tmp_path / "nowhere"), "--log-level", "DEBUG"])
    assert "no model at" in result.stderr
