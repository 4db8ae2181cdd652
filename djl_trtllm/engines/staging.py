"""Directories that appear complete or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from djl_trtllm.model.work_directory import marked

_SUFFIX = ".partial"


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Yield an empty directory beside `out`, which is renamed to it after the block, or removed if the block raises.

    A process killed inside the block leaves only the hidden directory; `sweep(out)` removes it. Raises OSError, also
    if `out` exists by then and is not empty.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.parent / f".{out.name}.{os.getpid()}.{secrets.token_hex(4)}{_SUFFIX}"
    partial.mkdir()
    try:
        with marked(partial):
            yield partial
            partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def sweep(out: Path) -> list[Path]:
    """Remove what killed builders of `out` left behind, and return it. Call only while `out` is locked for builders."""
    left = sorted(out.parent.glob(f".{out.name}.*{_SUFFIX}"))
    for partial in left:
        shutil.rmtree(partial, ignore_errors=True)
    return left
