"""End a subprocess together with its parent."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress


def die_with_parent() -> None:
    """Kill this process and its children when the parent ends, even if the parent was killed.

    Standard input is a pipe that only the parent holds, so it reaches end of file when the parent ends.
    """

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 1):
                pass
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
