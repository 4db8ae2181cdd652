"""Compare the estimate's maximum with the measured tables, on the half that its constants were fitted to and the other.

    python -m tools.sizing.check_tables [--fit]

Prints the table and the counts of both halves. `--fit` fits the constants of TensorRT engines to the fitted half first,
by search over a grid. An estimate above the measured number costs eight times as much as one below, because it ends in
a failed build, and so that eight of nine stay below; a row wrongly out of memory, or wrongly not, costs most.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from djl_trtllm.files import read_table
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.estimate import FITTED, GIB, Conditions, EngineConstants, Estimate
from djl_trtllm.sizing.recommendation import TABLES, MeasuredRow

SEED = 15
ABOVE = 1.1
FACTOR = 2.5


@dataclass(frozen=True)
class Check:
    """One row of a table and the estimate for it. `fitted`: whether the row is of the half that was fitted to."""

    row: MeasuredRow
    estimate: Estimate
    fitted: bool

    @property
    def ratio(self) -> float | None:
        """The estimate's maximum by the measured one; None where the measurement ran out of memory."""
        measured = self.row.max_num_tokens
        return None if measured is None else self.estimate.max_num_tokens / measured

    @property
    def not_above(self) -> bool:
        return self.ratio is None or self.ratio <= ABOVE

    @property
    def near(self) -> bool:
        return self.ratio is not None and 1 / FACTOR <= self.ratio <= FACTOR

    @property
    def right_memory(self) -> bool:
        """Whether the estimate runs out of memory exactly where the measurement did."""
        return (self.row.max_num_tokens is None) == (self.estimate.max_num_tokens == 0)


@cache
def model_sizes(name: str) -> CheckpointSizes:
    """The sizes of a model of the tables, from its public config.json (`models.toml`)."""
    return CheckpointSizes.from_config(read_table("models.toml", "tools.sizing")[name], name)


def rows(constants: EngineConstants = FITTED) -> tuple[Check, ...]:
    """All rows, in the tables' order."""
    measured = [row for table in TABLES.values() for row in table]
    fitted = _half(measured)
    return tuple(Check(row, _estimate(row, constants), index in fitted) for index, row in enumerate(measured))


def _half(measured: Sequence[MeasuredRow]) -> set[int]:
    """The rows to fit to: of each two neighbours by degree and number, one by chance.

    So both halves have rows of one GPU and of eight, and of those with little memory left.
    """
    coin = random.Random(SEED)  # noqa: S311
    order = sorted(
        range(len(measured)),
        key=lambda index: (measured[index].tensor_parallel, measured[index].max_num_tokens or 0, index),
    )
    return {coin.choice(order[start : start + 2]) for start in range(0, len(order), 2)}


def _estimate(row: MeasuredRow, constants: EngineConstants) -> Estimate:
    conditions = Conditions(row.machine.gpu.memory, tensor_parallel=row.tensor_parallel)
    return Estimate(model_sizes(row.model.name), conditions, constants)


def render(checks: Sequence[Check]) -> str:
    """The table that docs/sizing.md has, and the counts of both halves."""
    head = ("LMI", "model", "machine", "tp", "measured", "estimate", "ratio", "half")
    lines = [_cells(check) for check in checks]
    widths = [max(len(line[column]) for line in (head, *lines)) for column in range(len(head))]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (head, tuple("-" * width for width in widths), *lines)
    ]
    return "\n".join([*text, "", *_summary(checks)])


def _cells(check: Check) -> tuple[str, ...]:
    measured, found = check.row.max_num_tokens, check.estimate.max_num_tokens
    return (
        check.row.lmi,
        check.row.model.name,
        check.row.written,
        str(check.row.tensor_parallel),
        "out of memory" if measured is None else f"{measured:,}",
        f"{found:,}" if found else "out of memory",
        "" if check.ratio is None else f"{check.ratio:.2f}",
        "fitted" if check.fitted else "held out",
    )


def _summary(checks: Sequence[Check]) -> list[str]:
    halves = {
        "fitted half": [check for check in checks if check.fitted],
        "held-out half": [check for check in checks if not check.fitted],
        "all": list(checks),
    }
    said = []
    for name, half in halves.items():
        numbers = [check for check in half if check.ratio is not None]
        above, near = sum(check.not_above for check in numbers), sum(check.near for check in numbers)
        said.append(
            f"{name}: at most {ABOVE} x measured in {_part(above, len(numbers))}, within a factor of {FACTOR} in "
            f"{_part(near, len(numbers))}"
        )
    failing = [check for check in checks if check.row.max_num_tokens is None]
    right = sum(check.right_memory for check in checks)
    said.append(
        f"out of memory: {sum(check.right_memory for check in failing)} of {len(failing)} rows that failed, and "
        f"{len(checks) - len(failing) - (right - sum(check.right_memory for check in failing))} of the "
        f"{len(checks) - len(failing)} that ran"
    )
    return said


def _part(count: int, of: int) -> str:
    return f"{count} of {of} ({count / of:.0%})"


_COST_ABOVE = 8
_MOST = 3.0
_MEMORY = 5.0
_SCALES = (2.0, 2.1, 2.2, 2.3, 2.4, 2.5, 2.6, 2.8, 3.0)
_OVERHEADS = (1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0)
_EIGHT_RANKS = (1.5, 2.0, 2.25, 2.5, 2.75, 3.0, 3.25, 3.5)


def fit() -> EngineConstants:
    """The constants of the grid that cost least on the fitted half."""
    grid = (
        EngineConstants(scale, int(overhead * GIB), int(eight * GIB))
        for scale, overhead, eight in itertools.product(_SCALES, _OVERHEADS, _EIGHT_RANKS)
    )
    return min(grid, key=lambda constants: cost(one for one in rows(constants) if one.fitted))


def cost(checks: Iterable[Check]) -> float:
    total = 0.0
    for one in checks:
        if one.ratio is None:
            total += 0 if one.right_memory else _MEMORY
            continue
        distance = math.log(one.ratio) if one.ratio else -_MOST
        total += min(_MOST, abs(distance) * (_COST_ABOVE if distance > 0 else 1))
    return total


if __name__ == "__main__":
    best = fit() if "--fit" in sys.argv else FITTED
    print(f"scale {best.scale}, overhead {best.overhead / GIB} GiB, eight ranks {best.eight_ranks / GIB} GiB\n")
    print(render(rows(best)))
