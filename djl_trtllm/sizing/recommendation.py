"""max_num_tokens for a model on a machine: as it was measured, else half of what the estimate says fits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.conditions import Conditions
from djl_trtllm.sizing.estimate import MOST, Estimate, estimate
from djl_trtllm.sizing.gpus import GpuModel, Instance
from djl_trtllm.sizing.measured import DEFAULT_LMI, Row, look_up

_GIB = 1 << 30


@dataclass(frozen=True)
class Recommendation:
    """`row` is the measurement, if there is one; it overrides the estimate. `gpu` names the GPUs for readers."""

    estimate: Estimate
    row: Row | None
    gpu: str

    @cached_property
    def maximum(self) -> int:
        """The largest max_num_tokens that fits; 0: out of memory."""
        return self.estimate.max_num_tokens if self.row is None else self.row.max_num_tokens or 0

    @property
    def fits(self) -> bool:
        return self.maximum > 0

    @property
    def max_num_tokens(self) -> int:
        """A measured number as it stands, else half of the estimate; at most 16,384, and 0 if nothing fits."""
        return min(MOST, self.maximum if self.row is not None else self.maximum // 2)

    @property
    def origin(self) -> str:
        """Where the number comes from."""
        capped = f", at most {MOST} used" if self.max_num_tokens == MOST else ""
        if self.row is None:
            return f"half of the estimate of {self.maximum} for {self.place}{capped}"
        return f"{self.row}: {self.maximum}{capped}" if capped else str(self.row)

    @property
    def place(self) -> str:
        conditions = self.estimate.conditions
        groups = f", pp {conditions.pipeline_parallel}" if conditions.pipeline_parallel > 1 else ""
        return f"{self.gpu}, tp {conditions.tensor_parallel}{groups}"

    @property
    def refusal(self) -> str | None:
        """Why the model cannot run there, with the numbers; None if it can."""
        if self.fits:
            return None
        if self.row is not None:
            return f"out of memory was measured ({self.row}), {self._needs}"
        kept = self.estimate.kv_tokens(1)
        if kept:
            longest = self.estimate.longest(1)
            return (
                f"the KV cache on {self.place} holds about {kept} tokens at most, less than one sequence of {longest}, "
                f"{self._needs}; lower option.max_input_len or option.max_output_len"
            )
        return f"out of memory is expected on {self.place}, {self._needs}"

    @property
    def _needs(self) -> str:
        found, memory = self.estimate, self.estimate.conditions.gpu_memory
        fixed = found.communication + found.overhead
        return (
            f"where each GPU has {memory / _GIB:.1f} GiB and the weights take {found.weights / _GIB:.1f} GiB, the "
            f"engine itself about {fixed / _GIB:.1f} GiB"
        )


def recommend(
    sizes: CheckpointSizes,
    conditions: Conditions,
    machine: Instance | GpuModel | None,
    *,
    gpu: str | None = None,
    lmi: str = DEFAULT_LMI,
) -> Recommendation:
    """`machine` is None for GPUs that are not in the table; `gpu` names them then. Raises SizingError.

    Rows are of plain models: neither quantised nor spread over groups of GPUs, without beams, adapters and drafts.
    """
    dtype = conditions.dtype or sizes.shape.dtype
    plain = conditions.pipeline_parallel == conditions.max_beam_width == 1 and not (conditions.lora or conditions.draft)
    unquantised = conditions.quantization is None and sizes.quantization is None
    row = None
    if machine is not None and plain and unquantised:
        row = look_up(sizes.shape, sizes.experts, dtype, machine, conditions.tensor_parallel, lmi)
    if gpu is None and machine is not None:
        gpu = machine.gpu.name if isinstance(machine, Instance) else machine.name
    return Recommendation(estimate(sizes, conditions), row, gpu or "GPUs")
