"""Fit the constants of TensorRT engines to the seeded half of the measured tables, by search over a grid.

    python -m tools.sizing.fit

Prints the best constants, and the rows with them. An estimate above the measured number costs eight times as much as
one below, because it ends in a failed build, and so that eight of nine stay below; a row wrongly out of memory, or
wrongly not, costs most.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from djl_trtllm.sizing.estimate import GIB, EngineConstants
from tools.sizing.check_tables import Check, render, rows

_ABOVE = 8
_MOST = 3.0
_MEMORY = 5.0
_SCALES = (2.0, 2.1, 2.2, 2.3, 2.4, 2.5, 2.6, 2.8, 3.0)
_OVERHEADS = (1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0)
_EIGHT_RANKS = (1.5, 2.0, 2.25, 2.5, 2.75, 3.0, 3.25, 3.5)


def main() -> None:
    grid = (
        EngineConstants(scale, int(overhead * GIB), int(eight * GIB))
        for scale, overhead, eight in itertools.product(_SCALES, _OVERHEADS, _EIGHT_RANKS)
    )
    best = min(grid, key=lambda constants: cost(one for one in rows(constants) if one.fitted))
    print(f"scale {best.scale}, overhead {best.overhead / GIB} GiB, eight ranks {best.eight_ranks / GIB} GiB\n")
    print(render(rows(best)))


def cost(checks: Iterable[Check]) -> float:
    total = 0.0
    for one in checks:
        if one.ratio is None:
            total += 0 if one.right_memory else _MEMORY
            continue
        distance = math.log(one.ratio) if one.ratio else -_MOST
        total += min(_MOST, abs(distance) * (_ABOVE if distance > 0 else 1))
    return total


if __name__ == "__main__":
    main()
