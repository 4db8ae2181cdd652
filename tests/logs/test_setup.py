from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
from rich.console import Console

from djl_trtllm.logs import RequestContext, configure, mark_lines
from djl_trtllm.logs.background import BackgroundHandler


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """A root of its own: that of the process has pytest's handlers."""
    made = logging.Logger("root")
    yield made
    for handler in made.handlers:
        handler.close()


def end(root: logging.Logger) -> None:
    for handler in root.handlers:
        handler.close()


def test_lines_of_the_level_and_above_go_to_standard_error(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("warning", root=root)
    root.info("below")
    root.warning("above")
    end(root)
    out, err = capsys.readouterr()
    assert (out, "below" in err) == ("", False)
    assert err.endswith("WARNING root: above\n")


def test_json_is_a_choice(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", json=True, root=root)
    root.info("a\nb")
    end(root)
    assert json.loads(capsys.readouterr().err)["message"] == "a\nb"


def test_a_second_call_replaces_what_the_first_has_set_up(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("info", root=root)
    root.info("first")
    (before,) = root.handlers
    configure("debug", json=True, root=root)
    root.debug("second")
    end(root)
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("INFO root: first")
    assert json.loads(second)["message"] == "second"
    assert len(root.handlers) == 1
    assert isinstance(before, BackgroundHandler)
    assert not before._thread.is_alive()


def test_a_program_that_has_set_up_its_own_log_keeps_it(root: logging.Logger) -> None:
    own = logging.NullHandler()
    root.addHandler(own)
    root.setLevel("ERROR")
    configure("info", root=root)
    assert (root.handlers, root.level) == ([own], logging.ERROR)


def test_on_a_terminal_lines_are_for_people_and_cannot_control_it(
    root: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    console = Console(width=200, record=True, force_terminal=False)
    configure("info", console=console, root=root)
    root.info("model \x1b[2J%s", "x[red]")
    end(root)
    assert "model \\x1b[2Jx[red]" in console.export_text()
    assert isinstance(root.handlers[0], BackgroundHandler)


def test_on_a_terminal_lines_go_to_standard_error_and_name_their_level_once(
    root: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    configure("info", root=root)
    root.warning("above")
    end(root)
    out, err = capsys.readouterr()
    assert (out, err.count("WARNING"), err.count("above")) == ("", 1, 1)


def test_lines_of_another_programs_log_begin_with_the_id_and_cannot_be_forged(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, formatted = logging.StreamHandler(), logging.StreamHandler()
    plain.setFormatter(logging.Formatter("%(message)s"))
    formatted.setFormatter(logging.Formatter("own %(message)s"))
    root.addHandler(plain)
    root.addHandler(formatted)
    mark_lines(root)
    with RequestContext("r-1"):
        root.warning("a\nb")
    assert capsys.readouterr().err == "[r-1] a\n  b\nown a\nb\n"
