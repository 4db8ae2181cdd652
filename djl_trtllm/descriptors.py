"""File descriptors of this process: every connection takes one."""

from __future__ import annotations

import resource


def raise_limit(needed: int) -> int:
    """Let this process have that many, as far as it may. Returns how many it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # No higher than needed: some libraries close every possible descriptor when they start a process.
    if soft < needed and soft < hard:
        soft = min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft
