"""What this machine offers an engine: GPUs, TensorRT-LLM, memory."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_GPU_FILES = Path("/proc/driver/nvidia/gpus")
_GPU_DEVICE = Path("/dev/nvidiactl")


@dataclass(frozen=True)
class Hardware:
    """`available_memory` in bytes (host memory this process may still take); `tensorrt_llm` the installed version."""

    gpus: int
    tensorrt_llm: str | None
    available_memory: int

    @classmethod
    def probe(cls) -> Hardware:
        """Look at this machine now. Nothing is imported and no GPU is initialised."""
        return cls(gpus=_count_gpus(), tensorrt_llm=_tensorrt_llm_version(), available_memory=available_memory())


def available_memory(cgroup: Path = _CGROUP, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes of host memory this process may still take: the system's, or less where its control group has a limit.

    Reads control groups of version 1 and 2, each with its ancestors, because the limit of a container may stand on any
    of them. Page cache that can be dropped counts as available.
    """
    available = int(psutil.virtual_memory().available)
    for directory, limit_file, usage_file, inactive_key in _memory_groups(cgroup, membership):
        limit = _read_bytes(directory / limit_file)
        usage = _read_bytes(directory / usage_file)
        if limit is not None and usage is not None:
            available = min(available, limit - max(0, usage - _statistic(directory, inactive_key)))
    return max(0, available)


def _memory_groups(root: Path, membership: Path) -> list[tuple[Path, str, str, str]]:
    groups = []
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []  # not Linux: the system's figure stands alone
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = base / path.lstrip("/")
        # Inside a container the path is often the host's and does not exist; its root is then the container's group.
        for directory in dict.fromkeys((own, *own.parents)):
            if directory == base or base in directory.parents:
                groups.append((directory, *names))
    return groups


def _read_bytes(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit


def _statistic(directory: Path, key: str) -> int:
    try:
        lines = (directory / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), 0)


def _count_gpus() -> int:
    try:
        return len(list(_GPU_FILES.iterdir()))
    except OSError:
        # Containers may show the devices and hide the driver's /proc tree.
        return 1 if _GPU_DEVICE.exists() else 0


def _tensorrt_llm_version() -> str | None:
    if importlib.util.find_spec("tensorrt_llm") is None:
        return None
    try:
        return importlib.metadata.version("tensorrt-llm")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
