"""The rules of autoscaling that the project ships: KEDA's with the HPA, from the manifest, and that for Ray Serve."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, cast

import yaml

from djl_trtllm.routing.scaling import QueueAndCachePolicy

CHART = Path(__file__).parents[2] / "serving" / "kubernetes" / "djl-trtllm"
_TOLERANCE = 0.1
"""The HPA's tolerance: a smaller difference changes nothing (kube-controller-manager's default)."""
RAY_UP_SECONDS, RAY_DOWN_SECONDS = 30, 300
"""Ray's default delay, and that of `djl_trtllm.cluster.application`."""


class Figures(NamedTuple):
    """What a replica reports."""

    waiting: int
    running: int
    places: int
    full_cache: bool = False


class Rule(Protocol):
    """How many replicas there are to be: `least` at the beginning."""

    @property
    def least(self) -> int: ...

    def wanted(self, now: float, replicas: int, figures: Sequence[Figures]) -> int:
        """Return the number of replicas by the figures of the ready ones; `replicas` counts starting ones, too."""
        ...


@dataclass(frozen=True)
class Fixed:
    """The rule that keeps the number of replicas as it is."""

    replicas: int

    @property
    def least(self) -> int:
        return self.replicas

    def wanted(self, now: float, replicas: int, figures: Sequence[Figures]) -> int:
        return self.replicas


class Keda:
    """The ScaledObject of the chart in `serving/kubernetes`: its thresholds, windows and policies."""

    def __init__(self, least: int, most: int) -> None:
        values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["autoscaling"]
        self.least, self.most = least, most
        self._load, self._cache = float(values["load"]), 1.0
        behavior = values["behavior"]
        self._up, self._down = _Direction(behavior["scaleUp"], 1), _Direction(behavior["scaleDown"], -1)

    def wanted(self, now: float, replicas: int, figures: Sequence[Figures]) -> int:
        asked = self.recommended(replicas, figures)
        up = self._up.stable(now, asked, min)
        down = self._down.stable(now, asked, max)
        if up > replicas:
            wanted = min(up, self._up.limit(now, replicas, self._down))
        elif down < replicas:
            wanted = max(down, self._down.limit(now, replicas, self._up))
        else:
            return replicas
        wanted = max(self.least, min(self.most, wanted))
        (self._up if wanted > replicas else self._down).note(now, abs(wanted - replicas))
        return wanted

    def recommended(self, replicas: int, figures: Sequence[Figures]) -> int:
        """The number of replicas that both queries ask for, before windows and policies."""
        thresholds = zip(queries(figures), (self._load, self._cache), strict=True)
        asked = [_average_value(value, threshold, replicas) for value, threshold in thresholds if value is not None]
        return max(self.least, min(self.most, max(asked))) if asked else replicas


def queries(figures: Sequence[Figures]) -> tuple[float | None, float | None]:
    """What the ScaledObject's queries `load` and `kv-cache` return; None is no result."""
    if not figures:
        return None, None
    load = sum(each.waiting + each.running for each in figures)
    places = sum(each.places for each in figures) / len(figures)
    full = sum(each.full_cache and each.waiting > 0 for each in figures)
    return load / places, len(figures) + full if full else None


def _average_value(value: float, threshold: float, replicas: int) -> int:
    """What the HPA makes of a metric of the type AverageValue."""
    if abs(value / (threshold * replicas) - 1) <= _TOLERANCE:
        return replicas
    return math.ceil(value / threshold)


class _Direction:
    """Windows and policies of one direction: `sign` is 1 for up and -1 for down."""

    def __init__(self, rules: Mapping[str, Any], sign: int) -> None:
        self._sign = sign
        self._window = rules["stabilizationWindowSeconds"]
        self._policies = rules["policies"]
        self._asked: deque[tuple[float, int]] = deque()
        self._changes: list[tuple[float, int]] = []

    def stable(self, now: float, asked: int, choose: Any) -> int:
        """The most careful recommendation of the window."""
        self._asked.append((now, asked))
        while self._asked[0][0] <= now - self._window < now:
            self._asked.popleft()
        return int(choose(count for _, count in self._asked))

    def limit(self, now: float, replicas: int, other: _Direction) -> int:
        """How many replicas there may be: the policies count from what there was when their period began."""
        limits = [self._sign * replicas]
        for policy in self._policies:
            period = policy["periodSeconds"]
            begun = replicas - self._sign * (self.changed(now, period) - other.changed(now, period))
            change = policy["value"] if policy["type"] == "Pods" else begun * policy["value"] / 100
            limits.append(math.ceil(self._sign * begun + change))
        return self._sign * max(limits)

    def changed(self, now: float, period: float) -> int:
        """Replicas that it has added, or taken away, in the last `period` seconds."""
        return sum(count for at, count in self._changes if at > now - period)

    def note(self, now: float, count: int) -> None:
        self._changes = [(at, each) for at, each in self._changes if at > now - 3600] + [(now, count)]


class Ray:
    """The policy of `djl_trtllm.cluster`, and Ray Serve's delays."""

    def __init__(self, least: int, most: int, concurrency: int) -> None:
        self.least, self.most = least, most
        self._policy = QueueAndCachePolicy(concurrency)
        self._since: tuple[int, float] = (0, 0.0)

    def wanted(self, now: float, replicas: int, figures: Sequence[Figures]) -> int:
        asked = self._ask(replicas, figures)
        direction = (asked > replicas) - (asked < replicas)
        if direction != self._since[0]:
            self._since = (direction, now)
        delay = RAY_UP_SECONDS if direction > 0 else RAY_DOWN_SECONDS
        if direction == 0 or now - self._since[1] < delay:
            return replicas
        self._since = (0, now)
        return asked

    def _ask(self, replicas: int, figures: Sequence[Figures]) -> int:
        names = {"waiting": "waiting", "running": "running", "kv_usage": "full_cache"}
        metrics = {
            name: {number: float(getattr(each, field)) for number, each in enumerate(figures)}
            for name, field in names.items()
        }
        context = SimpleNamespace(
            aggregated_metrics=metrics,
            current_num_replicas=replicas,
            capacity_adjusted_min_replicas=self.least,
            capacity_adjusted_max_replicas=self.most,
        )
        return self._policy(cast(Any, context))[0]
