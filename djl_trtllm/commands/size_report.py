"""The answer of `djl-trtllm size` about one model on one machine, with its picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from djl_trtllm.commands.size_request import WIDENED, WIDENED_BATCH, SizeRequest
from djl_trtllm.errors import SizingError
from djl_trtllm.listing import columns
from djl_trtllm.sizing.estimate import Conditions, warnings_of
from djl_trtllm.sizing.machines import PRICES, Machine
from djl_trtllm.sizing.recommendation import Recommendation
from djl_trtllm.sizing.speed import Speed

_GIB = 1 << 30
_FP8_SINCE = (8, 9)
_ENGINES = {"tensorrt": "TensorRT engine", "pytorch": "PyTorch", "vllm": "vLLM"}
_DEGREES = (1, 2, 4, 8)


def degrees_of(machine: Machine, request: SizeRequest, wanted: Sequence[int] = ()) -> list[int]:
    """The degrees that the machine has the GPUs for and that divide the model's heads; `wanted` limits them."""
    heads, gpus = request.sizes.shape.num_heads or 1, machine.gpus
    return [degree for degree in wanted or _DEGREES if heads % degree == 0 and (gpus is None or degree <= gpus)]


@dataclass(frozen=True)
class SizeReport:
    """The answer about one model on one machine."""

    request: SizeRequest
    machine: Machine
    found: Recommendation
    speed: Speed | None = None
    copies: int = 1
    """Copies of the model on the machine's GPUs, which share the clients; `speed` is that of one."""
    wanted: int | None = None
    """The sequences that are to fit."""

    @property
    def answered(self) -> bool:
        """Whether the model fits, with the sequences that are wanted."""
        return self.found.fits and self.sequences >= (self.wanted or 0)

    @property
    def tokens(self) -> int:
        return self.found.max_num_tokens

    @cached_property
    def conditions(self) -> Conditions:
        return self.found.estimate.conditions

    @property
    def tensor_parallel(self) -> int:
        return self.conditions.tensor_parallel

    @property
    def price(self) -> float | None:
        return self.machine.hourly_price

    @property
    def throughput(self) -> float:
        """The output tokens per second of all copies; 0 where no speed is known."""
        return 0.0 if self.speed is None else self.copies * self.speed.tokens_per_second

    @property
    def loads(self) -> bool:
        """Whether the host's memory holds the checkpoint, which is read into it before it is on the GPUs."""
        memory = self.machine.host_memory
        return memory is None or memory > self.request.sizes.bytes

    @cached_property
    def memory(self) -> dict[str, int]:
        """Bytes of each GPU by part; they add up to its memory, or to more where it does not fit."""
        estimate = self.found.estimate
        parts = {
            "weights": estimate.weights,
            "activations": estimate.activations(self.tokens) + estimate.logits,
            "communication": estimate.communication,
            "overhead": estimate.overhead,
            "kv_cache": estimate.kv_bytes(self.tokens) if self.found.fits else 0,
        }
        return parts | {"unused": max(0, estimate.conditions.gpu_memory - sum(parts.values()))}

    @property
    def kv_tokens(self) -> int:
        return self.found.estimate.kv_tokens(self.tokens) if self.found.fits else 0

    @cached_property
    def sequences(self) -> int:
        return self.found.estimate.sequences_of(self.request.length, self.tokens) if self.found.fits else 0

    @cached_property
    def settings(self) -> dict[str, str]:
        """The options to paste, with the limits that max_num_tokens raises."""
        if not self.found.fits:
            return {}
        request = self.request
        degrees = {"tensor_parallel_degree": str(self.tensor_parallel)}
        if self.conditions.pipeline_parallel > 1:
            degrees["pipeline_parallel_degree"] = str(self.conditions.pipeline_parallel)
        known = (*degrees, "max_input_len", "max_output_len")
        floor = min(WIDENED, self.tokens)
        return {
            **degrees,
            **{name: value for name, value in request.settings.items() if name not in known},
            "max_num_tokens": str(self.tokens),
            "max_input_len": str(max(floor, request.input_len)),
            "max_output_len": str(max(floor, request.output_len)),
            "max_rolling_batch_size": str(max(WIDENED_BATCH, request.config.options.max_rolling_batch_size)),
            **({"enable_chunked_prefill": "true"} if self.tokens < request.input_len else {}),
        }

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Warnings with numbers and what to do; those about the machine and `wanted` come last."""
        capability, wanted = self.machine.compute_capability, self.wanted or 0
        shortened = () if self.request.shortened is None else (self.request.shortened,)
        old = self.conditions.quantization == "fp8" and capability is not None and capability < _FP8_SINCE
        without = f"{self.machine.gpu} does not compute in FP8: option.quantize=fp8 needs an L4, an H100 or later"
        few = f"{wanted} sequences of {self.request.length} tokens do not fit, {self.sequences} do"
        about = (*([without] if old else ()), *self.machine.remarks, *([few] if self.sequences < wanted else ()))
        return (*shortened, *self._of_estimate, *about)

    @property
    def _of_estimate(self) -> tuple[str, ...]:
        if self.found.refusal is not None:
            return (f"{self.request.sizes.source} does not fit: {self.found.refusal}", *self._remedies)
        if self.found.row is not None and self.found.estimate.max_num_tokens == 0:
            return ("the estimate says out of memory where the table has a measurement; the measurement is used",)
        return warnings_of(self.found.estimate, self.tokens)

    @property
    def _remedies(self) -> list[str]:
        """Return changes with which the model fits, tried out."""
        for degree in degrees_of(self.machine, self.request):
            if self.request.on(self.machine, degree).fits:
                return [f"it fits with --tp {degree}"]
        compare = "use a machine with more memory: djl-trtllm size MODEL --compare shows which ones hold it"
        return [] if self.machine.gpus is None else [compare]

    def summary(self) -> dict[str, Any]:
        """The machine and what fits there, as JSON."""
        found, machine = self.found, self.machine
        return {
            "machine": {
                "name": machine.name,
                "gpu": machine.gpu,
                "gpus": machine.gpus,
                "gpu_memory": machine.memory,
                "usd_per_hour": self.price,
                "price": None if self.price is None else str(PRICES),
            },
            "tensor_parallel": self.tensor_parallel,
            "fits": found.fits,
            "max_num_tokens": found.max_num_tokens or None,
            "origin": found.origin if found.fits else None,
            "kv_tokens": self.kv_tokens,
        }

    def as_json(self) -> dict[str, Any]:
        request, found = self.request, self.found
        sizes, estimate, row = request.sizes, found.estimate, found.row
        shape = sizes.shape
        return {
            "model": {
                "source": sizes.source,
                "parameters": sizes.parameters,
                "bytes": sizes.bytes,
                "exact": sizes.exact,
                "quantization": sizes.quantization,
                "layers": shape.num_layers,
                "hidden_size": shape.hidden,
                "heads": shape.num_heads,
                "kv_heads": shape.num_kv_heads,
                "vocabulary": shape.vocab_size,
                "experts": sizes.experts,
            },
            **self.summary(),
            "pipeline_parallel": self.conditions.pipeline_parallel,
            "largest_max_num_tokens": found.maximum,
            "estimated_largest_max_num_tokens": estimate.max_num_tokens,
            "measured": None if row is None else {"row": str(row), "max_num_tokens": row.max_num_tokens},
            "memory_per_gpu": self.memory,
            "kv_bytes_per_token": estimate.kv_bytes_per_token,
            "sequences": {"input": request.input_len, "output": request.output_len, "count": self.sequences},
            "speed": None if self.speed is None else self.speed.as_json(self.price),
            "options": {f"option.{name}": value for name, value in self.settings.items()},
            "warnings": list(self.warnings),
        }

    def lines(self) -> list[str]:
        """The report for people, without warnings; the lines to paste are its end."""
        speed = [] if self.speed is None else self.speed.lines(self.price)
        parts = [self._model_lines(), self._memory_lines(), self._capacity_lines(), speed, self._option_lines()]
        return [line for part in parts if part for line in ("", *part)][1:]

    def _model_lines(self) -> list[str]:
        sizes, conditions, price = self.request.sizes, self.conditions, self.price
        shape, count = sizes.shape, sizes.parameters
        number = f"{count / 1e9:.2f} billion" if count >= 10**9 else f"{count / 1e6:.1f} million"
        stored = sizes.quantization or shape.dtype
        first = [
            f"{sizes.source}: {number} parameters{f' in {stored}' if stored else ''}",
            f"{_gib(sizes.bytes)} GiB",
            *([] if sizes.exact else ["counted from config.json"]),
            *([f"quantised with {conditions.quantization}"] if conditions.quantization else []),
        ]
        second = [
            f"  {shape.num_layers} layers",
            f"hidden size {shape.hidden}",
            f"{shape.num_heads} heads of which {shape.num_kv_heads} in the KV cache",
            f"vocabulary {shape.vocab_size}",
            *([f"{sizes.experts} experts"] if sizes.experts else []),
        ]
        cost = "" if price is None else f", {price:.2f} USD per hour"
        third = [
            f"on {self.machine}{cost}; tensor parallel {conditions.tensor_parallel}",
            *([f"pipeline parallel {conditions.pipeline_parallel}"] if conditions.pipeline_parallel > 1 else []),
            _ENGINES[conditions.backend],
        ]
        return [", ".join(first), ", ".join(second), ", ".join(third)]

    def _memory_lines(self) -> list[str]:
        conditions = self.conditions
        total, needed = conditions.gpu_memory, sum(self.memory.values())
        notes = {
            "activations": f"for max_num_tokens {self.tokens}" if self.tokens else "",
            "kv_cache": f"in {conditions.utilization:g} of the GPU"
            if conditions.backend == "vllm"
            else f"{conditions.fraction:g} of what the others leave",
        }
        rows = [("memory of each GPU", "GiB", "share", "")]
        for part, size in self.memory.items():
            name = "KV cache" if part == "kv_cache" else part
            rows.append((name, _gib(size), f"{100 * size / total:.1f} %", notes.get(part, "")))
        if needed > total:
            rows.append(("needed", _gib(needed), "", ""))
        rows.append(("the GPU has", _gib(total), "", ""))
        return columns(rows, right=(1, 2))

    def _capacity_lines(self) -> list[str]:
        estimate, request, found = self.found.estimate, self.request, self.found
        if not found.fits:
            return [f"max_num_tokens: none fits; the KV cache takes {estimate.kv_bytes_per_token:,} bytes per token"]
        lines = [
            f"KV cache: {estimate.kv_bytes_per_token:,} bytes per token and GPU, {self.kv_tokens:,} tokens: "
            f"{self.sequences} sequences of {request}",
            f"max_num_tokens: {self.tokens}, from {found.origin}",
        ]
        if found.row is not None:
            lines.append(
                f"  the estimate of the largest one is {estimate.max_num_tokens}, the table has {found.maximum}"
            )
        return lines

    def _option_lines(self) -> list[str]:
        if not self.settings:
            return []
        return [
            "# For serving.properties. max_num_tokens raises the lengths to 4096, and the",
            "# batch to 256, at least. Without it the server finds the number itself.",
            *(f"option.{name}={value}" for name, value in self.settings.items()),
        ]


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f}"


# -- the picture -------------------------------------------------------------------------------------------------------

_FORMATS = (".png", ".svg")
_POINTS = 96
_LEAST = 256
_COLOURS = {
    "weights": "#4477aa",
    "activations": "#ee6677",
    "communication": "#aa3377",
    "overhead": "#ccbb44",
    "kv_cache": "#228833",
    "unused": "#d5d5d5",
}
"""Colours of the parts of the memory: Paul Tol's "bright", which the colour-blind can distinguish."""


def draw(path: Path, report: SizeReport) -> None:
    """Write the picture. Raises SizingError if matplotlib is missing, or for another kind of file."""
    if path.suffix.lower() not in _FORMATS:
        raise SizingError(f"--plot {path}: expected a name that ends with {' or '.join(_FORMATS)}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise SizingError("--plot needs matplotlib: pip install 'djl-trtllm[plot]'") from None
    fits, conditions = report.found.fits, report.conditions
    figure = Figure(figsize=(12 if fits else 7.5, 5.6), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    name = Path(report.request.sizes.source).name or report.request.sizes.source
    quantised = f", {conditions.quantization}" if conditions.quantization else ""
    figure.suptitle(f"{name}{quantised} on {report.machine}, tensor parallel {conditions.tensor_parallel}")
    memory, *capacity = figure.subplots(1, 2 if fits else 1, squeeze=False, width_ratios=(1, 2.5) if fits else None)[0]
    _draw_memory(memory, report)
    for axes in capacity:
        _draw_capacity(axes, report)
    try:
        figure.savefig(path, dpi=144)
    except OSError as error:
        raise SizingError(f"--plot {path}: cannot write it: {error.strerror or error}") from error


def _draw_memory(axes: Any, report: SizeReport) -> None:
    """Draw one bar: the memory of each GPU by part."""
    total = report.conditions.gpu_memory
    bottom = 0.0
    for part, size in report.memory.items():
        if size:
            label = f"{'KV cache' if part == 'kv_cache' else part}  {size / _GIB:.2f} GiB  ({100 * size / total:.1f} %)"
            axes.bar(0, size / _GIB, bottom=bottom, color=_COLOURS[part], edgecolor="white", label=label)
            bottom += size / _GIB
    axes.axhline(total / _GIB, color="black", linestyle="--", label=f"GPU  {total / _GIB:.1f} GiB")
    axes.set(xticks=[], ylabel="GiB of each GPU")
    axes.set_title(f"memory at max_num_tokens {report.tokens:,}" if report.tokens else "out of memory")
    axes.legend(reverse=True, loc="upper center", bbox_to_anchor=(0.5, -0.02), frameon=False)


def _draw_capacity(axes: Any, report: SizeReport) -> None:
    """Draw the tokens and sequences that the KV cache holds, by max_num_tokens."""
    estimate, chosen, largest, length = (
        report.found.estimate,
        report.tokens,
        report.found.maximum,
        report.request.length,
    )
    most = max(largest, estimate.max_num_tokens, 2 * _LEAST, chosen)
    tokens = sorted({round(_LEAST * (most / _LEAST) ** (step / (_POINTS - 1))) for step in range(_POINTS)})
    held = [estimate.kv_tokens(count) for count in tokens]
    source = "measured" if report.found.row is not None else "estimated"
    here = f"max_num_tokens {chosen:,}\n{report.kv_tokens:,} tokens in the KV cache\n{report.sequences:,} sequences"
    axes.fill_between(tokens, held, color=_COLOURS["kv_cache"], alpha=0.3)
    axes.axvline(chosen, color="black", label=f"{here} of {length:,}")
    axes.axvline(largest, color=_COLOURS["activations"], linestyle="--", label=f"largest, {source}: {largest:,}")
    axes.set_xscale("log", base=2)
    axes.set(xlim=(tokens[0], most * 1.15), ylim=(0, max(held) * 1.15 or 1))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="max_num_tokens", ylabel="tokens in the KV cache", title="capacity by max_num_tokens")
    second = axes.secondary_yaxis("right", functions=(lambda held: held / length, lambda count: count * length))
    second.set_ylabel(f"sequences of {length:,} tokens")
    axes.grid(alpha=0.4)
    axes.legend(loc="lower left")
