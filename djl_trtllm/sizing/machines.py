"""The machines that a model is sized for, as a command line names them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from djl_trtllm.errors import SizingError
from djl_trtllm.sizing.gpus import GPUS, INSTANCES, GpuModel, Instance, gpu_named, instance_named

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
    """What was seen there that an estimate does not know."""

    @property
    def hourly_price(self) -> float | None:
        return self.known.hourly_price if isinstance(self.known, Instance) else None

    @property
    def host_memory(self) -> int | None:
        return self.known.host_memory if isinstance(self.known, Instance) else None

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
        raise SizingError(
            f"{text}: {count or 'nothing'} is no number of GPUs, expected 1 to {_MOST_GPUS}, as {gpu.name}:8"
        )
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
        raise SizingError(f"{text}: {memory} bytes are no memory of a GPU; write a unit, as {text.strip()}GB")
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


def known_gpus() -> list[Machine]:
    return [of_gpu(name) for name in GPUS]


def split(texts: Sequence[str]) -> list[str]:
    """Values that were given several times, or in one text with commas."""
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]
