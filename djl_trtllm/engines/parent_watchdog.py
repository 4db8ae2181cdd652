"""A subprocess that ends with its parent."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress


def die_with_parent() -> None:
    """Kill this process and what it started when the parent is gone, even when that was killed.

    Standard input is a pipe that only the parent holds: it ends when the parent does.
    """

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 1):
                pass
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
