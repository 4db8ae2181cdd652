"""A fake of nvidia-ml-py: as many GPUs as FAKE_GPUS says, whatever CUDA_VISIBLE_DEVICES says."""

from __future__ import annotations

import os
from dataclasses import dataclass

NVML_SUCCESS = 0
NVML_ERROR_UNINITIALIZED = 1
NVML_ERROR_INVALID_ARGUMENT = 2
NVML_ERROR_LIBRARY_NOT_FOUND = 12

_MESSAGES = {1: "Uninitialized", 2: "Invalid Argument", 12: "NVML Shared Library Not Found"}


class NVMLError(Exception):
    """`value` is NVML's number."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return _MESSAGES.get(self.value, f"NVML Error with code {self.value}")


class NVMLError_LibraryNotFound(NVMLError):
    pass


class NVMLError_Uninitialized(NVMLError):
    pass


class NVMLError_InvalidArgument(NVMLError):
    pass


@dataclass(frozen=True)
class c_nvmlDevice_t:
    """A handle."""

    index: int


@dataclass
class c_nvmlMemory_t:
    """Bytes."""

    total: int
    free: int
    used: int


_initialised = 0


def _count() -> int:
    return int(os.environ.get("FAKE_GPUS", "0"))


def _check() -> None:
    if not _initialised:
        raise NVMLError_Uninitialized(NVML_ERROR_UNINITIALIZED)


def nvmlInit() -> None:
    """Fails as it does on a machine without a driver where there is no GPU at all."""
    global _initialised
    if not _count():
        raise NVMLError_LibraryNotFound(NVML_ERROR_LIBRARY_NOT_FOUND)
    _initialised += 1


def nvmlShutdown() -> None:
    global _initialised
    _check()
    _initialised -= 1


def nvmlDeviceGetCount() -> int:
    _check()
    return _count()


def nvmlDeviceGetHandleByIndex(index: int) -> c_nvmlDevice_t:
    _check()
    if not 0 <= index < _count():
        raise NVMLError_InvalidArgument(NVML_ERROR_INVALID_ARGUMENT)
    return c_nvmlDevice_t(index)


def nvmlDeviceGetHandleByUUID(uuid: str | bytes) -> c_nvmlDevice_t:
    _check()
    wanted = uuid.decode() if isinstance(uuid, bytes) else uuid
    for index in range(_count()):
        if nvmlDeviceGetUUID(c_nvmlDevice_t(index)) == wanted:
            return c_nvmlDevice_t(index)
    raise NVMLError_InvalidArgument(NVML_ERROR_INVALID_ARGUMENT)


def nvmlDeviceGetName(handle: c_nvmlDevice_t) -> str:
    _check()
    return os.environ["FAKE_GPU_NAME"]


def nvmlDeviceGetUUID(handle: c_nvmlDevice_t) -> str:
    _check()
    return f"GPU-00000000-0000-0000-0000-{handle.index:012d}"


def nvmlDeviceGetCudaComputeCapability(handle: c_nvmlDevice_t) -> tuple[int, int]:
    _check()
    major, minor = os.environ["FAKE_GPU_COMPUTE_CAPABILITY"].split(".")
    return int(major), int(minor)


def nvmlDeviceGetMemoryInfo(handle: c_nvmlDevice_t) -> c_nvmlMemory_t:
    _check()
    total = int(os.environ["FAKE_GPU_MEMORY"])
    used = total // 100
    return c_nvmlMemory_t(total, total - used, used)


def nvmlSystemGetDriverVersion() -> str:
    _check()
    return os.environ["FAKE_GPU_DRIVER"]


def nvmlSystemGetCudaDriverVersion() -> int:
    _check()
    return 13000


NVML_DEVICE_MIG_ENABLE = 1


def nvmlDeviceGetMigMode(handle: c_nvmlDevice_t) -> tuple[int, int]:
    return (0, 0)
