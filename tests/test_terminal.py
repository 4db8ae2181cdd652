"""Progress of work that takes long, on a terminal and in a log; and columns of text for terminals and pipes."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace
from typing import cast

import pytest
from filelock import FileLock, Timeout
from rich.console import Console

from djl_trtllm import progress
from djl_trtllm.listing import Listing, columns, wrapped
from djl_trtllm.progress import (
    ProgressMeter,
    TerminalDisplay,
    acquire,
    batch_progress,
    display_on,
    format_bytes,
    shown_on,
    under_way,
)
from tests.support.processes import wait_until
from tests.support.tables import by_table


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Set `clock.now`."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=200, color_system=None), out


def test_a_log_has_a_line_for_another_phase_and_every_ten_seconds(clock: SimpleNamespace) -> None:
    written, out = console(terminal=False)
    display = display_on(written)
    for phase, at, lines in (("a", 0, 1), ("a", 9, 1), ("a", 10, 2), ("b", 11, 3), ("b", 12, 3), ("b", 21, 4)):
        clock.now = 1000.0 + at
        display.show("it", f"line {at} [bold]", phase=phase)
        assert len(out.getvalue().splitlines()) == lines
    display.show("other", "it has no phase")
    assert out.getvalue().startswith("line 0 [bold]\n") and "no phase" not in out.getvalue()
    display.end("it")
    display.end("it")
    display.show("it", "again", phase="b")
    display.say("the end [x]")
    assert out.getvalue().endswith("again\nthe end [x]\n")


def test_a_terminal_has_a_line_for_each_work_while_it_runs() -> None:
    written, out = console(terminal=True)
    display = display_on(written)
    display.show("a", "first [bold]")
    wait_until(lambda: "first [bold]" in out.getvalue())
    assert "━" not in out.getvalue(), "work without a total has no bar"
    display.show("a", "second [bold]", done=1, total=2)
    wait_until(lambda: "second [bold] ━━━" in out.getvalue())
    display.show("b", "beside it")
    display.say("a line [bold]")
    display.end("a")
    display.end("b")
    display.end("b")
    before = out.getvalue()
    assert all(text in before for text in ("beside it", "a line [bold]"))
    display.show("c", "later")
    display.end("c")
    assert "later" in out.getvalue()


def test_a_command_has_one_display_on_a_terminal() -> None:
    written, _ = console(terminal=True)
    display = TerminalDisplay(written)
    with shown_on(display):
        assert display_on(written) is display
        assert display_on(console(terminal=False)[0]) is not display
    assert display_on(written) is not display


def test_work_without_a_size_has_its_duration_on_a_terminal(clock: SimpleNamespace) -> None:
    written, out = console(terminal=True)
    with shown_on(TerminalDisplay(written)), under_way("compiling"):
        clock.now += 7
        wait_until(lambda: "compiling, 7 s" in out.getvalue())
    with under_way("compiling"):
        pass


def test_a_meter_shows_a_bar_on_a_terminal_and_ends_it_with_an_error_too() -> None:
    written, out = console(terminal=True)
    lines: list[str] = []
    with shown_on(TerminalDisplay(written)):
        with ProgressMeter("downloading [x]", 4_000_000, lines.append) as meter:
            meter.add(1_000_000)
            meter.add(3_000_000)
        with pytest.raises(ValueError), ProgressMeter("broken", 10, lines.append):
            raise ValueError
    assert "downloading [x]: 4.0 MB of 4.0 MB" in out.getvalue()
    assert [line.split(" in ")[0] for line in lines] == ["downloading [x]: 4.0 MB"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_batch_shows_its_prompts_and_tokens_each_second(
    terminal: bool, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_TICK_SECONDS", 0.01)
    tokens = [100]
    written, out = console(terminal)
    with batch_progress(5, lambda: tokens[0], written) as advance:
        advance()
        tokens[0] = 10_100
        clock.now += 10
        wait_until(lambda: "1 of 5 prompts, 1,000 tokens/s" in out.getvalue())
    quiet, out = console(terminal=False)
    with batch_progress(5, lambda: 9, quiet):
        pass
    assert out.getvalue() == ""


def test_several_threads_may_show_the_same_work() -> None:
    written, out = console(terminal=True)
    display = TerminalDisplay(written)
    threads = [threading.Thread(target=display.show, args=("it", f"line {number}")) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    display.end("it")
    assert "line " in out.getvalue()


@pytest.mark.parametrize(
    ("total", "added", "said"),
    [
        (
            100_000_000,
            ((9.9, 10_000_000), (10.0, 10_000_000), (19.9, 0), (20.0, 20_000_000), (30.0, 0)),
            ["20.0 MB of 100.0 MB, 2.0 MB/s, 40 s left"] + ["40.0 MB of 100.0 MB, 2.0 MB/s, 30 s left"] * 2,
        ),
        (
            1_000_000,
            ((11, 110_000), (22, 0), (33, 0), (44, 0)),
            ["110.0 kB of 1.0 MB, 10.0 kB/s, 89 s left"] + ["110.0 kB of 1.0 MB, 0 bytes/s"] * 3,
        ),
        (1000, ((0, 500), (1, -200), (10, 0)), ["300 bytes of 1.0 kB, 30 bytes/s, 23 s left"]),
    ],
    ids=["every ten seconds", "the rate is that of the last ten to twenty seconds", "pieces fetched again"],
)
def test_a_meter_tells_the_amount_the_rate_and_the_time_left(
    clock: SimpleNamespace, total: int, added: tuple[tuple[float, int], ...], said: list[str]
) -> None:
    lines: list[str] = []
    meter = ProgressMeter("it", total, lines.append)
    for seconds, count in added:
        clock.now = 1000.0 + seconds
        meter.add(count)
    assert lines == [f"it: {line}" for line in said]


@pytest.mark.parametrize(("seconds", "line"), [(0, "1.0 kB in 0.0 s (1.0 MB/s)"), (2, "1.0 kB in 2.0 s (500 bytes/s)")])
def test_the_end_is_reported_with_the_time_it_took(seconds: int, line: str, clock: SimpleNamespace) -> None:
    lines: list[str] = []
    with ProgressMeter("it", 1000, lines.append) as meter:
        meter.add(1000)
        clock.now += seconds
    assert lines == [f"it: {line}"]


@by_table("count", "text")  # fmt: skip
def test_bytes_are_shown_in_powers_of_a_thousand(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_the_second_report_of_a_wait_comes_after_ten_seconds_more() -> None:
    waits: list[float] = []

    class Lock:
        def acquire(self, timeout: float) -> str:
            waits.append(timeout)
            if len(waits) < 4:
                raise Timeout("lock")
            return "held"

    reports: list[float] = []
    held: object = acquire(cast(FileLock, Lock()), reports.append)
    assert (held, waits, len(reports)) == ("held", [0.5, 10.0, 10.0, 10.0], 3)


def test_without_a_width_text_stays_as_it_is() -> None:
    assert wrapped("a  b\n" + "x " * 100, None) == "a  b\n" + "x " * 100


def test_lines_are_wrapped_between_words_and_words_stay_whole() -> None:
    assert wrapped("one two three four", 9, indent="  ") == "one two\n  three\n  four"
    assert wrapped("a/very-long/path-that-stays whole", 8) == "a/very-long/path-that-stays\nwhole"


def test_lines_of_the_text_stay_lines_and_bullets_hang() -> None:
    text = "expected:\n  - one of these\n\nend"
    assert wrapped(text, 12) == "expected:\n  - one of\n    these\n\nend"


def test_details_are_a_column_and_empty_ones_left_out() -> None:
    listing = Listing("title", 20)
    listing.space()
    listing.item("key = value", {"from": "here", "effect": "some words that go on", "other": ""})
    listing.item("next = 1", {}, dim=True)
    assert [str(span.style) for span in listing.text.spans] == ["bold", "dim"]
    assert listing.text.plain.splitlines() == [
        "title",
        "",
        "key = value",
        "  from    here",
        "  effect  some words",
        "          that go on",
        "next = 1",
    ]


def test_cells_are_aligned_and_lines_have_no_space_at_their_end() -> None:
    rows = [("name", "GiB", ""), ("a", "10.5", "note"), ("long name", "1.5", "")]
    assert columns(rows, right=(1,)) == ["name        GiB", "a          10.5  note", "long name   1.5"]
    assert columns([]) == []
