"""`djl-trtllm` that counts its asyncio tasks on SIGUSR1: `python -m ... observed COUNT_FILE serve ...`."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from types import FrameType


def count_tasks(_: int, __: FrameType | None) -> None:
    """Write the number of tasks, in one piece."""
    part = COUNT_FILE.with_suffix(".part")
    part.write_text(str(len(asyncio.all_tasks())))
    part.rename(COUNT_FILE)


if __name__ == "__main__":
    from djl_trtllm.cli import main

    COUNT_FILE = Path(sys.argv.pop(1))
    signal.signal(signal.SIGUSR1, count_tasks)
    main()
