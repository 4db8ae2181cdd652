"""The picture of `djl-trtllm size --plot`: where the memory goes, and what max_num_tokens costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from djl_trtllm.errors import SizingError

if TYPE_CHECKING:
    from djl_trtllm.commands.size_report import Report

_FORMATS = (".png", ".svg")
_GIB = 1 << 30
_POINTS = 96
_LEAST = 256
_PARTS = {
    "weights": ("weights", "#4477aa"),
    "activations": ("activations", "#ee6677"),
    "communication": ("communication", "#aa3377"),
    "overhead": ("overhead", "#ccbb44"),
    "kv_cache": ("KV cache", "#228833"),
    "unused": ("unused", "#d5d5d5"),
}
"""Names and colours; the colours are Paul Tol's "bright", which the colour-blind can distinguish."""


def draw(path: Path, report: Report) -> None:
    """Write the picture. Raises SizingError if matplotlib is missing, or for another kind of file."""
    if path.suffix.lower() not in _FORMATS:
        raise SizingError(f"--plot {path}: expected a name that ends with {' or '.join(_FORMATS)}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise SizingError("--plot needs matplotlib: pip install 'djl-trtllm[plot]'") from None
    figure = Figure(figsize=(11 if report.found.fits else 7.5, 5.6), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(report), fontsize=12, color="black")
    if report.found.fits:
        memory, capacity = figure.subplots(1, 2, width_ratios=(1, 1.5))
        _draw_capacity(capacity, report)
    else:
        memory = figure.subplots()
    _draw_memory(memory, report)
    try:
        figure.savefig(path, dpi=144, facecolor="white")
    except OSError as error:
        raise SizingError(f"--plot {path}: cannot write it: {error}") from error


def _title(report: Report) -> str:
    conditions = report.found.estimate.conditions
    name = Path(report.request.sizes.source).name or report.request.sizes.source
    quantised = f", {conditions.quantization}" if conditions.quantization else ""
    return f"{name}{quantised} on {report.machine}, tensor parallel {conditions.tensor_parallel}"


def _draw_memory(axes: Any, report: Report) -> None:
    """One bar of what each GPU holds; small parts have their number beside the bar only."""
    total = report.found.estimate.conditions.gpu_memory
    bottom = 0.0
    beside: list[tuple[float, str]] = []
    for part, size in report.memory.items():
        label, colour = _PARTS[part]
        height = size / _GIB
        if not size:
            continue
        axes.bar(0, height, bottom=bottom, width=0.7, color=colour, edgecolor="white", linewidth=1)
        beside.append((bottom + height / 2, f"{label}  {height:.2f} GiB  ({100 * size / total:.1f} %)"))
        bottom += height
    top = max(bottom, total / _GIB)
    for position, (height, text) in zip(_apart([at for at, _ in beside], top), beside, strict=True):
        axes.annotate(
            text,
            (0.35, height),
            (0.5, position),
            va="center",
            fontsize=9.5,
            arrowprops={"arrowstyle": "-", "color": "#888888", "linewidth": 0.8, "relpos": (0, 0.5)},
        )
    axes.plot((-0.4, 0.4), (total / _GIB, total / _GIB), color="black", linewidth=1.2, linestyle="--")
    axes.annotate(
        f"GPU  {total / _GIB:.1f} GiB",
        (0, total / _GIB),
        (0, 5),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=9.5,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )
    axes.set(xlim=(-0.4, 1.75), ylim=(0, top * 1.09), xticks=[], ylabel="GiB of each GPU")
    axes.set_title(f"memory at max_num_tokens {report.tokens:,}" if report.tokens else "out of memory", fontsize=11)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _apart(heights: list[float], top: float) -> list[float]:
    """Positions of labels in the order of `heights`, far enough from each other to be read, and below `top`."""
    step = top / 18
    positions: list[float] = []
    for height in heights:
        positions.append(max(height, positions[-1] + step) if positions else height)
    ceiling = top * 1.04
    for index in range(len(positions) - 1, -1, -1):
        positions[index] = min(positions[index], ceiling)
        ceiling = positions[index] - step
    return positions


def _draw_capacity(axes: Any, report: Report) -> None:
    """Tokens and sequences that the KV cache holds, by max_num_tokens."""
    estimate, chosen = report.found.estimate, report.tokens
    most = max(report.found.maximum, estimate.max_num_tokens, 2 * _LEAST, chosen)
    tokens = sorted({round(_LEAST * (most / _LEAST) ** (step / (_POINTS - 1))) for step in range(_POINTS)})
    held = [estimate.kv_tokens(count) for count in tokens]
    axes.plot(tokens, held, color=_PARTS["kv_cache"][1], linewidth=2)
    axes.fill_between(tokens, held, color=_PARTS["kv_cache"][1], alpha=0.12)
    axes.axvline(chosen, color="black", linewidth=1.2)
    end = chosen > (most * _LEAST) ** 0.5
    axes.annotate(
        f"max_num_tokens {chosen:,}\n{report.kv_tokens:,} tokens in the KV cache\n"
        f"{report.sequences:,} sequences of {report.request.length:,}",
        (chosen, max(held) * 0.06),
        (-8 if end else 8, 0),
        textcoords="offset points",
        ha="right" if end else "left",
        fontsize=9.5,
        bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": "#bbbbbb"},
    )
    source = "measured" if report.found.row is not None else "estimated"
    axes.axvline(report.found.maximum, color=_PARTS["activations"][1], linewidth=1.2, linestyle="--")
    axes.annotate(
        f"largest, {source}: {report.found.maximum:,}",
        (report.found.maximum, max(held) * 1.04),
        (-6, 0),
        textcoords="offset points",
        ha="right",
        fontsize=9.5,
        color="#b03048",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )
    axes.set_xscale("log", base=2)
    axes.set(xlim=(tokens[0], most * 1.15), ylim=(0, max(held) * 1.15 or 1))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.tick_params(axis="x", rotation=30, labelsize=9)
    axes.set_xlabel("max_num_tokens")
    axes.set_ylabel("tokens in the KV cache")
    length = report.request.length
    second = axes.secondary_yaxis("right", functions=(lambda held: held / length, lambda count: count * length))
    second.set_ylabel(f"sequences of {length:,} tokens")
    axes.set_title("capacity by max_num_tokens", fontsize=11)
    axes.grid(color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top"]].set_visible(False)
