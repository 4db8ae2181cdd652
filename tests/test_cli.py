"""The command that leads to the package's commands."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import djl_trtllm
from djl_trtllm.cli import SUMMARIES, app, find_command
from tests.support.tables import by_rows


def test_commands_stand_in_the_order_of_use_and_each_has_help() -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["--help"], terminal_width=120).output
    places = [shown.index(f" {name} ") for name in SUMMARIES]
    assert places == sorted(places)
    assert [*SUMMARIES][:4] == ["serve", "config", "generate", "bench"] and [*SUMMARIES][-1] == "version"
    for name in SUMMARIES:
        done = runner.invoke(app, [name, "--help"])
        assert done.exit_code == 0 and "Usage" in done.output


def test_the_package_has_a_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", djl_trtllm.__version__)
    for line in (["version"], ["--version"]):
        assert CliRunner().invoke(app, line).stdout == f"{djl_trtllm.__version__}\n"


@pytest.mark.parametrize("line", [["serv"], ["cache", "lss"]])
def test_an_unknown_command_is_answered_with_one_suggestion(line: list[str]) -> None:
    refused = CliRunner().invoke(app, line, env={"COLUMNS": "200"})
    assert refused.exit_code == 2
    assert f"No such command '{line[-1]}'" in refused.stderr
    assert refused.stderr.count("Did you mean") == 1


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


@by_rows("name", SUMMARIES)
def test_the_list_of_commands_has_the_first_line_of_each_ones_help(name: str) -> None:
    assert SUMMARIES[name] == inspect.cleandoc(find_command(name).help or "").partition("\n\n")[0]


@by_rows(
    ("line", "text"),
    [
        ("serve", "The model. Default:"),
        ("quality", "The reference. A model directory"),
        ("size", "A checkpoint: a directory"),
        ("cache prune", "A fleet's cache"),
    ],
)
def test_the_help_of_a_command_has_that_of_its_arguments(line: str, text: str) -> None:
    shown = CliRunner().invoke(app, [*line.split(), "--help"], env={"COLUMNS": "80"}).stdout
    assert text in " ".join(re.sub("[│╭╮╰╯─]", "", shown).split())


def test_paragraphs_of_a_help_are_wrapped_at_the_width_of_the_terminal() -> None:
    for name in SUMMARIES:
        assert re.search(r"\S\n\S", find_command(name).help or "") is None, name


def test_the_package_runs_as_a_module() -> None:
    line = [sys.executable, "-m", "djl_trtllm", "version"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{djl_trtllm.__version__}\n"), done.stderr


def test_a_shell_completes_commands() -> None:
    program = "import sys; sys.argv[0] = 'djl-trtllm'; from djl_trtllm.cli import main; main()"
    environ = {"_DJL_TRTLLM_COMPLETE": "complete_bash", "COMP_WORDS": "djl-trtllm ser", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["serve"]
