"""Garbage collector settings of a serving process."""

from __future__ import annotations

import gc


def settle_garbage_collector() -> None:
    """Freeze what is loaded, and collect little at once: reference counting frees what a token allocates.

    What collecting takes follows from the garbage, and nothing else runs meanwhile: a microsecond for an object. All
    that is alive is looked at after millions of new objects only.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 500, 50)
