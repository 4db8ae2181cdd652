"""GPUs and AWS instance types by name, as data (`gpus.toml`, `instances.toml`)."""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from djl_trtllm.config.tables import read_table
from djl_trtllm.errors import SizingError

_MIB = 1024 * 1024
_NEAR = 0.08
"""How far the memory that NVML reports may lie from the table's: drivers and ECC change it by a few percent."""
_PREFIXES = re.compile(r"^(NVIDIA|TESLA|GEFORCE)\b[\s-]*", re.IGNORECASE)
_INSTANCE = re.compile(r"(?:ml\.)?(?P<family>[a-z][\w-]*)\.(?P<size>[\w-]+)", re.IGNORECASE)


@dataclass(frozen=True)
class GpuModel:
    """A kind of GPU. `memory` is the total in bytes that NVML reports, `nvml` what NVML's name begins with."""

    name: str
    memory: int
    compute_capability: tuple[int, int]
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
    """Which prices those of the instances are."""

    kind: str
    region: str
    date: datetime.date

    def __str__(self) -> str:
        return f"{self.kind}, {self.region}, {self.date.isoformat()}"


def _read_gpus() -> dict[str, GpuModel]:
    return {name: _gpu(name, row) for name, row in read_table("gpus.toml", __package__).items()}


def _gpu(name: str, row: Mapping[str, Any]) -> GpuModel:
    major, minor = row["compute_capability"]
    return GpuModel(name, row["memory_mib"] * _MIB, (major, minor), row["nvml"], tuple(row.get("aliases", ())))


def _instance(name: str, row: Mapping[str, Any]) -> Instance:
    return Instance(name, GPUS[row["gpu"]], row["gpus"], row["host_memory_mib"] * _MIB, row.get("price"))


_table = read_table("instances.toml", __package__)

GPUS: Mapping[str, GpuModel] = MappingProxyType(_read_gpus())
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
    return re.sub(r"[-_\s]|^nvidia", "", text.strip().lower().removeprefix("nvidia")).upper()


def _advice(wanted: str, known: Iterable[str]) -> str:
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(wanted.lower(), names, n=3, cutoff=0.7)
    return f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(names)}"
