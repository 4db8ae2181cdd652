"""Garbage collector settings of a serving process."""

from __future__ import annotations

import gc


def settle_garbage_collector() -> None:
    """Freeze what is loaded and collect seldom: reference counting frees what a token allocates."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
