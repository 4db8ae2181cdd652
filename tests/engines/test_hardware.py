from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from packaging.version import Version

from djl_trtllm import processes
from djl_trtllm.engines import hardware
from djl_trtllm.engines.hardware import (
    VARIABLE,
    Gpu,
    GpuState,
    Hardware,
    available_memory,
    bounded,
    engine_memory,
    gpus_named,
    read_states,
    release_of,
    visible_gpus,
)
from djl_trtllm.errors import SizingError
from tests.engines.helpers import H200, gpu_machine
from tests.support.tables import by_table

# -- A bound on engine processes.


GIB = 1 << 30
ALLOCATE = """import sys
from djl_trtllm.engines.hardware import apply_bound
apply_bound()
bytearray(int(sys.argv[1]))
print("allocated")"""


def allocate(size: int) -> str:
    done = subprocess.run([sys.executable, "-c", ALLOCATE, str(size)], capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def test_a_process_with_a_bound_has_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    free = available_memory()
    with bounded(GIB // 2):
        assert engine_memory() == available_memory() == GIB // 2
        assert allocate(GIB // 8) == "allocated"
        assert allocate(GIB) == "MemoryError"
    assert engine_memory() is None
    assert allocate(GIB) == "allocated"
    with bounded(1 << 60):
        assert available_memory() == pytest.approx(free, rel=0.5)
    for text in ("", "much", "-1"):
        monkeypatch.setenv(VARIABLE, text)
        assert engine_memory() is None


def test_a_bound_ends_with_its_block_and_the_one_around_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "7")
    with bounded(None):
        assert engine_memory() == 7
    with pytest.raises(ValueError, match="mine"), bounded(5):
        assert engine_memory() == 5
        raise ValueError("mine")
    assert engine_memory() == 7


L4 = Gpu("NVIDIA L4", (8, 9), 23_034 * 2**20)
UUIDS = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-8932aaaa-0000-0000-0000-000000000001", "GPU-1c2b0000-0000")


class NVMLError(Exception):
    pass


class Machine:
    """A `pynvml` with these GPUs; functions named in `broken` raise. `calls` names those called."""

    NVMLError = NVMLError
    NVML_DEVICE_MIG_ENABLE = NVML_FEATURE_ENABLED = 1
    NVML_P2P_STATUS_OK = 0

    def __init__(self, gpus: Sequence[Gpu], *broken: str, partitioned: bool = False, encoded: bool = False) -> None:
        def text(value: str) -> str | bytes:
            return value.encode() if encoded else value

        self.calls: list[str] = []
        self._broken = broken if partitioned else (*broken, "nvmlDeviceGetMigMode")
        self._functions: dict[str, Callable[..., object]] = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: text("580.95.05"),
            "nvmlDeviceGetCount": lambda: len(gpus),
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": lambda handle: text(UUIDS[handle]),
            "nvmlDeviceGetName": lambda handle: text(gpus[handle].name or ""),
            "nvmlDeviceGetCudaComputeCapability": lambda handle: gpus[handle].compute_capability,
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=gpus[handle].memory, free=handle),
            "nvmlDeviceGetMigMode": lambda handle: (1, 1),
            "nvmlDeviceGetP2PStatus": lambda one, other, capability: {0: 0, 2: 1}[capability],
        }

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*arguments: int) -> object:
            self.calls.append(name)
            if name in self._broken:
                raise NVMLError("not supported")
            return self._functions[name](*arguments)

        return call


