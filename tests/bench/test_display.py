from __future__ import annotations

import io

import pytest
from rich.console import Console

from djl_trtllm.bench.display import Display, describe
from djl_trtllm.bench.load import Load, Progress
from tests.bench.test_report import figures


def progress(load: Load | None = None) -> Progress:
    return Progress(load or Load(concurrency=3), figures(3, 10, failed=2), 3, 1234.5, 2.4, "measuring")


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=200), out


def test_the_line_has_what_runs_now() -> None:
    expected = "3 clients: measuring 2 s, 3 in flight, 1 done, 1,234 tok/s, TTFT p50 250 ms, 2 failed"
    assert describe(progress()) == expected


def test_a_log_has_a_line_for_each_load_and_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("djl_trtllm.bench.display.time.monotonic", lambda: now[0])
    written, out = console(terminal=False)
    shown = Display(written)
    first, second = progress(), progress(Load(concurrency=4))
    for each, at, lines in ((first, 100, 1), (first, 109, 1), (first, 110, 2), (second, 111, 3), (second, 112, 3)):
        now[0] = float(at)
        shown.show(each)
        assert len(out.getvalue().splitlines()) == lines
    shown.stop()


def test_a_terminal_has_one_line_that_changes() -> None:
    written, out = console(terminal=True)
    shown = Display(written)
    shown.show(progress())
    shown.show(progress())
    shown.stop()
    shown.stop()
    assert "3 in flight" in out.getvalue()
    shown.say("a line [bold]")
    assert "a line [bold]" in out.getvalue()
