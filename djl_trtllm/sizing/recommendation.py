"""max_num_tokens for a model on a machine: as it was measured (`measured.toml`), else half of what the estimate allows.

Beside it the first guess from the traffic alone (`guess_max_num_tokens`).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType

from djl_trtllm.config import Backend, Config, DType, KvCacheDType
from djl_trtllm.errors import SizingError
from djl_trtllm.files import read_table
from djl_trtllm.model.checkpoint import ModelShape
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.estimate import MOST, Conditions, Estimate, LoraSlots
from djl_trtllm.sizing.machines import GpuModel, Instance, instance_named

DEFAULT_ALPHA = 0.2
LEAST_WORTH_TRYING = 256
"""The value at which halving ends: smaller ones split every prompt into many iterations."""


def guess_max_num_tokens(max_batch_size: int, max_input_len: int, alpha: float = DEFAULT_ALPHA) -> int:
    """`max_batch_size * max_input_len * alpha`, rounded down, at least 1. Raises SizingError for impossible numbers.

    NVIDIA recommends an alpha of 0.1 to 0.2 (TensorRT-LLM 0.9, docs/source/perf_best_practices.md, "Maximum number of
    tokens").
    """
    for name, value in (("max batch size", max_batch_size), ("max input length", max_input_len)):
        if value < 1:
            raise SizingError(f"{name} {value}: expected at least 1")
    if not 0 < alpha <= 1:
        raise SizingError(f"alpha {alpha:g}: expected more than 0 and at most 1; NVIDIA recommends 0.1 to 0.2")
    # As the decimal that was written: 100 * 0.29 is 29, and not 28.999...
    return max(1, math.floor(max_batch_size * max_input_len * Fraction(repr(alpha))))


def halvings(max_num_tokens: int) -> Iterator[int]:
    """The values to try one after the other, until the engine loads: the guess, then half of the last one."""
    yield max_num_tokens
    while max_num_tokens // 2 >= LEAST_WORTH_TRYING:
        max_num_tokens //= 2
        yield max_num_tokens


FREE_MEMORY_FRACTION = 0.95
"""Share for the KV cache of the memory that the loaded model leaves, where no option says another."""
_VLLM_SHARE = 0.9
_BFLOAT16_SINCE = (8, 0)
_DTYPES = {DType.FP32: "float32", DType.FP16: "float16", DType.BF16: "bfloat16"}


def conditions_of(
    config: Config,
    shape: ModelShape,
    *,
    gpu_memory: int,
    compute_capability: tuple[int, int] | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    compiled: bool = True,
    draft: CheckpointSizes | None = None,
) -> Conditions:
    """The conditions of a model with these options; `compiled` for an engine, false for PyTorch and vLLM."""
    options = config.options
    longest = options.max_seq_len or options.max_input_len + options.max_output_len
    longest = min(longest, shape.max_position_embeddings or longest)
    longest_prompt = min(options.max_input_len, longest)
    quantization = options.quant_algo or options.quantize
    fraction = options.kv_cache_free_gpu_mem_fraction
    return Conditions(
        gpu_memory=gpu_memory,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        dtype=weight_dtype(config, shape, compute_capability, compiled=compiled),
        quantization=None if quantization is None else quantization.value,
        kv_dtype=_kv_dtype(config),
        fraction=FREE_MEMORY_FRACTION if fraction is None else fraction,
        max_batch_size=options.max_num_sequences or options.max_rolling_batch_size,
        max_input_len=longest_prompt,
        max_output_len=max(1, longest - longest_prompt),
        max_beam_width=options.max_beam_width,
        attention_windows=options.max_attention_window,
        draft=draft,
        lora=_lora(config),
        backend="tensorrt" if compiled else "vllm" if options.backend is Backend.VLLM else "pytorch",
        utilization=_VLLM_SHARE if options.gpu_memory_utilization is None else options.gpu_memory_utilization,
    )


def weight_dtype(
    config: Config, shape: ModelShape, compute_capability: tuple[int, int] | None, *, compiled: bool
) -> str | None:
    """Return the type that TensorRT-LLM makes of `auto`: no bfloat16 on old GPUs, no engine in 32 bits."""
    if config.options.dtype is not DType.AUTO:
        return _DTYPES[config.options.dtype]
    if shape.dtype == "bfloat16" and (compute_capability or _BFLOAT16_SINCE) < _BFLOAT16_SINCE:
        return "float16"
    return "float16" if shape.dtype == "float32" and compiled else shape.dtype


def _kv_dtype(config: Config) -> str | None:
    options = config.options
    if options.kv_cache_quant_algo is not None:
        return options.kv_cache_quant_algo.value.lower()
    # Sixteen bits are the weights' own, whatever fp16 says.
    small = options.kv_cache_dtype in (KvCacheDType.FP8, KvCacheDType.INT8)
    return options.kv_cache_dtype.value if small else None


def _lora(config: Config) -> LoraSlots | None:
    options = config.options
    if not options.enable_lora:
        return None
    share = options.lora_cache_gpu_memory_fraction
    slots = LoraSlots(adapters=0, rank=options.max_lora_rank, free_share=share)
    return slots if options.lora_target_modules is None else replace(slots, modules=options.lora_target_modules)


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
        """Return whether a model has these sizes. Falcon's config.json lacks one, which decides nothing."""
        known = (
            (self.layers, shape.num_layers),
            (self.hidden, shape.hidden),
            (self.heads, shape.num_heads),
            (self.vocabulary, shape.vocab_size),
        )
        optional = ((self.kv_heads, shape.num_kv_heads), (self.intermediate, shape.intermediate))
        return (
            all(own == other for own, other in known)
            and all(other in (None, own) for own, other in optional)
            and experts == self.experts
        )


@dataclass(frozen=True)
class MeasuredRow:
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


def _rows() -> dict[str, tuple[MeasuredRow, ...]]:
    table = read_table("measured.toml", __package__)
    models = {name: MeasuredModel(name, **sizes) for name, sizes in table["models"].items()}
    return {
        lmi: tuple(
            MeasuredRow(
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


TABLES: Mapping[str, tuple[MeasuredRow, ...]] = MappingProxyType(_rows())
"""The rows by LMI's version."""


def look_up(
    shape: ModelShape,
    experts: int,
    dtype: str | None,
    machine: Instance | GpuModel,
    tensor_parallel: int,
    lmi: str = DEFAULT_LMI,
) -> MeasuredRow | None:
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


_GIB = 1 << 30


@dataclass(frozen=True)
class Recommendation:
    """`row` is the measurement, if there is one; it overrides the estimate. `gpu` names the GPUs for readers.

    `wanted` is the max_num_tokens that a user has set, which is sized as it is.
    """

    estimate: Estimate
    row: MeasuredRow | None
    gpu: str
    wanted: int | None = None

    @cached_property
    def maximum(self) -> int:
        """The largest max_num_tokens that fits; 0: out of memory."""
        return self.estimate.max_num_tokens if self.row is None else self.row.max_num_tokens or 0

    @property
    def fits(self) -> bool:
        return self.maximum >= (self.wanted or 1)

    @property
    def max_num_tokens(self) -> int:
        """The user's number, else a measured one as it stands, else half of the estimate; the last two at most 16,384.

        0 if nothing fits.
        """
        if self.wanted is not None:
            return self.wanted
        return min(MOST, self.maximum if self.row is not None else self.maximum // 2)

    @property
    def origin(self) -> str:
        """Return where the number comes from."""
        if self.wanted is not None:
            where = f"half of the estimate of {self.maximum}" if self.row is None else str(self.row)
            own = ", or vLLM's own" if self.estimate.conditions.backend == "vllm" else ""
            return f"option.max_num_tokens{own}; recommended is {replace(self, wanted=None).max_num_tokens}, {where}"
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
        """The reason, with the numbers, for which the model cannot run there; None if it can."""
        if self.fits:
            return None
        if self.wanted is not None and self.maximum:
            source = "the estimate" if self.row is None else self.row
            return (
                f"option.max_num_tokens={self.wanted} is above the largest that fits on {self.place}, {self.maximum} "
                f"by {source}: lower it, or leave it out"
            )
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
    """The recommendation for a model under these conditions. `machine` is None for GPUs that are not in the table,
    which `gpu` then names. Raises SizingError.

    Rows are of plain models on TensorRT-LLM: neither quantised nor spread over groups of GPUs, without beams, adapters
    and drafts.
    """
    dtype = conditions.dtype or sizes.shape.dtype
    plain = conditions.pipeline_parallel == conditions.max_beam_width == 1 and not (conditions.lora or conditions.draft)
    unquantised = conditions.quantization is None and sizes.quantization is None
    row = None
    if machine is not None and plain and unquantised and conditions.backend != "vllm":
        row = look_up(sizes.shape, sizes.experts, dtype, machine, conditions.tensor_parallel, lmi)
    if gpu is None and machine is not None:
        gpu = machine.gpu.name if isinstance(machine, Instance) else machine.name
    return Recommendation(Estimate(sizes, conditions), row, gpu or "GPUs")
