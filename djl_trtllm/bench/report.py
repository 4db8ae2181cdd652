"""Report a result: a table and sentences, JSON, and a page with charts."""

import importlib.util
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from djl_trtllm.bench.figures import Distribution, Figures
from djl_trtllm.bench.session import SHARE, Plan, Progress, Result
from djl_trtllm.errors import BenchmarkError
from djl_trtllm.listing import number, seconds
from djl_trtllm.version import __version__

_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
"""Paul Tol's "bright", which the colour-blind can distinguish."""
_PAGE = Path(__file__).with_name("report.html")


LATENCIES = "Latencies are median/p99."


def table(result: Result) -> list[list[str]]:
    """Return rows of cells; the first row has the names of the columns. It fits a terminal of 80 columns."""
    found = result.figures
    columns = {
        "clients" if all(figures.rate is None for figures in found) else "rate": [
            f"{figures.concurrency if figures.rate is None else figures.rate:g}" for figures in found
        ],
        "tok/s": [number(figures.tokens_per_second) for figures in found],
        "req/s": [number(figures.requests_per_second) for figures in found],
    }
    for part in ("ttft", "itl", "e2e"):
        unit, values = _latencies([getattr(figures, part) for figures in found])
        columns[f"{part.upper()} {unit}"] = values
    columns["sent"] = [f"{figures.sent:,}" for figures in found]
    columns["failed"] = [f"{figures.failed:,}" for figures in found]
    if any(figures.accepted_share is not None for figures in found):
        columns["accepted"] = [f"{100 * (figures.accepted_share or 0):.0f} %" for figures in found]
    return [[*columns], *(list(row) for row in zip(*columns.values(), strict=True))]


def _latencies(found: Sequence[Distribution]) -> tuple[str, list[str]]:
    """Return the unit of a column, and its median and 99th percentile for each load."""
    pairs = [(values.percentile(0.5), values.percentile(0.99)) for values in found]
    in_seconds = any(high >= 1 for _, high in pairs)
    factor = 1 if in_seconds else 1000
    return ("s" if in_seconds else "ms"), [f"{_short(factor * p50)}/{_short(factor * p99)}" for p50, p99 in pairs]


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 1 else number(value)


def conclusion(result: Result) -> list[str]:
    """Return sentences: the result of the sweep, and the errors."""
    lines = []
    sweep = result.sweep
    if sweep is not None and sweep.knee is not None:
        at = sweep.points[sweep.knee]
        lines.append(
            f"Knee: {at.label}, with {number(at.tokens_per_second)} tok/s, at least {100 * SHARE:.0f} % "
            f"of the {number(sweep.capacity)} tok/s that the server reaches; more clients wait longer."
        )
    elif sweep is not None and sweep.points:
        lines.append("No knee was found: " + _why_not(result))
    for figures in result.figures:
        for kind, count in figures.errors.most_common():
            detail = figures.details.get(kind, "").strip()
            lines.append(f"{figures.label}: {count:,} failed: {kind}" + (f": {detail}" if detail else ""))
    return lines


def _why_not(result: Result) -> str:
    assert result.sweep is not None
    if result.interrupted:
        return "the sweep was interrupted."
    if not all(figures.complete for figures in result.figures):
        return "every request failed."
    return f"throughput still grows with {max(result.sweep.points)} clients; see --max-concurrency."


def counting(result: Result) -> str:
    """Return a sentence that says how the tokens were counted."""
    kinds = {kind.value for figures in result.figures for kind in figures.counted}
    return "How tokens are counted: " + "; ".join(sorted(kinds)) + "." if kinds else ""


def server_of(plan: Plan) -> str:
    """The server's address, without a key."""
    scheme = "https" if plan.target.tls else "http"
    return f"{scheme}://{plan.target.host}:{plan.target.port}{plan.target.prefix}"


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """The properties that the requests of all loads share."""
    return {
        "version": __version__,
        "api": plan.api,
        "dataset": plan.dataset,
        "prompt_tokens": plan.prompt_tokens if plan.dataset == "synthetic" else None,
        "output_tokens": plan.output_tokens,
    }


