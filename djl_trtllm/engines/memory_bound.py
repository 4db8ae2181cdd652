"""A bound on the memory of an engine process, as a machine with less memory has it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "DJL_TRTLLM_ENGINE_MEMORY"
"""Bytes of data that an engine process may have: heap, buffers and stacks, no mapped files (RLIMIT_DATA)."""


def engine_memory() -> int | None:
    """The bound of engine processes that this process starts; None if there is none."""
    text = os.environ.get(VARIABLE, "")
    return int(text) if text.isdecimal() else None


def apply_bound() -> None:
    """Bound this process: an allocation beyond fails, as it does where there is no more memory."""
    if (bound := engine_memory()) is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))


@contextmanager
def bounded(memory: int | None) -> Iterator[None]:
    """Engine processes that are started inside have this bound; None: none that they do not have already."""
    if memory is None:
        yield
        return
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(memory)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
