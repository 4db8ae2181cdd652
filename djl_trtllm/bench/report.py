"""The result for people, as a table and sentences, and for programs."""

from __future__ import annotations

import math
from typing import Any

from djl_trtllm.bench.figures import Distribution, Figures
from djl_trtllm.bench.session import Result
from djl_trtllm.bench.sweep import SHARE
from djl_trtllm.version import __version__


def seconds(value: float) -> str:
    """A duration with a unit and three digits."""
    if math.isnan(value):
        return "-"
    if value >= 1:
        return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"
    return f"{1000 * value:.3g} ms"


def _pair(values: Distribution) -> str:
    return f"{seconds(values.percentile(0.5))} / {seconds(values.percentile(0.99))}"


def number(value: float) -> str:
    """Three digits or more, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(result: Result) -> list[list[str]]:
    """Rows of cells; the first row has the names of the columns."""
    head = ["load", "tok/s", "req/s", "TTFT p50 / p99", "ITL p50 / p99", "E2E p50 / p99", "requests", "failed"]
    objectives = any(figures.objectives for figures in result.figures)
    return [head + ["goodput"] * objectives] + [_row(figures, objectives) for figures in result.figures]


def _row(figures: Figures, objectives: bool) -> list[str]:
    cells = [
        figures.label,
        number(figures.tokens_per_second),
        number(figures.requests_per_second),
        *map(_pair, (figures.ttft, figures.itl, figures.e2e)),
        f"{figures.sent:,}",
        f"{figures.failed:,}" + (f" (+{figures.unfinished:,} unfinished)" if figures.unfinished else ""),
    ]
    goodput = f"{100 * figures.goodput:.1f} %, {number(figures.good / figures.seconds)} req/s"
    return [*cells, goodput] if objectives else cells


def conclusion(result: Result) -> list[str]:
    """What the sweep found, and the errors."""
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
    """How the tokens were counted."""
    kinds = {kind.value for figures in result.figures for kind in figures.counted}
    return "How tokens are counted: " + "; ".join(sorted(kinds)) + "." if kinds else ""


def as_json(result: Result) -> dict[str, Any]:
    plan, sweep = result.plan, result.sweep
    scheme = "https" if plan.target.tls else "http"
    return {
        "version": __version__,
        "server": f"{scheme}://{plan.target.host}:{plan.target.port}{plan.target.prefix}",
        "api": plan.api,
        "model": result.model,
        "dataset": plan.dataset,
        "prompt_tokens": plan.prompt_tokens if plan.dataset == "synthetic" else None,
        "output_tokens": plan.output_tokens if plan.dataset != "sharegpt" else None,
        "interrupted": result.interrupted,
        "notes": result.notes,
        "warnings": result.warnings,
        "knee": None
        if sweep is None
        else {"concurrency": sweep.knee, "capacity_output_tokens_per_second": sweep.capacity},
        "loads": [figures.as_json() for figures in result.figures],
    }
