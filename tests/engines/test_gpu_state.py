from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from djl_trtllm.engines.gpu_state import GpuState, read_states

GIB = 1 << 30


class NVMLError(Exception):
    pass


def install(
    monkeypatch: pytest.MonkeyPatch,
    *,
    count: int = 2,
    links: int = 18,
    broken: str | None = None,
    encoded: bool = False,
) -> list[str]:
    """A `pynvml` with H200s, whose function `broken` raises. Returns the calls of nvmlShutdown."""
    ended: list[str] = []
    module = ModuleType("pynvml")

    def link(handle: int, number: int) -> int:
        if number >= links:
            raise NVMLError
        return 1

    def peer(one: int, other: int, capability: int) -> int:
        return {0: 0, 2: 0 if links else 1}[capability]

    functions = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: ended.append("ended"),
        "nvmlDeviceGetCount": lambda: count,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: b"NVIDIA H200" if encoded else "NVIDIA H200",
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=140 * GIB, free=(139 - handle) * GIB),
        "nvmlDeviceGetNvLinkState": link,
        "nvmlDeviceGetP2PStatus": peer,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 5,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda handle: 16,
    }

    def refuse(*arguments: object) -> None:
        raise NVMLError

    for name, function in functions.items():
        setattr(module, name, refuse if name == broken else function)
    constants = {
        "NVML_FEATURE_ENABLED": 1,
        "NVML_NVLINK_MAX_LINKS": 18,
        # As nvidia-ml-py has them.
        "NVML_P2P_CAPS_INDEX_READ": (0,),
        "NVML_P2P_CAPS_INDEX_NVLINK": (2,),
        "NVML_P2P_STATUS_OK": 0,
        "NVMLError": NVMLError,
    }
    for name, value in constants.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return ended


@pytest.mark.parametrize("encoded", [False, True])
def test_memory_and_links_of_each_gpu_are_read(monkeypatch: pytest.MonkeyPatch, encoded: bool) -> None:
    ended = install(monkeypatch, encoded=encoded)
    first, second = read_states()
    assert first == GpuState("NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB, 18, (1,), (1,), 5, 16)
    assert (second.free, second.peers) == (138 * GIB, (0,))
    assert ended == ["ended"]


def test_gpus_without_nvlink_can_be_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, links=0)
    assert [(gpu.nvlinks, gpu.peers, gpu.nvlink_peers) for gpu in read_states()] == [(0, (1,), ()), (0, (0,), ())]


def test_what_a_gpu_does_not_answer_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, broken="nvmlDeviceGetMaxPcieLinkWidth")
    assert read_states()[0].pcie_width is None
    install(monkeypatch, broken="nvmlDeviceGetP2PStatus")
    assert read_states()[0].peers == ()


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetMemoryInfo"])
def test_without_nvml_there_are_none(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    install(monkeypatch, broken=broken)
    assert read_states() == ()


def test_without_the_library_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_states() == ()
