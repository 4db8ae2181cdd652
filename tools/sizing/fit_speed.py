"""Fit the constants of the speed's roofline to the seeded half of the published rows, by coordinate descent.

    python -m tools.sizing.fit_speed

Prints the constants for djl_trtllm/sizing/speed.py. The cost of a row is the logarithm of its ratio, at most that of
two; a source with many rows counts as much as the root of their number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from djl_trtllm.sizing.speed import HOSTS, SHARES, GpuShares, HostTimes
from tools.sizing.check_speed import Row, halves

_FIRST_FACTOR, _LAST_FACTOR = 1.25, 1.01
_ABOVE_ONE = ("all_reduce", "layer", "grace")
_MOST = math.log(2)
_ENGINES = ("tensorrt", "pytorch")


def main() -> None:
    fitted, _ = halves()
    found = fit([row for row in fitted if row.engine in _ENGINES])
    for name, value in found.items():
        print(f"{name} = {value:.3g}")


def fit(fitted: Sequence[Row]) -> dict[str, float]:
    """The constants with the least cost: the shares, the engines' `step`, and the time of a sequence of each engine."""
    constants = {name: getattr(SHARES, name) for name in SHARES.__dataclass_fields__}
    constants |= {"step": HOSTS["pytorch"].step, **{engine: HOSTS[engine].sequence for engine in _ENGINES}}
    least, factor = cost(fitted, constants), _FIRST_FACTOR
    while factor > _LAST_FACTOR:
        before = least
        for name in constants:
            for by in (factor, 1 / factor):
                tried = constants | {name: constants[name] * by}
                if name in SHARES.__dataclass_fields__ and name not in _ABOVE_ONE and tried[name] > 1:
                    continue
                if (costs := cost(fitted, tried)) < least:
                    least, constants = costs, tried
        if least == before:
            factor = math.sqrt(factor)
    return constants


def cost(fitted: Sequence[Row], constants: Mapping[str, float]) -> float:
    shares = GpuShares(**{name: constants[name] for name in SHARES.__dataclass_fields__})
    hosts = {engine: HostTimes(constants["step"], constants[engine]) for engine in _ENGINES}
    counts = Counter(row.source for row in fitted)
    return sum(
        min(_MOST, abs(math.log(row.ratio(shares, hosts[row.engine])))) / math.sqrt(counts[row.source])
        for row in fitted
    )


if __name__ == "__main__":
    main()
