"""The picture of `djl-trtllm size --plot`: where the memory goes, and what max_num_tokens costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from djl_trtllm.errors import SizingError

if TYPE_CHECKING:
    from djl_trtllm.commands.size_report import SizeReport

_FORMATS = (".png", ".svg")
_GIB = 1 << 30
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
    fits, conditions = report.found.fits, report.found.estimate.conditions
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
        raise SizingError(f"--plot {path}: cannot write it: {error}") from error


def _draw_memory(axes: Any, report: SizeReport) -> None:
    """Draw one bar: the memory of each GPU by part."""
    total = report.found.estimate.conditions.gpu_memory
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