def as_json(result: Result) -> dict[str, Any]:
    sweep = result.sweep
    return {
        **plan_as_json(result.plan),
        "server": server_of(result.plan),
        "model": result.model,
        "interrupted": result.interrupted,
        "notes": result.notes,
        "warnings": result.warnings,
        "knee": None
        if sweep is None
        else {"concurrency": sweep.knee, "capacity_output_tokens_per_second": sweep.capacity},
        "loads": [figures.as_json() for figures in result.figures],
    }


def describe(progress: Progress) -> str:
    """Return what a load does while it runs, in one line."""
    figures = progress.figures
    parts = [
        f"{progress.load.label}: {progress.phase} {max(0.0, progress.since):.0f} s",
        f"{progress.in_flight} in flight",
        f"{figures.succeeded:,} done",
        f"{number(progress.tokens_per_second)} tok/s",
    ]
    if figures.ttft.count:
        parts.append(f"TTFT p50 {seconds(figures.ttft.percentile(0.5))}")
    if figures.failed:
        parts.append(f"{figures.failed:,} failed")
    return ", ".join(parts)


def page(result: Result) -> str:
    """Return the report as one HTML file without scripts and addresses; the figures are in it as JSON.

    Raises BenchmarkError where charts cannot be drawn.
    """
    from jinja2 import Environment

    data = as_json(result)
    drawn = charts(result)
    head, *rows = table(result)
    template = Environment(autoescape=True, trim_blocks=True).from_string(_PAGE.read_text(encoding="utf-8"))
    return template.render(
        data=data,
        sentences=[line for line in (LATENCIES, counting(result), *conclusion(result)) if line],
        warnings=[*result.warnings, *result.notes],
        head=head,
        rows=rows,
        picture=picture(drawn) if drawn else "",
        figures=orjson.dumps(data, option=orjson.OPT_INDENT_2).decode(),
    )


# -- charts ------------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A line of a chart; `labels`, one for each point, stand beside dots. With `steps` it keeps its height between."""

    name: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()
    steps: bool = False


