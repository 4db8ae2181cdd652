"""What a measurement shows while it runs."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
from rich.console import Console

from djl_trtllm.finder.display import Display
from djl_trtllm.finder.load import Load
from djl_trtllm.finder.measure import Finder, Settings, Step
from djl_trtllm.finder.state import Attempt
from djl_trtllm.finder.subject import open_subject
from djl_trtllm.finder.trial import Report
from tests.finder.helpers import Played, model_with


def shown(terminal: bool = False) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=terminal, width=200), text


def test_a_log_has_what_is_done_trial_by_trial(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model")
    console, text = shown()
    with Display(console) as display:
        subject = open_subject(str(model), {"tensor_parallel_degree": 4}, Load())
        Finder(subject, Settings(memory=5 * 10**9, precision=0.9), display, Played(24_000)).measure()
    lines = text.getvalue().splitlines()
    assert lines[0] == (
        f"measuring {model} on scripted: max_num_tokens up to 1,048,576, at most 5 trials, each with 128 requests of "
        "3,700 tokens at a time"
    )
    assert lines[1].startswith("note: option.tensor_parallel_degree=4")
    assert lines[2] == "the engine process may have 5.00 GB of memory"
    assert lines[3].startswith("trial 1 of at most 5, max_num_tokens ") and lines[3].endswith(": starting, 0 s")
    assert lines[4].endswith(": building the engine, 0 s")
    assert lines[5].endswith(": loading the engine, 0 s")
    assert lines[6].endswith(": answering 128 requests of 3,700 tokens, 0 s")
    assert lines[7].startswith("max_num_tokens ") and lines[7].endswith(" (0.2 s)")
    assert any(" fits, " in line and " does not): " in line for line in lines)
    assert any(": out of memory while answering requests: std::bad_alloc (" in line for line in lines)


def test_a_known_result_is_said_to_be_one(tmp_path: Path) -> None:
    subject = open_subject(str(model_with(tmp_path / "model")), {}, Load())
    console, text = shown()
    Finder(subject, Settings(precision=0.9), run=Played(24_000)).measure()
    Finder(subject, Settings(precision=0.9), Display(console), Played(24_000)).measure()
    assert text.getvalue().splitlines()[1] == (
        "trials of an earlier run that are known: 4, that is the result; --fresh forgets them"
    )


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("djl_trtllm.finder.display.time.monotonic", lambda: now)
    console, text = shown()
    display = Display(console)
    display.trial(Step(2, 9, 1000, (500, None)))
    display.report(Report("load"))
    for _ in range(25):
        now += 1
        display.report(None)
    lines = text.getvalue().splitlines()
    head = "trial 2 of at most 9, max_num_tokens 1,000 (500 fits)"
    assert lines == [
        f"{head}: starting, 0 s",
        f"{head}: loading the engine, 0 s",
        f"{head}: loading the engine, 10 s",
        f"{head}: loading the engine, 20 s",
    ]


def test_a_terminal_has_one_line_that_changes() -> None:
    console, text = shown(terminal=True)
    with Display(console) as display:
        display.trial(Step(1, 9, 1000, (None, 2000)))
        display.report(Report("load", error="no"))
        display.ended(Attempt(1000, False, "load", "[CPU] no room", 3.0))
        display.stop()
    assert "trial 1 of at most 9" in text.getvalue()
    assert "max_num_tokens 1,000: out of memory while loading the engine: [CPU] no room (3.0 s)" in text.getvalue()


def test_downloads_are_shown_while_it_is_open() -> None:
    logger = logging.getLogger("djl_trtllm.service.model")
    before, logger.level = logger.level, logging.NOTSET
    try:
        console, text = shown()
        with Display(console):
            logger.info("fetching %s", "acme/model")
        logger.setLevel(logging.INFO)
        logger.info("later")
        logger.setLevel(logging.NOTSET)
        assert text.getvalue() == "fetching acme/model\n"
        assert logger.level == logging.NOTSET
    finally:
        logger.setLevel(before)


@pytest.mark.parametrize(
    ("bracket", "shown_as"),
    [
        ((None, None), ""),
        ((5000, None), " (5,000 fits)"),
        ((None, 9000), " (9,000 does not)"),
        ((5000, 9000), " (5,000 fits, 9,000 does not)"),
    ],
)
def test_a_trial_says_what_is_known_so_far(bracket: tuple[int | None, int | None], shown_as: str) -> None:
    console, text = shown()
    Display(console).trial(Step(2, 9, 7000, bracket))
    assert text.getvalue() == f"trial 2 of at most 9, max_num_tokens 7,000{shown_as}: starting, 0 s\n"


def test_the_end_of_a_phase_is_not_its_beginning() -> None:
    console, text = shown()
    display = Display(console)
    display.report(Report("load", done=True))
    display.report(Report("load", error="no"))
    assert text.getvalue() == ""
