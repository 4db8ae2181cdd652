"""The report as one HTML file: no script, no address elsewhere; the figures as JSON are in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

import orjson

from djl_trtllm.bench import report
from djl_trtllm.bench.figures import Distribution, Figures
from djl_trtllm.bench.session import Result
from djl_trtllm.bench.svg import Axis, Series, chart

_MOST_LINES = 6
"""In a plot of distributions: as many as there are colours."""
_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:1340px;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse}td,th{padding:.25rem .8rem;text-align:right;border-bottom:1px solid #8884}
td:first-child,th:first-child{text-align:left}.table{overflow-x:auto}.warning{color:#b3541e}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,520px),1fr));gap:1rem;margin:1rem 0}
"""


def page(result: Result) -> str:
    """The document."""
    data = report.as_json(result)
    title = f"{data['model'] or 'Benchmark'} at {data['server']}"
    load = f"API {data['api']}, prompts: {data['dataset']}"
    if data["prompt_tokens"]:
        load += f" of about {data['prompt_tokens']} tokens"
    if data["output_tokens"]:
        load += f", outputs: {data['output_tokens']} tokens"
    head, *rows = report.table(result)
    table = _row("th", head) + "".join(_row("td", row) for row in rows)
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>",
        '<meta name=viewport content="width=device-width,initial-scale=1">',
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1><p>{escape(load)}. {escape(report.counting(result))}</p>",
        *(f"<p>{escape(line)}</p>" for line in report.conclusion(result)),
        *(f"<p class=warning>Warning: {escape(line)}</p>" for line in (*result.warnings, *result.notes)),
        f"<div class=table><table>{table}</table></div>",
        f"<div class=charts>{''.join(plots(result))}</div>",
        "<details><summary>All figures (JSON)</summary><pre>",
        escape(orjson.dumps(data, option=orjson.OPT_INDENT_2).decode()),
        f"</pre></details><p>djl-trtllm {escape(data['version'])}</p></html>",
    ]
    return "".join(parts) + "\n"


def plots(result: Result) -> list[str]:
    """The charts of what was measured."""
    found = result.figures
    if not found:
        return []
    latencies: list[tuple[str, Callable[[Figures], Distribution]]] = [
        ("time to first token", lambda figures: figures.ttft),
        ("inter-token latency", lambda figures: figures.itl),
        ("whole request", lambda figures: figures.e2e),
    ]
    charts = _by_load(result) if len(found) > 1 else []
    shown = _spread(found)
    for name, distribution in latencies[: 2 if len(found) > 1 else 3]:
        lines = [Series(figures.label, distribution(figures).steps(), steps=True) for figures in shown]
        title = f"{name.capitalize()}: share of values up to"
        charts.append(chart(title, Axis("seconds", log=True), Axis("share"), lines))
    return charts + _timelines(shown)


def _by_load(result: Result) -> list[str]:
    """Throughput against latency, and both against the load."""
    found = result.figures
    closed = found[0].rate is None
    names = [f"{figures.concurrency if closed else figures.rate:g}" for figures in found]
    speeds = [figures.tokens_per_second for figures in found]
    x = Axis("clients" if closed else "requests per second that were sent", log=closed)
    loads = [float(name) for name in names]
    knee = result.sweep.knee if result.sweep is not None else None
    marked = (float(knee), "knee") if knee is not None else None
    p50, p99 = ([figures.ttft.percentile(share) for figures in found] for share in (0.5, 0.99))
    gaps = [figures.itl.percentile(0.5) for figures in found]
    return [
        chart(
            "Throughput",
            x,
            Axis("tokens per second", show=report.number),
            [Series("output tokens", list(zip(loads, speeds, strict=True)), names)],
            marked=marked,
        ),
        chart(
            "Latency against throughput",
            Axis("output tokens per second", show=report.number),
            Axis("seconds", log=True),
            [
                Series("TTFT p50", list(zip(speeds, p50, strict=True)), names),
                Series("TTFT p99", list(zip(speeds, p99, strict=True))),
                Series("ITL p50", list(zip(speeds, gaps, strict=True))),
            ],
        ),
    ]


def _timelines(shown: list[Figures]) -> list[str]:
    tokens, firsts = [], []
    for figures in shown:
        line = figures.timeline.as_json()
        width = line["seconds_per_bin"]
        # The last bin may have only a part of its time.
        rates = line["tokens_per_second"][: max(1, int(figures.seconds / width))]
        tokens.append(Series(figures.label, [(index * width, rate) for index, rate in enumerate(rates)]))
        seconds = [math.nan if value is None else value for value in line["ttft_mean_seconds"]]
        firsts.append(Series(figures.label, [(index * width, value) for index, value in enumerate(seconds)]))
    x = Axis("seconds since the measurement began")
    return [
        chart("Output tokens per second", x, Axis("tokens per second", show=report.number), tokens),
        chart("Mean time to first token, by when requests were due", x, Axis("seconds"), firsts),
    ]


def _spread(found: list[Figures]) -> list[Figures]:
    """As many as can be distinguished, from the first to the last."""
    if len(found) <= _MOST_LINES:
        return found
    step = (len(found) - 1) / (_MOST_LINES - 1)
    return [found[round(index * step)] for index in range(_MOST_LINES)]


def _row(cell: str, texts: list[str]) -> str:
    return "<tr>" + "".join(f"<{cell}>{escape(text)}</{cell}>" for text in texts) + "</tr>"
