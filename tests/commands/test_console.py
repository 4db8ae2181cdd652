"""How commands talk."""

from __future__ import annotations

import pytest
import typer

from djl_trtllm.commands.console import errors_for_the_reader, escaped, progress_printer
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


def test_markup_is_escaped() -> None:
    assert escaped("[red]a[0]") == r"\[red]a\[0]"
