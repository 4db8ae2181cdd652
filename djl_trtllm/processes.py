"""Helpers for the processes that this package starts: their end, their bounds, compilers below them, descriptors."""

import contextlib
import ctypes
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_LOOK_SECONDS = 0.5
_COMPILERS = frozenset({"nvcc", "cicc", "ptxas", "ninja", "cc1plus"})
"""Programs that FlashInfer, DeepGEMM, Triton and torch start to compile kernels."""


def leave_end_to_parent() -> None:
    """Let the parent decide when this process ends, and on Linux end it with the parent."""
    # Ctrl-C in a terminal reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        # A process that hangs does not see its socket close.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def write_no_core_file() -> None:
    """Turn core files off for a process that its input may crash: each takes as much disk as the process has memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def allow_more_memory(bytes_more: int) -> None:
    """Bound this process's address space to its present size plus `bytes_more`; allocations beyond fail."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + bytes_more, used + bytes_more))


def allow_more_processor_time(seconds: int) -> None:
    """Bound this process's processor time to what it has used plus `seconds`; SIGXCPU ends it then."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(time.process_time()) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def processor_seconds(pid: int) -> float:
    """The processor time that another process has had; 0 if it has ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


CGROUP = Path("/sys/fs/cgroup")
"""Where Linux shows the control groups of processes."""
MEMBERSHIP = Path("/proc/self/cgroup")
VMSTAT = Path("/proc/vmstat")


def control_groups() -> list[tuple[list[str], str]]:
    """Controllers and path of each control group of this process, those of version 2 with the controller ""."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return []  # not Linux
    groups = (line.split(":", 2) for line in lines)
    return [(controllers.split(","), path.lstrip("/")) for _, controllers, path in groups]


def oom_kills() -> int:
    """How many processes the OOM killer has ended, in this control group or else on this machine.

    Only the difference between two calls has a meaning. The count is 0 where the kernel does not report it.
    """
    paths = [path for controllers, path in control_groups() if controllers == [""]]
    # In a container the path is often the host's, and the root is the container's group.
    events = [folder / "memory.events" for path in paths for folder in (CGROUP / path, CGROUP)]
    for file in (*events, VMSTAT):
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition(" ")
            if key == "oom_kill" and value.strip().isdigit():
                return int(value)
    return 0


def be_nice(pid: int, niceness: int) -> None:
    """Lower the priority of a process. On Linux each thread has its own; new ones have their creator's."""
    with contextlib.suppress(psutil.Error, OSError):
        for thread in psutil.Process(pid).threads():
            os.setpriority(os.PRIO_PROCESS, thread.id, niceness)


def compiler_below() -> str | None:
    """Return a compiler of kernels that runs below this process, as `nvcc (process 123)`; None if there is none."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.name() in _COMPILERS and process.status() != psutil.STATUS_ZOMBIE:
                return f"{process.name()} (process {process.pid})"
    return None


def raise_limit(needed: int) -> int:
    """Raise the limit of file descriptors to `needed`, as far as the hard limit allows. Returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # No higher than needed: some libraries close every possible descriptor when they start a process.
    if soft < needed and soft < hard:
        soft = min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def child_environment() -> dict[str, str]:
    """The environment of a Python process that imports this package, and nothing from its working directory."""
    inherited = os.environ.get("PYTHONPATH")
    root = str(Path(__file__).resolve().parents[1])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, inherited] if inherited else [root]),
        # The working directory may be a model's, whose files may have the names of modules.
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }


def end_group(process: subprocess.Popen[bytes], seconds: float) -> None:
    """End the group of processes that a process leads: SIGTERM, and SIGKILL for what is left when the leader ends.

    SIGKILL comes after `seconds` if the leader does not end.
    """
    gone = contextlib.suppress(ProcessLookupError, PermissionError)
    try:
        if process.poll() is None:
            with gone:
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
    finally:
        # Also where a second Ctrl-C ends the wait.
        with gone:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Processes below this one whose parent has ended stay below it, on Linux. They are reaped when all end."""
    if sys.platform != "linux":
        yield
        return
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0)


def below() -> set[psutil.Process]:
    """Return the processes below this one."""
    return set(psutil.Process().children(recursive=True))


def kill_below(spared: set[psutil.Process], seconds: float) -> list[str]:
    """Kill all processes below this one except `spared`, also those that they start meanwhile; return their names.

    It gives up after `seconds`.
    """
    killed: dict[psutil.Process, str] = {}
    deadline = time.monotonic() + seconds
    while (left := below() - spared) and time.monotonic() < deadline:
        # All names first: the kernel kills some of Ray's processes with the one that has started them.
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    title = (process.cmdline() or [process.name()])[0]
                    killed.setdefault(process, f"{Path(title).name} ({process.pid})")
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, _LOOK_SECONDS)
    return list(killed.values())
