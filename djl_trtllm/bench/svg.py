"""Line charts as SVG text: the plots of reports and documents. The same data gives the same text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 18, 56, 50
_LEGEND_ROW = 16
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
"""Paul Tol's "bright", which the colour-blind can distinguish."""
_STYLE = (
    "svg.chart{font:12px system-ui,sans-serif;background:#fff}svg.chart text{fill:#222}"
    "svg.chart .grid{stroke:#ddd}svg.chart .axis{stroke:#888}svg.chart .title{font-size:14px;font-weight:600}"
    "@media(prefers-color-scheme:dark){svg.chart{background:#181a1f}svg.chart text{fill:#ddd}"
    "svg.chart .grid{stroke:#333}}"
)

Point = tuple[float, float]


class Axis(NamedTuple):
    """`show` formats the values at its marks."""

    label: str
    log: bool = False
    show: Callable[[float], str] = "{:g}".format


class Series(NamedTuple):
    """A line; `labels`, one for each point, are drawn beside dots. With `steps` it keeps its height between points."""

    name: str
    points: Sequence[Point]
    labels: Sequence[str] = ()
    steps: bool = False


class _Scale:
    """From values to pixels."""

    def __init__(self, axis: Axis, values: Sequence[float], begin: float, end: float) -> None:
        self.axis, self._begin, self._end = axis, begin, end
        if axis.log:
            positive = [value for value in values if value > 0] or [1.0]
            self.low, self.high = math.log10(min(positive)), math.log10(max(positive))
            if self.high - self.low < 0.3:
                self.low, self.high = self.low - 0.15, self.high + 0.15
        else:
            self.low, self.high = min(0.0, *values, 0.0), max(values, default=1.0) * 1.05 or 1.0

    def __call__(self, value: float) -> float:
        position = math.log10(max(value, 1e-12)) if self.axis.log else value
        share = (position - self.low) / (self.high - self.low)
        return self._begin + max(0.0, min(1.0, share)) * (self._end - self._begin)

    def marks(self) -> list[float]:
        if not self.axis.log:
            return _linear_marks(self.high)
        decades = range(math.floor(self.low), math.ceil(self.high) + 1)
        each = (1, 2, 5) if self.high - self.low < 3 else (1,)
        found = [factor * 10.0**decade for decade in decades for factor in each]
        return [value for value in found if self.low - 1e-9 <= math.log10(value) <= self.high + 1e-9]


def _linear_marks(high: float) -> list[float]:
    rough = high / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [step * index for index in range(int(high / step) + 1)]


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series], *, marked: tuple[float, str] | None = None) -> str:
    """A chart. `marked` is a value on the x axis with a vertical line and a text."""
    points = [
        point
        for each in series
        for point in each.points
        if all(map(math.isfinite, point)) and (point[0] > 0 or not x.log)
    ]
    places, rows = _legend([each.name for each in series])
    more = (rows - 1) * _LEGEND_ROW
    across = _Scale(x, [*(px for px, _ in points), *([marked[0]] if marked else [])], _LEFT, WIDTH - _RIGHT)
    up = _Scale(y, [py for _, py in points], HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + more}" role="img" '
        f'aria-label="{escape(title)}"><style>{_STYLE}</style>',
        _text(_LEFT, 20, title, 'class="title"'),
        f'<g transform="translate(0 {more})">',
        *_grid(across, up),
    ]
    if marked:
        at = across(marked[0])
        parts.append(
            f'<path d="M{at:.1f} {_TOP}V{HEIGHT - _BOTTOM}" stroke="#ee6677" stroke-dasharray="4 3" fill="none"/>'
        )
        parts.append(_text(at - 4, HEIGHT - _BOTTOM - 6, marked[1], 'text-anchor="end"'))
    for number, (each, (left, row)) in enumerate(zip(series, places, strict=True)):
        colour, height = COLOURS[number % len(COLOURS)], 32 + row * _LEGEND_ROW - more
        parts.append(_line(each, across, up, colour))
        parts.append(f'<rect x="{left:.1f}" y="{height}" width="12" height="4" fill="{colour}"/>')
        parts.append(_text(left + 17, height + 6, each.name))
    return "".join([*parts, "</g></svg>"])


def _legend(names: Sequence[str]) -> tuple[list[tuple[float, int]], int]:
    """Where each name begins and in which row, and the number of rows."""
    places, left, row = [], float(_LEFT), 0
    for name in names:
        width = 32 + 6.4 * len(name)
        if left > _LEFT and left + width > WIDTH:
            left, row = float(_LEFT), row + 1
        places.append((left, row))
        left += width
    return places, row + 1


def _grid(across: _Scale, up: _Scale) -> list[str]:
    bottom, parts = HEIGHT - _BOTTOM, []
    for value in up.marks():
        at = up(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(_text(_LEFT - 6, at + 4, up.axis.show(value), 'text-anchor="end"'))
    for value in across.marks():
        at = across(value)
        parts.append(f'<path class="axis" d="M{at:.1f} {bottom}v4"/>')
        parts.append(_text(at, bottom + 18, across.axis.show(value), 'text-anchor="middle"'))
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<path class="axis" fill="none" d="M{_LEFT} {_TOP}V{bottom}H{WIDTH - _RIGHT}"/>')
    parts.append(_text(middle, HEIGHT - 10, across.axis.label, 'text-anchor="middle"'))
    height = (_TOP + bottom) / 2
    parts.append(_text(14, height, up.axis.label, f'text-anchor="middle" transform="rotate(-90 14 {height:g})"'))
    return parts


def _line(series: Series, across: _Scale, up: _Scale, colour: str) -> str:
    """The path, in pieces where a value is missing, and its dots."""
    path, dots, pen = [], [], "M"
    labels = series.labels or [""] * len(series.points)
    for (px, py), label in zip(series.points, labels, strict=True):
        if not (math.isfinite(px) and math.isfinite(py)):
            pen = "M"
            continue
        at, height = across(px), up(py)
        path.append(f"H{at:.1f}V{height:.1f}" if series.steps and pen == "L" else f"{pen}{at:.1f} {height:.1f}")
        pen = "L"
        if series.labels:
            dots.append(f'<circle cx="{at:.1f}" cy="{height:.1f}" r="3" fill="{colour}"/>')
            dots.append(_text(at + 5, height - 5, label))
    return f'<path d="{"".join(path)}" fill="none" stroke="{colour}" stroke-width="1.8"/>' + "".join(dots)


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    space = " " if attributes else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{space}{attributes}>{escape(text)}</text>'
