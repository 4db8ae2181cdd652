"""What a load does while it runs, in one line."""

from __future__ import annotations

from djl_trtllm.bench.load import Progress
from djl_trtllm.bench.report import number, seconds


def describe(progress: Progress) -> str:
    """One line."""
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
