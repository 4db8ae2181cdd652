"""How far a batch is."""

from __future__ import annotations

import io

from rich.console import Console

from djl_trtllm.offline.progress import batch_progress
from tests.support.waiting import wait_until


def test_a_log_gets_a_line_now_and_then() -> None:
    written = io.StringIO()
    with batch_progress(5, lambda: 9, Console(file=written), log_seconds=0.01) as advance:
        advance()
        wait_until(lambda: "1 of 5 prompts" in written.getvalue())
    with batch_progress(5, lambda: 9, Console(file=(quiet := io.StringIO()))):
        pass
    assert quiet.getvalue() == ""


def test_a_terminal_gets_a_bar() -> None:
    written = io.StringIO()
    with batch_progress(5, lambda: 9, Console(file=written, force_terminal=True, width=100)) as advance:
        advance()
    assert "1/5" in written.getvalue()
    assert "tokens/s" in written.getvalue()
