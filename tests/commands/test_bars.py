from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from djl_trtllm.commands.bars import Bars, bars_on
from djl_trtllm.model.remote import progress
from djl_trtllm.model.remote.progress import ProgressMeter, under_way


def terminal() -> Console:
    return Console(width=200, file=io.StringIO(), force_terminal=True, color_system=None)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_work_with_a_size_has_a_bar_with_bytes_and_one_line_at_its_end() -> None:
    console, lines = terminal(), list[str]()
    with bars_on(console), ProgressMeter("downloading [x]", 4_000_000, lines.append) as meter:
        meter.add(1_000_000)
        meter.add(3_000_000)
    shown = written(console)
    assert "downloading [x]" in shown
    assert "/4.0 MB" in shown
    assert len(lines) == 1
    assert lines[0].startswith("downloading [x]: 4.0 MB in ")


def test_work_without_a_size_has_no_bytes() -> None:
    console = terminal()
    with bars_on(console), under_way("compiling"):
        pass
    assert "compiling" in written(console)
    assert "bytes" not in written(console)


def test_an_error_ends_the_bar_and_has_no_line_about_the_whole() -> None:
    console, lines = terminal(), list[str]()
    with bars_on(console), pytest.raises(ValueError), ProgressMeter("it", 10, lines.append) as meter:
        meter.add(1)
        raise ValueError
    assert lines == []
    assert progress._displays == []


def test_several_threads_may_show_the_same_work() -> None:
    console = terminal()
    bars = Bars(console)
    threads = [threading.Thread(target=bars.show, args=("it", number, 100)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bars.end("it")
    bars.end("it")
    assert bars._progress.finished
