"""The NVIDIA GPUs that this process may use, as CUDA will number them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DRIVER_FILES = Path("/proc/driver/nvidia/gpus")
_DEVICE_FILES = Path("/dev")
_MIG = "MIG-"


@dataclass(frozen=True)
class Gpu:
    """One GPU; unknown fields are None.

    `compute_capability` (9, 0) is SM 90. `memory` is the size in bytes that NVML reports; the driver keeps some of it
    (0.6 of the 140 GiB of an H200), so CUDA programs see less.
    """

    name: str | None = None
    compute_capability: tuple[int, int] | None = None
    memory: int | None = None

    @property
    def architecture(self) -> str | None:
        return None if self.compute_capability is None else "sm_{}{}".format(*self.compute_capability)


def visible_gpus(
    environ: Mapping[str, str], *, driver_files: Path = _DRIVER_FILES, device_files: Path = _DEVICE_FILES
) -> tuple[tuple[Gpu, ...], str | None]:
    """The GPUs that CUDA shows to a process with this environment, and the driver's version.

    Asks NVML, which initialises no GPU. Without NVML, counts the driver's files; nothing else is known then.
    """
    found = _ask_nvml()
    if found is None:
        devices = [("", Gpu())] * _count_files(driver_files, device_files)
        driver = None
    else:
        devices, driver = found
    return _visible(devices, environ), driver


def _ask_nvml() -> tuple[list[tuple[str, Gpu]], str] | None:
    """Every GPU with its UUID, in order of PCI bus, and the driver's version; None if NVML does not answer."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            devices = [(_text(pynvml.nvmlDeviceGetUUID(handle)), _describe(pynvml, handle)) for handle in handles]
            return devices, _text(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def _describe(nvml: Any, handle: Any) -> Gpu:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    memory = None if _is_partitioned(nvml, handle) else int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    return Gpu(_text(nvml.nvmlDeviceGetName(handle)), (major, minor), memory)


def _is_partitioned(nvml: Any, handle: Any) -> bool:
    """Whether the GPU is split into MIG instances. CUDA gives a process one instance, with less memory than the GPU."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:
        return False  # not supported: this GPU cannot be partitioned
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def _text(value: str | bytes) -> str:
    # nvidia-ml-py returns str or bytes, depending on its version.
    return value.decode() if isinstance(value, bytes) else value


def _count_files(driver_files: Path, device_files: Path) -> int:
    """GPUs by the driver's files; containers may show the devices and hide the driver's /proc tree."""
    listed = len(list(driver_files.iterdir())) if driver_files.is_dir() else 0
    names = [path.name for path in device_files.glob("nvidia*")]
    return listed or sum(re.fullmatch(r"nvidia\d+", name) is not None for name in names) or names.count("nvidiactl")


def _visible(devices: list[tuple[str, Gpu]], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Apply CUDA_VISIBLE_DEVICES by the rules of the CUDA programming guide.

    A list of indices, or of UUIDs and prefixes of them, selects and orders the GPUs. The list ends at the first invalid
    entry; a GPU named twice leaves nothing.
    """
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return _in_cudas_order([gpu for _, gpu in devices], environ)
    entries = [entry.strip() for entry in wanted.split(",")]
    if entries[0].startswith(_MIG):
        return (Gpu(),) * min(1, len(devices))  # a process sees one MIG instance, even if several are named
    by_uuid = entries[0].upper().startswith("GPU-")
    chosen: list[int] = []
    for entry in entries:
        index = _by_uuid(devices, entry, chosen) if by_uuid else _by_index(devices, entry)
        if index is None:
            break
        if index in chosen:
            return ()
        chosen.append(index)
    gpus = [devices[index][1] for index in chosen]
    return tuple(gpus) if by_uuid else _in_cudas_order(gpus, environ, among=[gpu for _, gpu in devices])


def _by_index(devices: list[tuple[str, Gpu]], entry: str) -> int | None:
    number = re.match(r"\+?\d+", entry)  # CUDA reads the number at the start of an entry and ignores the rest
    return int(number[0]) if number is not None and int(number[0]) < len(devices) else None


def _by_uuid(devices: list[tuple[str, Gpu]], entry: str, chosen: list[int]) -> int | None:
    if not entry.upper().startswith("GPU-"):
        return None
    matching = [index for index, (uuid, _) in enumerate(devices) if uuid.upper().startswith(entry.upper())]
    if len(matching) == 1:
        return matching[0]
    # GPUs counted by files have no UUID; treat each named one as another GPU.
    anonymous = [index for index, (uuid, _) in enumerate(devices) if not uuid and index not in chosen]
    return anonymous[0] if anonymous else None


def _in_cudas_order(gpus: list[Gpu], environ: Mapping[str, str], *, among: list[Gpu] | None = None) -> tuple[Gpu, ...]:
    """Return the count without details if GPUs differ: CUDA then orders them by speed and NVML by bus."""
    differ = len(set(gpus if among is None else among)) > 1
    if differ and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return (Gpu(),) * len(gpus)
    return tuple(gpus)