Install = Callable[..., Machine]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes `Machine(...)` the machine that NVML shows."""

    def install(*arguments: Any, **named: Any) -> Machine:
        monkeypatch.setitem(sys.modules, "pynvml", machine := Machine(*arguments, **named))
        return machine

    return install


def seen(visible: str | None, **environ: str) -> tuple[Gpu, ...]:
    return visible_gpus(environ if visible is None else {**environ, "CUDA_VISIBLE_DEVICES": visible})[0]


@pytest.mark.parametrize("encoded", [False, True])
def test_nvml_tells_name_architecture_memory_and_driver(install: Install, encoded: bool) -> None:
    machine = install([H200, H200], encoded=encoded)
    assert visible_gpus({}) == ((H200, H200), "580.95.05")
    assert H200.architecture == "sm_90" and Gpu().architecture is None
    assert machine.calls[-1] == "nvmlShutdown"
    for visible in ("MIG-4d9bd9d6", "MIG-GPU-8932f937/1/0", "MIG-4d9bd9d6,MIG-5e0c"):
        assert seen(visible) == (Gpu(),)  # one GPU of unknown shape, even if several instances are named
    install([H200], partitioned=True)
    assert seen(None) == (Gpu(H200.name, H200.compute_capability, None),)


@by_table("visible", "chosen")
def test_cuda_visible_devices_chooses_and_orders(install: Install, visible: str | None, chosen: list[int]) -> None:
    gpus = [Gpu(f"GPU {index}", (9, 0), index) for index in range(3)]
    install(gpus)
    assert seen(visible, CUDA_DEVICE_ORDER="PCI_BUS_ID") == tuple(gpus[index] for index in chosen)


def test_of_gpus_that_differ_an_index_says_nothing_unless_the_order_is_that_of_the_bus(install: Install) -> None:
    install([L4, H200])
    assert seen("0") == (Gpu(),) and seen(None) == (Gpu(), Gpu())
    assert seen("0", CUDA_DEVICE_ORDER="PCI_BUS_ID") == (L4,)
    assert seen(UUIDS[1]) == (H200,)
    install([H200, H200])
    assert seen("1") == (H200,)


@pytest.mark.parametrize(
    "broken", ["", "nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetName", "nvmlSystemGetDriverVersion"]
)
def test_without_nvml_gpus_are_counted_by_the_drivers_files(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str
) -> None:
    if broken:
        install([H200], broken)
    else:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    for bus in ("0000:17:00.0", "0000:65:00.0"):
        (tmp_path / bus).mkdir()
    monkeypatch.setattr(hardware, "DRIVER_FILES", tmp_path)
    assert visible_gpus({}) == ((Gpu(), Gpu()), None)


@by_table("files", "visible", "count")
def test_where_the_drivers_files_are_hidden_its_devices_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: list[str], visible: str | None, count: int
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for name in files:
        (tmp_path / name).touch()
    places = (hardware.DRIVER_FILES, hardware.DEVICE_FILES, processes.CGROUP, processes.MEMBERSHIP)
    assert [str(place) for place in places] == [
        "/proc/driver/nvidia/gpus",
        "/dev",
        "/sys/fs/cgroup",
        "/proc/self/cgroup",
    ]
    monkeypatch.setattr(hardware, "DRIVER_FILES", tmp_path / "hidden")
    monkeypatch.setattr(hardware, "DEVICE_FILES", tmp_path)
    assert seen(visible) == (Gpu(),) * count


# -- GPUs by name.


def test_gpus_are_named_with_their_number() -> None:
    for text, count in (("h100", 1), ("H100:8", 8), ("8xh100", 8)):
        assert gpus_named(text) == (Gpu("NVIDIA H100", (9, 0), 81559 << 20),) * count
    for text, expected in (("h1000", "did you mean h100"), ("h100:0", "expected 1 to 1024 GPUs, as H100:8")):
        with pytest.raises(SizingError, match=f"^--gpu {text}: .*{expected}"):
            gpus_named(text)


@pytest.mark.parametrize("encoded", [False, True])
def test_memory_and_links_of_each_gpu_are_read(install: Install, encoded: bool) -> None:
    machine, total = install([H200, H200], encoded=encoded), H200.memory or 0
    assert read_states() == (GpuState(total, 0, (1,)), GpuState(total, 1, (0,)))
    assert machine.calls[-1] == "nvmlShutdown"
    install([H200, H200], "nvmlDeviceGetP2PStatus")
    assert read_states()[0].peers == ()


def test_without_nvml_there_are_no_states(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    for broken in ("nvmlInit", "nvmlDeviceGetMemoryInfo"):
        install([H200], broken)
        assert read_states() == ()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_states() == ()


@by_table("membership", "groups", "available")
def test_memory_is_what_the_limits_of_all_groups_leave(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    membership: str | None,
    groups: dict[str, dict[str, str]],
    available: int | None,
) -> None:
    for folder, files in groups.items():
        (tmp_path / "cgroup" / folder).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (tmp_path / "cgroup" / folder / name).write_text(content)
    if membership is not None:
        (tmp_path / "membership").write_text(f"{membership}\n")
    monkeypatch.setattr(processes, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(processes, "MEMBERSHIP", tmp_path / "membership")
    found = available_memory()
    assert found == available if available is not None else 1000 < found <= psutil.virtual_memory().total


@by_table("version", "there")  # fmt: skip
def test_where_files_do_not_tell_the_version_does(version: str | None, there: bool) -> None:
    assert gpu_machine(version).has_engine_backend is there
    found = [replace(gpu_machine(version), engine_backend=its).has_engine_backend for its in (True, False)]
    assert found == [version is not None, False]
    assert release_of("1.2.1+cu130") == Version("1.2.1") != release_of("1.2.1rc1")
    assert release_of("of unknown version") is None and release_of(None) is None


def test_probing_asks_for_gpus_driver_and_memory(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install([H200, H200])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(hardware, "available_memory", lambda: 77)
    nothing = (None, None, None, None, False, False)  # backends add what is installed
    assert Hardware.probe() == Hardware((H200,), None, 77, "580.95.05", *nothing)
