"""This machine: its GPUs, memory and installed engines.

A bound on the memory of engine processes makes this machine one with less memory.
"""

import os
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
from packaging.version import InvalidVersion, Version

from djl_trtllm import processes
from djl_trtllm.errors import SizingError

VARIABLE = "DJL_TRTLLM_ENGINE_MEMORY"
"""Bytes of data that an engine process may have: heap, buffers and stacks, no mapped files (RLIMIT_DATA)."""


def engine_memory() -> int | None:
    """The bound of engine processes that this process starts; None if there is none."""
    text = os.environ.get(VARIABLE, "")
    return int(text) if text.isdecimal() else None


def apply_bound() -> None:
    """Bound this process's memory: an allocation beyond fails, as where there is no more memory."""
    if (bound := engine_memory()) is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))


@contextmanager
def bounded(memory: int | None) -> Iterator[None]:
    """Bound the memory of engine processes that are started in the block; None leaves their bound as it is."""
    if memory is None:
        yield
        return
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(memory)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


DRIVER_FILES = Path("/proc/driver/nvidia/gpus")
DEVICE_FILES = Path("/dev")
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


def visible_gpus(environ: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str | None]:
    """The GPUs that CUDA shows to a process with this environment, and the driver's version.

    Asks NVML, which initialises no GPU. Without NVML, counts the driver's files; nothing else is known then.
    """

    def describe(nvml: Any, handles: list[Any]) -> tuple[list[tuple[str, Gpu]], str]:
        devices = [(_text(nvml.nvmlDeviceGetUUID(handle)), _describe(nvml, handle)) for handle in handles]
        return devices, _text(nvml.nvmlSystemGetDriverVersion())

    devices, driver = _ask_nvml(describe) or ([("", Gpu())] * _count_files(), None)
    return _visible(devices, environ), driver


_T = TypeVar("_T")


def _ask_nvml(question: Callable[[Any, list[Any]], _T]) -> _T | None:
    """The answer of NVML, given the handles of all GPUs in order of PCI bus; None if NVML does not answer."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            return question(pynvml, handles)
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


def _count_files() -> int:
    """GPUs by the driver's files; containers may show the devices and hide the driver's /proc tree."""
    listed = len(list(DRIVER_FILES.iterdir())) if DRIVER_FILES.is_dir() else 0
    names = [path.name for path in DEVICE_FILES.glob("nvidia*")]
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
    """Return the GPUs, but only their number if they differ: CUDA then orders them by speed and NVML by bus."""
    differ = len(set(gpus if among is None else among)) > 1
    if differ and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return (Gpu(),) * len(gpus)
    return tuple(gpus)


def gpus_named(text: str) -> tuple[Gpu, ...]:
    """The GPUs of `h100`, `h100:8` or `8xh100`, a value of --gpu. Raises SizingError."""
    from djl_trtllm.sizing.machines import of_gpu  # with it come all options: an engine process does without

    try:
        machine = of_gpu(text)
    except SizingError as error:
        raise SizingError(f"--gpu {error}") from None
    return (Gpu(f"NVIDIA {machine.gpu}", machine.compute_capability, machine.memory),) * (machine.gpus or 1)


# Of nvml.h's nvmlGpuP2PCapsIndex_t: nvidia-ml-py has a tuple in its place, which its own function does not take.
_READ = 0


@dataclass(frozen=True)
class GpuState:
    """One GPU, in order of PCI bus: bytes of its memory, and the GPUs (by number) whose memory it reaches."""

    total: int
    free: int
    peers: tuple[int, ...] = ()


def read_states() -> tuple[GpuState, ...]:
    """All GPUs of the machine; empty without NVML."""
    return _ask_nvml(lambda nvml, gpus: tuple(_read(nvml, gpus, index) for index in range(len(gpus)))) or ()


def _read(nvml: Any, handles: list[Any], index: int) -> GpuState:
    memory = nvml.nvmlDeviceGetMemoryInfo(handles[index])
    others = (other for other in range(len(handles)) if other != index)
    peers = tuple(other for other in others if _reaches(nvml, handles[index], handles[other]))
    return GpuState(int(memory.total), int(memory.free), peers)


def _reaches(nvml: Any, handle: Any, other: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetP2PStatus(handle, other, _READ) == nvml.NVML_P2P_STATUS_OK)
    except nvml.NVMLError:
        return False  # the GPU or the driver does not answer this question


_ENGINE_BACKEND_REMOVED = Version("1.3.0rc21")


@dataclass(frozen=True)
class Hardware:
    """The machine. `gpus` are those that CUDA shows to this process, in CUDA's order.

    `tensorrt_llm` and `tensorrt` are installed versions, `driver` is NVIDIA's. `available_memory` is the host memory
    that this process may still allocate, in bytes. `engine_backend` says whether the installed TensorRT-LLM has the
    files of the engine backend, `autodeploy` the same of AutoDeploy; None if it is not installed or its files cannot be
    read. `vllm` is the installed version, `vllm_on_cpu` says whether it is the build for CPUs; `openvino` says whether
    OpenVINO GenAI is installed.
    """

    gpus: tuple[Gpu, ...]
    tensorrt_llm: str | None
    available_memory: int
    driver: str | None = None
    tensorrt: str | None = None
    engine_backend: bool | None = None
    autodeploy: bool | None = None
    vllm: str | None = None
    vllm_on_cpu: bool = False
    openvino: bool = False

    @classmethod
    def probe(cls) -> "Hardware":
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


def available_memory() -> int:
    """Bytes of host memory that this process may still allocate: the system's, or less if a control group limits it.

    Reads control groups of version 1 and 2 with all their ancestors, because a container's limit can be set on any of
    them. Page cache that can be dropped is available memory. Within `bounded` it is at most the bound.
    """
    available = int(psutil.virtual_memory().available)
    for directory, limit_file, usage_file, inactive_key in _memory_groups():
        limit = _read_bytes(directory / limit_file)
        usage = _read_bytes(directory / usage_file)
        if limit is not None and usage is not None:
            available = min(available, limit - max(0, usage - _statistic(directory, inactive_key)))
    bound = engine_memory()
    return max(0, available if bound is None else min(available, bound))


def _memory_groups() -> Iterator[tuple[Path, str, str, str]]:
    root = processes.CGROUP
    for controllers, path in processes.control_groups():
        if controllers == [""]:
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers:
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = base / path
        # In a container the path is often the host's and does not exist; the root is then the container's group.
        for directory in dict.fromkeys((own, *own.parents)):
            if directory == base or base in directory.parents:
                yield (directory, *names)


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
