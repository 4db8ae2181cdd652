"""The line of what runs now."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from djl_trtllm.status_line import StatusLine


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=200), out


def test_a_log_has_a_line_for_other_work_and_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("djl_trtllm.status_line.time.monotonic", lambda: now[0])
    written, out = console(terminal=False)
    shown = StatusLine(written)
    for work, at, lines in (("a", 100, 1), ("a", 109, 1), ("a", 110, 2), ("b", 111, 3), ("b", 112, 3)):
        now[0] = float(at)
        shown.show(f"line {at} [bold]", work)
        assert len(out.getvalue().splitlines()) == lines
    assert out.getvalue().startswith("line 100 [bold]\n")
    shown.stop()


def test_a_terminal_has_one_line_that_changes() -> None:
    written, out = console(terminal=True)
    shown = StatusLine(written)
    shown.show("first [bold]", 1)
    shown.show("second [bold]", 1)
    shown.stop()
    shown.stop()
    assert "second [bold]" in out.getvalue()
    shown.say("a line [bold]")
    assert "a line [bold]" in out.getvalue()
