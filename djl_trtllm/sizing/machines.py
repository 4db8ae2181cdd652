"""GPUs and AWS instance types as data (`gpus.toml`, `instances.toml`), and machines as a command line names them."""

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from djl_trtllm.errors import SizingError
from djl_trtllm.files import read_table
from djl_trtllm.listing import suggestion

_MIB = 1024 * 1024
_NEAR = 0.08
"""The most by which NVML's memory may differ from the table's: drivers and ECC change it by a few percent."""
_PREFIXES = re.compile(r"^(NVIDIA|TESLA|GEFORCE)\b[\s-]*", re.IGNORECASE)
_INSTANCE = re.compile(r"(?:ml\.)?(?P<family>[a-z][\w-]*)\.(?P<size>[\w-]+)", re.IGNORECASE)


@dataclass(frozen=True)
class GpuModel:
    """A kind of GPU. `memory` is the total in bytes that NVML reports, `nvml` what NVML's name begins with.

    `bandwidth` is that of the memory in bytes per second, `link` that between two GPUs in one direction. `flops` are
    the operations per second on dense matrices, by `bf16`, `fp8` and `fp4`, for the formats that the GPU computes in.
    """

    name: str
    memory: int
    compute_capability: tuple[int, int]
    bandwidth: float
    link: float
    flops: Mapping[str, float]
    grace: bool = False
    """Whether NVIDIA's Grace is the host."""
    nvml: str = ""
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Instance:
    """An AWS instance type. `hourly_price` is in USD (see `PRICES`); None where there is no on-demand price.

    `host_memory` is in bytes.
    """

    name: str
    gpu: GpuModel
    gpus: int
    host_memory: int
    hourly_price: float | None = None


class Prices(NamedTuple):
    """The kind, region and date of the instances' prices."""

    kind: str
    region: str
    date: datetime.date

    def __str__(self) -> str:
        return f"{self.kind}, {self.region}, {self.date.isoformat()}"


def usd_per_million(hourly_price: float | None, tokens_per_second: float) -> float | None:
    """The price of a million output tokens at this throughput, on a machine that does nothing else.

    None without a price, and without any tokens.
    """
    return hourly_price / 3600 / tokens_per_second * 1e6 if hourly_price and tokens_per_second else None


def _gpu(name: str, row: Mapping[str, Any]) -> GpuModel:
    major, minor = row["compute_capability"]
    flops = {number_format: 1e12 * tflops for number_format, tflops in row["tflops"].items()}
    return GpuModel(
        name=name,
        memory=row["memory_mib"] * _MIB,
        compute_capability=(major, minor),
        bandwidth=1e9 * row["bandwidth"],
        link=1e9 * row["link"],
        flops=MappingProxyType(flops),
        grace=row.get("grace", False),
        nvml=row["nvml"],
        aliases=tuple(row.get("aliases", ())),
    )


def _instance(name: str, row: Mapping[str, Any]) -> Instance:
    return Instance(name, GPUS[row["gpu"]], row["gpus"], row["host_memory_mib"] * _MIB, row.get("price"))


_table = read_table("instances.toml", __package__)

GPUS: Mapping[str, GpuModel] = MappingProxyType(
    {name: _gpu(name, row) for name, row in read_table("gpus.toml", __package__).items()}
)
"""GPUs by name, oldest architecture first."""

INSTANCES: Mapping[str, Instance] = MappingProxyType(
    {name: _instance(name, row) for name, row in _table["instances"].items()}
)
"""AWS instance types by name (`g5.12xlarge`)."""

PRICES = Prices(_table["prices"]["kind"], _table["prices"]["region"], _table["prices"]["date"])


def gpu_named(text: str) -> GpuModel:
    """The GPU of a name as people write it: `h200`, `NVIDIA-A100-40GB`. Raises SizingError with the nearest names."""
    wanted = _plain(text)
    for gpu in GPUS.values():
        if wanted in map(_plain, (gpu.name, *gpu.aliases)):
            return gpu
    raise SizingError(f"{text or 'no GPU'}: expected a GPU: {_advice(wanted, GPUS)}")


def gpu_found(nvml_name: str | None, memory: int | None) -> GpuModel | None:
    """The GPU that NVML reports under this name with this memory in bytes; None if it is not in the table.

    A100 with 40 GB and with 80 GB, and similar pairs, differ by their memory, or without it by their name.
    """
    if nvml_name is None:
        return None
    name = f"{_PREFIXES.sub('', nvml_name.strip())} "
    while _PREFIXES.match(name):
        name = _PREFIXES.sub("", name)
    known = [gpu for gpu in GPUS.values() if re.match(rf"{re.escape(gpu.nvml)}(?!\w)", name, re.IGNORECASE)]
    longest = max((len(gpu.nvml) for gpu in known), default=0)
    known = [gpu for gpu in known if len(gpu.nvml) == longest]
    if memory is not None:
        near = [gpu for gpu in known if abs(gpu.memory - memory) <= _NEAR * gpu.memory]
        return near[0] if near else None
    if len(known) > 1:
        known = [gpu for gpu in known if gpu.name.rpartition("-")[2].upper() in _plain(name)]
    return known[0] if len(known) == 1 else None


