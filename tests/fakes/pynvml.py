"""A fake of nvidia-ml-py: as many GPUs as FAKE_GPUS says, whatever CUDA_VISIBLE_DEVICES says."""

from __future__ import annotations

import os
from types import SimpleNamespace

NVML_DEVICE_MIG_ENABLE = 1


class NVMLError(Exception):
    pass


def nvmlInit() -> None:
    """Fails as it does on a machine without a driver where there is no GPU at all."""
    if not nvmlDeviceGetCount():
        raise NVMLError("NVML Shared Library Not Found")


def nvmlShutdown() -> None:
    pass


def nvmlDeviceGetCount() -> int:
    return int(os.environ.get("FAKE_GPUS", "0"))


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetName(handle: int) -> str:
    return os.environ["FAKE_GPU_NAME"]


def nvmlDeviceGetUUID(handle: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{handle:012d}"


def nvmlDeviceGetCudaComputeCapability(handle: int) -> tuple[int, int]:
    major, minor = os.environ["FAKE_GPU_COMPUTE_CAPABILITY"].split(".")
    return int(major), int(minor)


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    total = int(os.environ["FAKE_GPU_MEMORY"])
    return SimpleNamespace(total=total, free=total - total // 100)


def nvmlSystemGetDriverVersion() -> str:
    return os.environ["FAKE_GPU_DRIVER"]


def nvmlDeviceGetMigMode(handle: int) -> tuple[int, int]:
    return (0, 0)
