"""What NVML says of each GPU now: free memory, and how it is linked to the host and to the other GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Of nvml.h's nvmlGpuP2PCapsIndex_t: nvidia-ml-py has tuples in their place, which its own function does not take.
_READ = 0
_NVLINK = 2


@dataclass(frozen=True)
class GpuState:
    """One GPU, in order of PCI bus. `total` and `free` are bytes; unknown fields are None.

    `nvlinks` is the number of active links, `peers` are the GPUs whose memory this one reaches, and `nvlink_peers`
    those that it reaches over NVLink. PCIe is that of the slot: an idle GPU slows its link down.
    """

    name: str
    compute_capability: tuple[int, int]
    total: int
    free: int
    nvlinks: int = 0
    peers: tuple[int, ...] = ()
    nvlink_peers: tuple[int, ...] = ()
    pcie_generation: int | None = None
    pcie_width: int | None = None


def read_states() -> tuple[GpuState, ...]:
    """All GPUs of the machine; empty without NVML."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(_read(pynvml, handles, index) for index in range(len(handles)))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _read(nvml: Any, handles: list[Any], index: int) -> GpuState:
    handle = handles[index]
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    name = nvml.nvmlDeviceGetName(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return GpuState(
        name=name.decode() if isinstance(name, bytes) else name,
        compute_capability=(major, minor),
        total=int(memory.total),
        free=int(memory.free),
        nvlinks=sum(
            _asked(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) == nvml.NVML_FEATURE_ENABLED
            for link in range(nvml.NVML_NVLINK_MAX_LINKS)
        ),
        peers=_peers(nvml, handles, index, _READ),
        nvlink_peers=_peers(nvml, handles, index, _NVLINK),
        pcie_generation=_asked(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_width=_asked(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
    )


def _peers(nvml: Any, handles: list[Any], index: int, capability: int) -> tuple[int, ...]:
    return tuple(
        other
        for other in range(len(handles))
        if other != index
        and _asked(nvml, nvml.nvmlDeviceGetP2PStatus, handles[index], handles[other], capability)
        == nvml.NVML_P2P_STATUS_OK
    )


def _asked(nvml: Any, function: Callable[..., int], *arguments: Any) -> int | None:
    """None where the GPU or the driver does not answer this question."""
    try:
        return int(function(*arguments))
    except nvml.NVMLError:
        return None