def instance_named(text: str) -> Instance:
    """The AWS instance type of a name: `g5.12xlarge`, `ml.g5.12xlarge` and `g5.12xl` are one. Raises SizingError."""
    match = _INSTANCE.fullmatch(text.strip())
    if match is not None:
        size = re.sub(r"xl$", "xlarge", match["size"].lower())
        found = INSTANCES.get(f"{match['family'].lower()}.{size}")
        if found is not None:
            return found
    wanted = text.strip().lower().removeprefix("ml.")
    raise SizingError(f"{text or 'no instance'}: expected an AWS instance type with GPUs: {_advice(wanted, INSTANCES)}")


def _plain(text: str) -> str:
    return re.sub(r"[-_\s]|^nvidia", "", text.strip().lower()).upper()


def _advice(wanted: str, known: Iterable[str]) -> str:
    return suggestion(wanted.lower(), map(str.lower, known), most=3, likeness=0.7)


_GIB = 1 << 30
_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": _GIB,
}
_BYTES = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[a-z]*)", re.IGNORECASE)
_COUNTED = re.compile(r"(?:(?P<before>\d+)x)?(?P<name>.*?)(?:(?::|(?<!rt)x(?=\d))(?P<after>.*))?", re.IGNORECASE)
_MOST_GPUS = 1024
_LEAST = 1 << 30


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind. `gpus` is None where any number may be used; `known` is what the tables are keyed by."""

    name: str
    gpu: str
    memory: int
    gpus: int | None = None
    compute_capability: tuple[int, int] | None = None
    known: Instance | GpuModel | None = None
    remarks: tuple[str, ...] = ()
    """Warnings about the machine that an estimate does not know, such as memory in use."""

    @property
    def hourly_price(self) -> float | None:
        return self.known.hourly_price if isinstance(self.known, Instance) else None

    @property
    def gpu_model(self) -> GpuModel | None:
        return self.known.gpu if isinstance(self.known, Instance) else self.known

    @property
    def host_memory(self) -> int | None:
        return self.known.host_memory if isinstance(self.known, Instance) else None

    @property
    def kind(self) -> tuple[str, int | None]:
        """The properties that machines with the same GPUs share: they differ in their prices and hosts."""
        return self.gpu, self.gpus

    def cells(self, ranks: int) -> tuple[str, str]:
        """Cells of a table: the machine's name and its GPUs, `ranks` where any number may be used."""
        return self.name if self.name != self.gpu else "GPU", f"{self.gpus or ranks} x {self.gpu}"

    def __str__(self) -> str:
        count = "" if self.gpus is None else f"{self.gpus} x "
        where = f"{self.name}: " if self.name != self.gpu else ""
        return f"{where}{count}{self.gpu} with {self.memory / _GIB:.1f} GiB"


def of_gpu(text: str) -> Machine:
    """`h200`, or `h200:8`, `8xh200`, `h200x8` for eight of them. Raises SizingError."""
    match = _COUNTED.fullmatch(text.strip())
    assert match is not None  # every text matches
    gpu = gpu_named(match["name"])
    counts = [count.strip() for count in match.group("before", "after") if count is not None]
    count = " and ".join(counts)
    if counts and (re.fullmatch(r"[0-9]{1,6}", count) is None or not 0 < int(count) <= _MOST_GPUS):
        raise SizingError(f"{text}: expected 1 to {_MOST_GPUS} GPUs, as {gpu.name}:8, and not {count or 'nothing'}")
    gpus = int(count) if counts else None
    return Machine(gpu.name, gpu.name, gpu.memory, gpus, gpu.compute_capability, gpu)


def of_instance(text: str) -> Machine:
    """An AWS instance type. Raises SizingError."""
    instance = instance_named(text)
    gpu = instance.gpu
    return Machine(instance.name, gpu.name, gpu.memory, instance.gpus, gpu.compute_capability, instance)


def of_memory(text: str) -> Machine:
    """A GPU of which only the memory is known: bytes, or with a unit (`24GB`, `22.5GiB`). Raises SizingError."""
    memory = bytes_of(text)
    if memory is None:
        raise SizingError(
            f"{text or 'no memory'}: expected the memory of a GPU in bytes, or with a unit, as 80GB or 22.5GiB"
        )
    if memory < _LEAST:
        raise SizingError(f"{text}: {memory} bytes are too few for a GPU; write a unit, as {text.strip()}GB")
    name = f"a GPU of {memory / _GIB:.1f} GiB"
    return Machine(name, name, memory)


def bytes_of(text: str) -> int | None:
    """Bytes, as a number or with a unit (`24GB`, `22.5GiB`); None if it is neither."""
    match = _BYTES.fullmatch(text.strip())
    unit = None if match is None else _UNITS.get(match["unit"].lower())
    return None if match is None or unit is None else int(float(match["number"]) * unit)


def aws_machines() -> list[Machine]:
    """The AWS instance types with a price, cheapest first, then those without."""
    machines = [of_instance(name) for name in INSTANCES]
    return sorted(machines, key=lambda machine: (machine.hourly_price is None, machine.hourly_price or 0))


def split(texts: Sequence[str]) -> list[str]:
    """Values that were given several times, or in one text with commas."""
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]
