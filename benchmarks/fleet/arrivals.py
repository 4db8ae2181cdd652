"""When requests come, and how long they are."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_COLUMNS = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
_SPREAD = 0.7
"""Standard deviation of the logarithm of a length."""


@dataclass(slots=True)
class Request:
    """`started`, `first_token` and `ended` are None until then; `outcome` is complete, refused or cut.

    `attempts` are how often its client has sent it; the rest is of the last time.
    """

    arrived: float
    prompt_tokens: int
    output_tokens: int
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None
    outcome: str = ""
    attempts: int = 0


@dataclass(frozen=True)
class Lengths:
    """Mean numbers of tokens. Lengths of requests are lognormal."""

    prompt: float = 500
    output: float = 300

    def draw(self, chance: random.Random) -> tuple[int, int]:
        """Draw the lengths of one request."""
        return _length(self.prompt, chance), _length(self.output, chance)


def _length(mean: float, chance: random.Random) -> int:
    return max(1, round(chance.lognormvariate(math.log(mean) - _SPREAD**2 / 2, _SPREAD)))


Rate = Callable[[float], float]
"""Requests per second at a time."""


def steady(rate: float) -> Rate:
    """The same rate at all times."""
    return lambda now: rate


def diurnal(mean: float, period: float, swing: float = 0.8) -> Rate:
    """A day of `period` seconds, from mean x (1 - swing) at its beginning to mean x (1 + swing) in its middle."""
    return lambda now: mean * (1 - swing * math.cos(2 * math.pi * now / period))


def burst(rate: float, factor: float, begin: float, length: float) -> Rate:
    """`factor` times the rate for a while."""
    return lambda now: rate * (factor if begin <= now < begin + length else 1)


def arrivals(rate: Rate, highest: float, seconds: float, lengths: Lengths, seed: int) -> Iterator[Request]:
    """A Poisson process with this rate, which is never above `highest`."""
    chance = random.Random(seed)
    now = chance.expovariate(highest)
    while now < seconds:
        if chance.random() * highest < rate(now):
            yield Request(now, *lengths.draw(chance))
        now += chance.expovariate(highest)


def read_trace(file: Path, speed: float = 1.0) -> Iterator[Request]:
    """Azure's public traces of LLM inference: TIMESTAMP,ContextTokens,GeneratedTokens, `speed` times as fast."""
    with file.open(newline="", encoding="utf-8") as lines:
        begin: datetime | None = None
        rows = csv.DictReader(lines)
        if missing := _COLUMNS - set(rows.fieldnames or ()):
            raise OSError(
                f"{file} has no column {', '.join(sorted(missing))}: expected a trace of Azure's LLM inference"
            )
        for row in rows:
            # Seven digits of a second, of which Python 3.10 takes six.
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            begin = begin or at
            since = (at - begin).total_seconds() / speed
            yield Request(since, max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"])))
