"""What the kernel's OOM killer did."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_VMSTAT = Path("/proc/vmstat")


def oom_kills(cgroup: Path = _CGROUP, vmstat: Path = _VMSTAT, membership: Path = Path("/proc/self/cgroup")) -> int:
    """How many processes the OOM killer has ended, in this control group or else on this machine.

    Only the difference between two calls says something. 0 where the kernel does not say.
    """
    for file in (*_events(cgroup, membership), vmstat):
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition(" ")
            if key == "oom_kill" and value.strip().isdigit():
                return int(value)
    return 0


def _events(cgroup: Path, membership: Path) -> list[Path]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    paths = (line.split(":", 2)[2] for line in lines if line.startswith("0::"))
    # In a container the path is often the host's, and the root is the container's group.
    return [folder / "memory.events" for path in paths for folder in (cgroup / path.lstrip("/"), cgroup)]
