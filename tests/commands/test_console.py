"""How commands talk."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from rich.console import Console
from rich.text import Text

from djl_trtllm import cli
from djl_trtllm.commands.console import (
    errors_for_the_reader,
    errors_of_stdout,
    print_answer,
    progress_printer,
    say,
    show,
    width_of,
)
from djl_trtllm.errors import ModelError
from djl_trtllm.progress import display_on
from tests.support.tables import by_rows

LONG = "option.max_input_len=[bold]7[/bold] " * 9


def test_an_expected_error_is_its_message_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, errors_for_the_reader():
        raise ModelError(LONG)
    assert ended.value.exit_code == 1
    assert capsys.readouterr() == ("", f"error: {LONG}\n")


def test_other_errors_are_not_caught() -> None:
    with pytest.raises(ZeroDivisionError), errors_for_the_reader():
        _ = 1 / 0


def test_progress_goes_to_stderr_as_it_stands_and_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    progress_printer()(LONG)
    assert capsys.readouterr() == ("", f"{LONG}\n")


def test_a_terminal_gets_lines_of_its_width_and_a_label_that_stands_out() -> None:
    terminal = Console(width=40, record=True, file=io.StringIO(), force_terminal=True, color_system="standard")
    say(terminal, LONG, label="warning:", style="yellow")
    styled = terminal.export_text(styles=True, clear=False)
    lines = terminal.export_text().splitlines()
    assert styled.startswith("\x1b[33mwarning:\x1b[0m")
    assert len(lines) == 10 and all(len(line) <= 40 for line in lines[1:])
    assert " ".join(lines).split() == ["warning:", *LONG.split()]
    assert width_of(terminal) == 40


def test_a_terminal_wraps_the_sentences_of_an_answer_and_no_row_of_its_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    print_answer({}, ["machine  " * 9, LONG], as_json=False)
    first, *others = capsys.readouterr().out.splitlines()
    assert first.split() == ["machine"] * 9
    assert len(others) > 1


def test_a_pipe_gets_text_as_it_is() -> None:
    pipe = Console(width=40, file=io.StringIO())
    assert width_of(pipe) is None
    say(pipe, LONG)
    show(pipe, Text(LONG))
    assert isinstance(pipe.file, io.StringIO)
    assert pipe.file.getvalue() == f"{LONG}\n" * 2


@pytest.mark.parametrize("terminal", [True, False])
def test_only_a_terminal_has_bars(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1" if terminal else "")
    with errors_for_the_reader():
        shared = display_on(Console(stderr=True))
        assert (display_on(Console(stderr=True)) is shared) == terminal
    assert display_on(Console(stderr=True)) is not shared


PROGRAM = "from djl_trtllm.commands.console import errors_of_stdout\nwith errors_of_stdout():\n    "


def ended(code: str, stdout: int, **environ: str) -> tuple[int, str]:
    """Status and standard error of a command that runs this code."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + code],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, **environ},
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


@by_rows("unbuffered", ["", "1"])
@by_rows("code", ["print('it')", "print('it' * 10**6)", "print('it'); raise SystemExit(0)"])
def test_output_that_cannot_be_written_is_one_line_and_status_1(code: str, unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        found = ended(code, full.fileno(), PYTHONUNBUFFERED=unbuffered)
    assert found == (1, "error: cannot write the output: No space left on device\n")


def test_a_pipe_that_nobody_reads_ends_a_command_without_a_word() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as pipe:
        assert ended("print('it')", pipe.fileno(), PYTHONUNBUFFERED="") == (1, "")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full", "a file"), OSError(errno.ECONNRESET, "reset")])
def test_errors_of_anything_else_are_not_taken_for_those_of_the_output(error: OSError) -> None:
    with pytest.raises(OSError, match=error.strerror) as raised, errors_of_stdout():
        raise error
    assert raised.value is error


def test_a_status_stays_where_all_could_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, errors_of_stdout():
        print("it")
        raise SystemExit(3)
    assert (ended.value.code, capsys.readouterr().out) == (3, "it\n")


FLAGS = Path(__file__).with_name("flags.json")


def described(parameter: click.Parameter) -> str:
    """The text that the help of a command shows for a flag. Example: `min=1, default=128`."""
    kind: dict[str, Any] = {**parameter.type.to_info_dict()}
    shown = {name: kind.get(name) for name in ("exists", "file_okay", "min", "max")}
    shown |= {name: getattr(parameter, name, None) for name in ("metavar", "envvar", "rich_help_panel", "multiple")}
    shown["no_help"] = not getattr(parameter, "help", None)
    default = repr(getattr(parameter.default, "value", parameter.default))
    texts = [f"{name}={value}" for name, value in shown.items() if value is not None and value is not False]
    return ", ".join([*texts, f"default={default}"])


def test_flags_with_their_bounds_and_defaults_are_those_that_users_know() -> None:
    """`flags.json` has them; UPDATE_GOLDEN=1 writes it where a change was meant."""
    found: dict[str, dict[str, str]] = {}
    for name in cli.SUMMARIES:
        command = cli.find_command(name)
        for line, each in {name: command, **getattr(command, "commands", {})}.items():
            found[line] = {" ".join([*one.opts, *one.secondary_opts]): described(one) for one in each.params}
    if os.environ.get("UPDATE_GOLDEN"):
        FLAGS.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(FLAGS.read_text())
