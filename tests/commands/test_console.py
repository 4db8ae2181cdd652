"""How commands talk."""

from __future__ import annotations

import io

import pytest
import typer
from rich.console import Console
from rich.text import Text

from djl_trtllm.commands.console import errors_for_the_reader, progress_printer, say, show, width_of
from djl_trtllm.errors import ModelError

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


def test_a_pipe_gets_text_as_it_is() -> None:
    pipe = Console(width=40, file=io.StringIO())
    assert width_of(pipe) is None
    say(pipe, LONG)
    show(pipe, Text(LONG))
    assert isinstance(pipe.file, io.StringIO)
    assert pipe.file.getvalue() == f"{LONG}\n" * 2