class Chart(NamedTuple):
    """A chart of lines: `x` and `y` name its axes, `log` has the logarithmic ones. `knee` is a marked value of `x`."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log: str = ""
    knee: float | None = None


def charts(result: Result) -> list[Chart]:
    """Throughput and latency against the load where there are several, distributions, and what happened over time."""
    found = result.figures
    if not found:
        return []
    several = len(found) > 1
    # As many as there are colours, from the first to the last.
    step = max(1, (len(found) - 1) / (len(_COLOURS) - 1))
    shown = [found[round(index * step)] for index in range(min(len(found), len(_COLOURS)))]
    drawn = _by_load(result) if several else []
    for name, part in {"Time to first token": "ttft", "Inter-token latency": "itl", "Whole request": "e2e"}.items():
        if part != "e2e" or not several:
            lines = [Line(figures.label, getattr(figures, part).steps(), steps=True) for figures in shown]
            drawn.append(Chart(f"{name}: share of values up to", "seconds", "share", lines, log="x"))
    tokens, firsts = [], []
    for figures in shown:
        times = figures.timeline.as_json()
        width = times["seconds_per_bin"]
        # The last bin may have only a part of its time.
        rates = times["tokens_per_second"][: max(1, int(figures.seconds / width))]
        waits = [math.nan if value is None else value for value in times["ttft_mean_seconds"]]
        tokens.append(Line(figures.label, [(index * width, rate) for index, rate in enumerate(rates)]))
        firsts.append(Line(figures.label, [(index * width, wait) for index, wait in enumerate(waits)]))
    x = "seconds since the measurement began"
    return [
        *drawn,
        Chart("Output tokens per second", x, "tokens per second", tokens),
        Chart("Mean time to first token, by when requests were due", x, "seconds", firsts),
    ]


def _by_load(result: Result) -> list[Chart]:
    found, sweep = result.figures, result.sweep
    closed = found[0].rate is None
    loads = [float((figures.concurrency if closed else figures.rate) or 0) for figures in found]
    names = [f"{load:g}" for load in loads]
    x = "clients" if closed else "requests per second that were sent"

    def line(name: str, across: list[float], value: Callable[[Figures], float], labels: Sequence[str] = ()) -> Line:
        return Line(name, list(zip(across, map(value, found), strict=True)), labels)

    speeds = [figures.tokens_per_second for figures in found]
    throughput = line("output tokens", loads, lambda figures: figures.tokens_per_second, names)
    latencies = [
        line("TTFT p50", speeds, lambda figures: figures.ttft.percentile(0.5), names),
        line("TTFT p99", speeds, lambda figures: figures.ttft.percentile(0.99)),
        line("ITL p50", speeds, lambda figures: figures.itl.percentile(0.5)),
    ]
    knee = None if sweep is None else sweep.knee
    return [
        Chart("Throughput", x, "tokens per second", [throughput], log="x" if closed else "", knee=knee),
        Chart("Latency against throughput", "output tokens per second", "seconds", latencies, log="y"),
    ]


def require_chart(flag: str, path: Path) -> None:
    """Raise BenchmarkError where the charts that a flag asks for cannot be drawn or written, before anything runs."""
    if not path.parent.is_dir():
        raise BenchmarkError(f"{flag} {path}: there is no folder {path.parent}")
    require_matplotlib()


def write_chart(flag: str, path: Path, text: str) -> None:
    """Write a report or picture. Raises BenchmarkError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BenchmarkError(f"{flag} {path}: cannot write it: {error.strerror}") from None


def require_matplotlib() -> None:
    """Raise BenchmarkError where charts cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchmarkError("charts need matplotlib: pip install 'djl-trtllm[plot]'")


def picture(drawn: Sequence[Chart]) -> str:
    """Return charts as an element of SVG, two in a row; the same data gives the same text."""
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    columns, rows = min(2, len(drawn)), math.ceil(len(drawn) / 2)
    # Text stays text, and ids do not depend on the time.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "bench"}):
        figure = Figure(figsize=(7 * columns, 4 * rows), layout="constrained")
        FigureCanvasSVG(figure)
        places = figure.subplots(rows, columns, squeeze=False).flat
        for axes, chart in zip(places, drawn, strict=False):
            _draw(axes, chart)
        for axes in places[len(drawn) :]:
            axes.set_axis_off()
        text = io.StringIO()
        figure.savefig(text, metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _draw(axes: Any, chart: Chart) -> None:
    axes.set_title(chart.title, loc="left")
    axes.set(xlabel=chart.x, ylabel=chart.y)
    axes.grid(axis="y", alpha=0.4)
    axes.set_prop_cycle(color=_COLOURS)
    for name, ticks in (("x", axes.xaxis), ("y", axes.yaxis)):
        if name in chart.log:
            axes.set(**{f"{name}scale": "log"})
        ticks.set_major_formatter("{x:,.10g}")
    for line in chart.lines:
        across, up = zip(*line.points, strict=True) if line.points else ((), ())
        style = "steps-post" if line.steps else "default"
        axes.plot(across, up, label=line.name, drawstyle=style, marker="o" if line.labels else None)
        for point, label in zip(line.points, line.labels, strict=False):
            if all(map(math.isfinite, point)):
                axes.annotate(label, point, xytext=(4, 4), textcoords="offset points", fontsize="small")
    if "y" not in chart.log:
        axes.set_ylim(bottom=0)
    if chart.knee is not None:
        axes.axvline(chart.knee, color=_COLOURS[1], linestyle="--")
        axes.annotate("knee", (chart.knee, 0.02), xycoords=("data", "axes fraction"), ha="right")
    if chart.lines:
        axes.legend(fontsize="small")
