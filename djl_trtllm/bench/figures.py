"""Figures of a load, in bounded memory: distributions in logarithmic bins, and a timeline whose bins widen."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from djl_trtllm.bench.client import Counted, Stream

_GROWTH = math.log(1.01)
_LEAST = 1e-6
_BINS = math.ceil(math.log(86_400 / _LEAST) / _GROWTH)
_MOST_TIMELINE = 600
_MOST_KINDS = 20

Floats = npt.NDArray[np.float64]


class Distribution:
    """Durations in seconds, in bins that are 1 % wide; mean, minimum and maximum are exact."""

    def __init__(self) -> None:
        self.counts = np.zeros(_BINS, np.int64)
        self.total = 0.0
        self.least = math.inf
        self.most = 0.0

    def add(self, values: Floats, weights: npt.NDArray[np.int64] | None = None) -> None:
        if not len(values):
            return
        bins = np.log(np.maximum(values, _LEAST) / _LEAST) / _GROWTH
        np.add.at(self.counts, np.minimum(bins.astype(np.int64), _BINS - 1), 1 if weights is None else weights)
        self.total += float(values.sum() if weights is None else values @ weights)
        self.least = min(self.least, float(values.min()))
        self.most = max(self.most, float(values.max()))

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """The mean of the values; nan without values."""
        return self.total / self.count if self.count else math.nan

    def percentile(self, share: float) -> float:
        """The value below which `share` (0 to 1) of the values lie, within half a bin; nan for none."""
        count = self.count
        if not count:
            return math.nan
        rank = min(count - 1, int(share * count))
        index = int(np.searchsorted(np.cumsum(self.counts), rank, side="right"))
        return min(self.most, max(self.least, _LEAST * math.exp((index + 0.5) * _GROWTH)))

    def steps(self) -> list[tuple[float, float]]:
        """The share of the values up to each bound, for a plot."""
        (used,) = np.nonzero(self.counts)
        shares = np.cumsum(self.counts)[used] / self.count
        return [
            (_LEAST * math.exp((int(index) + 1) * _GROWTH), float(share))
            for index, share in zip(used, shares, strict=True)
        ]

    def as_json(self) -> dict[str, Any]:
        if not self.count:
            return {"count": 0}
        shares = {f"p{100 * share:g}": self.percentile(share) for share in (0.5, 0.9, 0.95, 0.99)}
        return {"count": self.count, "mean": self.mean, "min": self.least, **shares, "max": self.most}


class Timeline:
    """Sums per bin of time. The bins become twice as wide when there are too many."""

    def __init__(self) -> None:
        self.width = 1.0
        self.sums = {name: np.zeros(_MOST_TIMELINE) for name in ("tokens", "ended", "failed", "ttft", "firsts")}
        """`ttft` has times to first token, and `firsts` their number, by the time that requests should be sent."""
        self.used = 0

    def add(self, name: str, times: Floats, amounts: npt.ArrayLike = 1) -> None:
        """Add amounts at these seconds since the start."""
        if not len(times):
            return
        while times.max() >= self.width * _MOST_TIMELINE:
            for sums in self.sums.values():
                sums[: _MOST_TIMELINE // 2] = sums.reshape(-1, 2).sum(axis=1)
                sums[_MOST_TIMELINE // 2 :] = 0
            self.width *= 2
            self.used = (self.used + 1) // 2
        bins = (times / self.width).astype(np.int64)
        self.used = max(self.used, int(bins.max()) + 1)
        np.add.at(self.sums[name], bins, amounts)

    def as_json(self) -> dict[str, Any]:
        sums = {name: values[: self.used].tolist() for name, values in self.sums.items()}
        firsts = zip(sums["ttft"], sums["firsts"], strict=True)
        return {
            "seconds_per_bin": self.width,
            "tokens_per_second": [round(each / self.width, 3) for each in sums["tokens"]],
            "ended": [int(each) for each in sums["ended"]],
            "failed": [int(each) for each in sums["failed"]],
            "ttft_mean_seconds": [total / count if count else None for total, count in firsts],
        }


@dataclass
class Figures:
    """The figures of one load. The window is the time that is measured, after the warm-up, by the client's clock.

    A request belongs to it if it should be sent in it, a token and the gap before it if the token arrived in it.
    """

    label: str
    begin: float
    end: float = math.inf
    concurrency: int | None = None
    rate: float | None = None
    cpu_share: float = 0.0
    complete: bool = True
    sent: int = 0
    succeeded: int = 0
    unfinished: int = 0
    tokens: int = 0
    events: int = 0
    output_tokens: int = 0
    """Output tokens of the requests that succeeded."""
    accepted_tokens: int | None = None
    """Output tokens of these requests that drafts proposed; None where the server does not say so."""
    shortened: int = 0
    """Requests that succeeded with fewer tokens than were asked for."""
    prompt_tokens: int = 0
    prompts_counted: int = 0
    ended_in_window: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    details: dict[str, str] = field(default_factory=dict)
    server_warnings: Counter[str] = field(default_factory=Counter)
    """The `Warning` headers of responses, counted by text."""
    counted: Counter[Counted] = field(default_factory=Counter)
    ttft: Distribution = field(default_factory=Distribution)
    itl: Distribution = field(default_factory=Distribution)
    e2e: Distribution = field(default_factory=Distribution)
    lag: Distribution = field(default_factory=Distribution)
    """The delays of requests in the client itself, which are part of all latencies."""
    timeline: Timeline = field(default_factory=Timeline)

    def add(self, stream: Stream, end: float) -> None:
        """Count a stream; `end` is that of the window, or of what was measured of it so far."""
        self._add_tokens(stream, end)
        if stream.ended is not None and self.begin <= stream.ended < end:
            self.ended_in_window += stream.error is None
            self.timeline.add("failed" if stream.error else "ended", np.array([stream.ended - self.begin]))
        if not self.begin <= stream.intended < end:
            return
        self.sent += 1
        if stream.warning and len(self.server_warnings) < _MOST_KINDS:
            self.server_warnings[stream.warning] += 1
        self.lag.add(np.array([stream.sent - stream.intended]))
        if stream.times:
            first = stream.times[0] - stream.intended
            self.ttft.add(np.array([first]))
            at = np.array([stream.intended - self.begin])
            self.timeline.add("ttft", at, first)
            self.timeline.add("firsts", at)
        if stream.error is not None:
            kind = stream.error if len(self.errors) < _MOST_KINDS or stream.error in self.errors else "other errors"
            self.errors[kind] += 1
            self.details.setdefault(kind, stream.detail)
        elif stream.ended is None:
            self.unfinished += 1
        else:
            self._add_success(stream)

    def _add_success(self, stream: Stream) -> None:
        assert stream.ended is not None
        self.succeeded += 1
        self.output_tokens += stream.tokens
        if stream.accepted is not None:
            self.accepted_tokens = (self.accepted_tokens or 0) + stream.accepted
        self.shortened += bool(stream.requested) and stream.tokens < stream.requested
        self.counted[stream.counted] += 1
        self.e2e.add(np.array([stream.ended - stream.intended]))
        if stream.prompt_tokens is not None:
            self.prompt_tokens += stream.prompt_tokens
            self.prompts_counted += 1

    def _add_tokens(self, stream: Stream, end: float) -> None:
        times, counts = np.array(stream.times), np.array(stream.counts, np.int64)
        inside = (times >= self.begin) & (times < end)
        self.tokens += int(counts[inside].sum())
        self.events += int(inside.sum())
        self.timeline.add("tokens", times[inside] - self.begin, counts[inside])
        wanted = inside[1:] & (counts[1:] > 0)
        self.itl.add((np.diff(times) / np.maximum(counts[1:], 1))[wanted], counts[1:][wanted])

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return max(1e-9, self.end - self.begin)

    @property
    def tokens_per_second(self) -> float:
        """Tokens that arrived in the window, over its length."""
        return self.tokens / self.seconds

    @property
    def requests_per_second(self) -> float:
        """Requests that succeeded in the window, over its length."""
        return self.ended_in_window / self.seconds

    @property
    def accepted_share(self) -> float | None:
        """Share of the output tokens that drafts proposed; None where the server does not say so."""
        return None if self.accepted_tokens is None else self.accepted_tokens / max(1, self.output_tokens)

    @property
    def failed(self) -> int:
        return sum(self.errors.values())

    def as_json(self) -> dict[str, Any]:
        load: Mapping[str, Any] = {"concurrency": self.concurrency, "rate": self.rate}
        return {
            **{name: value for name, value in load.items() if value is not None},
            "seconds": self.seconds,
            "complete": self.complete,
            "requests": {
                "sent": self.sent,
                "succeeded": self.succeeded,
                "failed": self.failed,
                "unfinished": self.unfinished,
            },
            "errors": dict(self.errors.most_common()),
            "requests_per_second": self.requests_per_second,
            "output_tokens_per_second": self.tokens_per_second,
            "output_tokens_mean": self.output_tokens / self.succeeded if self.succeeded else None,
            "prompt_tokens_mean": self.prompt_tokens / self.prompts_counted if self.prompts_counted else None,
            "accepted_tokens_share": self.accepted_share,
            "tokens_per_event": self.tokens / self.events if self.events else None,
            "tokens_counted_by": {kind.value: count for kind, count in self.counted.most_common()},
            "ttft_seconds": self.ttft.as_json(),
            "itl_seconds": self.itl.as_json(),
            "e2e_seconds": self.e2e.as_json(),
            "client": {"cpu_share": self.cpu_share, "send_lag_seconds": self.lag.as_json()},
            "timeline": self.timeline.as_json(),
        }
