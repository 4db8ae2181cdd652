from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from filelock import FileLock, Timeout

from djl_trtllm.model.remote import progress as progress_module
from djl_trtllm.model.remote.progress import ProgressMeter, acquire, format_bytes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Set `clock.now`."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_it_tells_every_five_seconds_how_far_how_fast_and_how_long_still(clock: SimpleNamespace) -> None:
    lines: list[str] = []
    progress = ProgressMeter("downloading it", 100_000_000, lines.append)
    for seconds, told in ((4.9, 0), (5.0, 1), (9.9, 1), (10.0, 2), (15.0, 3)):
        clock.now = 1000.0 + seconds
        progress.add(10_000_000)
        assert len(lines) == told
    assert lines[0] == "downloading it: 20.0 MB of 100.0 MB, 4.0 MB/s, 20 s left"
    assert lines[1] == "downloading it: 40.0 MB of 100.0 MB, 4.0 MB/s, 15 s left"
    assert progress.done == 50_000_000


def test_the_rate_is_that_of_the_last_seconds(clock: SimpleNamespace) -> None:
    lines: list[str] = []
    progress = ProgressMeter("it", 10_000_000, lines.append)
    for count in (1_000_000, 1_000_000, 1_000_000, 50_000):
        clock.now += 5
        progress.add(count)
    # A window of ten seconds is left when it is over: the one after it begins at the third line.
    assert lines[2].split(", ")[1:] == ["200.0 kB/s", "35 s left"]
    assert lines[3].split(", ")[1:] == ["10.0 kB/s", "695 s left"]


def test_a_window_ends_after_ten_seconds_and_not_before(clock: SimpleNamespace) -> None:
    lines: list[str] = []
    progress = ProgressMeter("it", 10_000_000, lines.append)
    for count in (1_000_000, 0, 0):
        clock.now += 5
        progress.add(count)
    # Fifteen seconds are the first look beyond ten: this line's rate is that of all of it.
    assert [line.split(", ")[1] for line in lines] == ["200.0 kB/s", "100.0 kB/s", "66.7 kB/s"]


def test_a_slow_download_is_reported_how_long_it_takes(clock: SimpleNamespace) -> None:
    lines: list[str] = []
    progress = ProgressMeter("it", 1000, lines.append)
    clock.now += 10
    progress.add(5)
    assert lines == ["it: 5 bytes of 1.0 kB, 0 bytes/s, 1990 s left"]


def test_a_clock_that_stands_still_is_no_matter(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(progress_module, "_REPORT_EVERY_SECONDS", 0.0)
    ProgressMeter("it", 2000, lines.append).add(1000)
    assert lines == ["it: 1.0 kB of 2.0 kB, 1.0 MB/s, 0 s left"]


def test_where_nothing_arrives_nobody_knows_how_long_it_takes(clock: SimpleNamespace) -> None:
    lines: list[str] = []
    progress = ProgressMeter("it", 1000, lines.append)
    clock.now += 5
    progress.add(0)
    assert lines == ["it: 0 bytes of 1.0 kB, 0 bytes/s"]


def test_what_has_to_be_fetched_again_counts_back(clock: SimpleNamespace) -> None:
    lines: list[str] = []
    progress = ProgressMeter("it", 1000, lines.append)
    progress.add(500)
    progress.add(-200)
    assert (progress.done, lines) == (300, [])


def test_the_end_is_reported_with_the_time_it_took(clock: SimpleNamespace) -> None:
    lines: list[str] = []
    progress = ProgressMeter("it", 1000, lines.append)
    progress.add(1000)
    progress.finish()
    clock.now += 2
    progress.finish()
    assert lines == ["it: 1.0 kB in 0.0 s (1.0 MB/s)", "it: 1.0 kB in 2.0 s (500 bytes/s)"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"), (999, "999 bytes"), (0.4, "0 bytes"), (1000, "1.0 kB"), (999_949, "999.9 kB"),
        (1_000_000, "1.0 MB"), (1_500_000_000, "1.5 GB"), (2_000_000_000_000, "2000.0 GB"),
    ],
)  # fmt: skip
def test_bytes_are_shown_in_powers_of_a_thousand(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_the_second_report_of_a_wait_comes_after_ten_seconds_more(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Lock:
        def acquire(self, timeout: float) -> str:
            waits.append(timeout)
            if len(waits) < 4:
                raise Timeout("lock")
            return "held"

    reports: list[float] = []
    held: object = acquire(cast(FileLock, Lock()), reports.append)
    assert held == "held"
    assert waits == [0.5, 10.0, 10.0, 10.0]
    assert len(reports) == 3
