"""The garbage collector of a process that serves."""

from __future__ import annotations

import gc


def settle_garbage_collector() -> None:
    """What is loaded stays, and what a token allocates is freed by reference counts: collect seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
