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
from djl_trtllm import cli


def test_the_package_has_a_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", djl_trtllm.__version__)
    for line in (["version"], ["--version"]):
        assert CliRunner().invoke(cli.app, line).stdout == f"{djl_trtllm.__version__}\n"


@pytest.mark.parametrize("line", [["serv"], ["cache", "lss"]])
def test_an_unknown_command_is_answered_with_one_suggestion(line: list[str]) -> None:
    refused = CliRunner().invoke(cli.app, line, env={"COLUMNS": "200"})
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


@pytest.mark.parametrize("name", cli.SUMMARIES)
def test_the_list_of_commands_has_the_first_line_of_each_ones_help(name: str) -> None:
    assert cli.SUMMARIES[name] == inspect.cleandoc(cli.find_command(name).help or "").partition("\n\n")[0]


def test_the_commands_of_a_first_day_come_first() -> None:
    listed = CliRunner().invoke(cli.app, ["--help"]).stdout.split("Commands")[1]
    names = [line.split()[1] for line in listed.splitlines() if re.match(r"\W+\b[a-z]+ {2,}\S", line)]
    assert names[:4] == ["serve", "config", "generate", "bench"]
    assert names[-1] == "version"


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
