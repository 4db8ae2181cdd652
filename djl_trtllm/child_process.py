"""What every process does that another one of this package has started."""

from __future__ import annotations

import ctypes
import resource
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def leave_end_to_parent() -> None:
    """Let the parent decide when this process ends, and on Linux end it with the parent."""
    # Ctrl-C in a terminal reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        # A process that hangs does not see its socket close.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def write_no_core_file() -> None:
    """For a process that may crash by its input: a core file takes as much disk as the process has memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def allow_more_memory(bytes_more: int) -> None:
    """Bound this process's address space to what it has now and this; allocations beyond fail."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + bytes_more, used + bytes_more))
