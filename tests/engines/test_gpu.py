from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NoReturn

import pytest

from djl_trtllm.engines.gpu import Gpu, visible_gpus
from tests.engines.helpers import H200

L4 = Gpu("NVIDIA L4", (8, 9), 23_034 * 2**20)
UUIDS = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-8932aaaa-0000-0000-0000-000000000001", "GPU-1c2b0000-0000")


class NVMLError(Exception):
    pass


def install(
    monkeypatch: pytest.MonkeyPatch,
    gpus: Sequence[Gpu],
    *,
    broken: str | None = None,
    partitioned: bool = False,
    encoded: bool = False,
) -> list[str]:
    """A `pynvml` with these GPUs; `broken` names the function that raises. Returns the functions called."""
    calls: list[str] = []
    module = ModuleType("pynvml")

    def text(value: str) -> str | bytes:
        return value.encode() if encoded else value

    functions: dict[str, Callable[..., object]] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: text("580.95.05"),
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: text(UUIDS[handle]),
        "nvmlDeviceGetName": lambda handle: text(gpus[handle].name or ""),
        "nvmlDeviceGetCudaComputeCapability": lambda handle: gpus[handle].compute_capability,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=gpus[handle].memory),
        "nvmlDeviceGetMigMode": lambda handle: (1, 1) if partitioned else _raise(),
    }

    def answering(name: str) -> object:
        def call(*arguments: int) -> object:
            calls.append(name)
            return _raise() if name == broken else functions[name](*arguments)

        return call

    for name in functions:
        setattr(module, name, answering(name))
    module.NVMLError, module.NVML_DEVICE_MIG_ENABLE = NVMLError, 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return calls


def _raise() -> NoReturn:
    raise NVMLError("not supported")


def seen(visible: str | None, **environ: str) -> tuple[Gpu, ...]:
    return visible_gpus(environ if visible is None else {**environ, "CUDA_VISIBLE_DEVICES": visible})[0]


@pytest.mark.parametrize("encoded", [False, True])
def test_nvml_tells_name_architecture_memory_and_driver(monkeypatch: pytest.MonkeyPatch, encoded: bool) -> None:
    calls = install(monkeypatch, [H200, H200], encoded=encoded)
    assert visible_gpus({}) == ((H200, H200), "580.95.05")
    assert H200.architecture == "sm_90" and Gpu().architecture is None
    assert calls[-1] == "nvmlShutdown"


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (None, [0, 1, 2]), ("0,1,2", [0, 1, 2]), ("2,0", [2, 0]), (" 1 , 2 ", [1, 2]),
        ("", []), ("-1", []), ("none", []), ("NoDevFiles", []),
        ("0,7,1", [0]), ("0,-1,1", [0]), ("1,", [1]), ("3", []),
        ("0,0", []), ("1,0,1", []),
        ("1gpu2,2ampere", [1, 2]), ("00,+2", [0, 2]),
        (UUIDS[2], [2]), (f"{UUIDS[1]},{UUIDS[0]}", [1, 0]),
        ("GPU-1c2b", [2]), ("gpu-1C2B", [2]),
        ("GPU-8932", []), ("GPU-8932f,GPU-1c", [0, 2]), ("GPU-1c,GPU-ffff,GPU-8932f", [2]), ("GPU-1c,0", [2]),
        ("GPU-1c,GPU-1c2b", []),
    ],
)  # fmt: skip
def test_cuda_visible_devices_chooses_and_orders(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, chosen: list[int]
) -> None:
    gpus = [Gpu(f"GPU {index}", (9, 0), index) for index in range(3)]
    install(monkeypatch, gpus)
    assert seen(visible, CUDA_DEVICE_ORDER="PCI_BUS_ID") == tuple(gpus[index] for index in chosen)


@pytest.mark.parametrize("visible", ["MIG-4d9bd9d6", "MIG-GPU-8932f937/1/0", "MIG-4d9bd9d6,MIG-5e0c"])
def test_a_mig_instance_is_one_gpu_of_unknown_shape(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    install(monkeypatch, [H200, H200])
    assert seen(visible) == (Gpu(),)


def test_the_memory_of_a_partitioned_gpu_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [H200], partitioned=True)
    assert seen(None) == (Gpu(H200.name, H200.compute_capability, None),)


def test_of_gpus_that_differ_an_index_says_nothing_unless_the_order_is_that_of_the_bus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, [L4, H200])
    assert seen("0") == (Gpu(),) and seen(None) == (Gpu(), Gpu())
    assert seen("0", CUDA_DEVICE_ORDER="PCI_BUS_ID") == (L4,)
    assert seen(UUIDS[1]) == (H200,)
    install(monkeypatch, [H200, H200])
    assert seen("1") == (H200,)


@pytest.mark.parametrize(
    "broken", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetName", "nvmlSystemGetDriverVersion"]
)
def test_without_nvml_gpus_are_counted_by_the_drivers_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str
) -> None:
    install(monkeypatch, [H200], broken=broken)
    for bus in ("0000:17:00.0", "0000:65:00.0"):
        (tmp_path / "proc" / bus).mkdir(parents=True)
    assert visible_gpus({}, driver_files=tmp_path / "proc", device_files=tmp_path) == ((Gpu(), Gpu()), None)


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ([], 0), (["nvidiactl"], 1), (["nvidia0", "nvidiactl", "nvidia-uvm"], 1),
        (["nvidia0", "nvidia3", "nvidia10", "nvidiactl", "nvidia-caps"], 3),
    ],
)  # fmt: skip
def test_where_the_drivers_files_are_hidden_its_devices_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: list[str], count: int
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for name in files:
        (tmp_path / name).touch()
    assert visible_gpus({}, driver_files=tmp_path / "hidden", device_files=tmp_path) == ((Gpu(),) * count, None)


def test_the_files_are_those_of_the_driver() -> None:
    parameters = inspect.signature(visible_gpus).parameters
    assert parameters["driver_files"].default == Path("/proc/driver/nvidia/gpus")
    assert parameters["device_files"].default == Path("/dev")


@pytest.mark.parametrize(
    ("visible", "count"), [("1", 1), ("1,0", 2), ("4", 0), ("GPU-a,GPU-b", 2), ("GPU-a,GPU-b,GPU-c", 2)]
)
def test_gpus_counted_by_files_are_chosen_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str, count: int
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidia1").touch()
    environ = {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_gpus(environ, driver_files=tmp_path / "hidden", device_files=tmp_path)[0] == (Gpu(),) * count
