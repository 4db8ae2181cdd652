"""What this machine has: GPUs, memory, and installed engines."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil
from packaging.version import InvalidVersion, Version

from djl_trtllm.engines.gpu import Gpu, visible_gpus
from djl_trtllm.engines.memory_bound import engine_memory

_CGROUP = Path("/sys/fs/cgroup")
_ENGINE_BACKEND_REMOVED = Version("1.3.0rc21")


@dataclass(frozen=True)
class Hardware:
    """The machine. `gpus` are those that CUDA shows to this process, in CUDA's order.

    `tensorrt_llm` and `tensorrt` are installed versions, `driver` is NVIDIA's. `available_memory` is the host memory
    that this process may still allocate, in bytes. `engine_backend` says whether the installed TensorRT-LLM has the
    files of the engine backend; None if it is not installed or its files cannot be read.
    """

    gpus: tuple[Gpu, ...]
    tensorrt_llm: str | None
    available_memory: int
    driver: str | None = None
    tensorrt: str | None = None
    engine_backend: bool | None = None

    @classmethod
    def probe(cls) -> Hardware:
        """Inspect this machine now, without initialising a GPU. Backends add what is installed (`EngineBackend`)."""
        gpus, driver = visible_gpus(os.environ)
        return cls(gpus=gpus, tensorrt_llm=None, available_memory=available_memory(), driver=driver)

    @property
    def has_engine_backend(self) -> bool:
        """Whether TensorRT-LLM is installed with the backend that builds and runs TensorRT engines.

        Decides by its files, else by its version: 1.3.0rc21 removed the backend. With an unknown version the answer is
        True, so that TensorRT-LLM itself reports the error.
        """
        if self.tensorrt_llm is None:
            return False
        if self.engine_backend is not None:
            return self.engine_backend
        release = release_of(self.tensorrt_llm)
        return release is None or release < _ENGINE_BACKEND_REMOVED


def release_of(version: str | None) -> Version | None:
    """A version without its local part (`1.2.1+cu130` gives 1.2.1); None if it is not a version."""
    try:
        return None if version is None else Version(Version(version).public)
    except InvalidVersion:
        return None


def available_memory(cgroup: Path = _CGROUP, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes of host memory that this process may still allocate: the system's, or less if a control group limits it.

    A bound of the engine process (`memory_bound`) is the most that it gets.

    Reads control groups of version 1 and 2 with all their ancestors, because a container's limit can be set on any of
    them. Page cache that can be dropped is available memory.
    """
    available = int(psutil.virtual_memory().available)
    for directory, limit_file, usage_file, inactive_key in _memory_groups(cgroup, membership):
        limit = _read_bytes(directory / limit_file)
        usage = _read_bytes(directory / usage_file)
        if limit is not None and usage is not None:
            available = min(available, limit - max(0, usage - _statistic(directory, inactive_key)))
    bound = engine_memory()
    return max(0, available if bound is None else min(available, bound))


def _memory_groups(root: Path, membership: Path) -> list[tuple[Path, str, str, str]]:
    groups = []
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []  # not Linux: only the system's figure
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = base / path.lstrip("/")
        # In a container the path is often the host's and does not exist; the root is then the container's group.
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
