"""The maxima of max_num_tokens that were measured, as data (`measured.toml`), and how to find the one of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from djl_trtllm.config.tables import read_table
from djl_trtllm.errors import SizingError
from djl_trtllm.model.shape import ModelShape
from djl_trtllm.sizing.gpus import GpuModel, Instance, instance_named

DEFAULT_LMI = "0.28"
_OUT_OF_MEMORY = "Out of Memory"
_UNQUANTISED = ("float16", "bfloat16")


@dataclass(frozen=True)
class MeasuredModel:
    """A model of the tables, by the sizes that identify it."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    experts: int = 0

    def is_of(self, shape: ModelShape, experts: int) -> bool:
        """Whether a model has these sizes. Falcon's config.json has no intermediate size: that decides nothing."""
        known = (
            (self.layers, shape.num_layers),
            (self.hidden, shape.hidden),
            (self.heads, shape.num_heads),
            (self.vocabulary, shape.vocab_size),
        )
        told = ((self.kv_heads, shape.num_kv_heads), (self.intermediate, shape.intermediate))
        return (
            all(own == other for own, other in known)
            and all(other in (None, own) for own, other in told)
            and experts == self.experts
        )


@dataclass(frozen=True)
class Row:
    """One row: `max_num_tokens` was the most that ran; None: even loading ran out of memory."""

    lmi: str
    model: MeasuredModel
    machine: Instance
    written: str
    """The machine as the document writes it."""
    tensor_parallel: int
    max_num_tokens: int | None

    def __str__(self) -> str:
        return f"table LMI {self.lmi}, {self.model.name} on {self.written}, tp {self.tensor_parallel}"


def _rows() -> dict[str, tuple[Row, ...]]:
    table = read_table("measured.toml", __package__)
    models = {name: MeasuredModel(name, **sizes) for name, sizes in table["models"].items()}
    return {
        lmi: tuple(
            Row(
                lmi,
                models[model],
                instance_named(machine),
                machine,
                degree,
                None if tokens == _OUT_OF_MEMORY else tokens,
            )
            for model, machine, degree, tokens in rows
        )
        for lmi, rows in table["tables"].items()
    }


TABLES: Mapping[str, tuple[Row, ...]] = MappingProxyType(_rows())
"""The rows by LMI's version."""


def look_up(
    shape: ModelShape,
    experts: int,
    dtype: str | None,
    machine: Instance | GpuModel,
    tensor_parallel: int,
    lmi: str = DEFAULT_LMI,
) -> Row | None:
    """The row of a model on a machine; None if it was not measured. Raises SizingError for a version without a table.

    `dtype` is that of the weights: rows are of float16 and bfloat16 only. A row applies to every machine with the same
    GPUs, because it is their memory that it is about; the machine itself comes first.
    """
    if lmi not in TABLES:
        raise SizingError(f"LMI {lmi}: expected a version with a table of measurements: {' or '.join(TABLES)}")
    if dtype not in _UNQUANTISED:
        return None
    gpu, gpus = (machine.gpu, machine.gpus) if isinstance(machine, Instance) else (machine, tensor_parallel)
    found = [
        row
        for row in TABLES[lmi]
        if row.machine.gpu == gpu and row.tensor_parallel == tensor_parallel <= gpus and row.model.is_of(shape, experts)
    ]
    return next((row for row in found if row.machine == machine), found[0] if found else None)
