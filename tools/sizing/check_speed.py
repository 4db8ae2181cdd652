"""Compare predicted speeds with published ones (`speeds.toml`), on the half that was fitted to and the other.

    python -m tools.sizing.check_speed [--rows | --fit]

Prints, for each half, the share of rows that are predicted within 25 %: by GPU, and by source. A decode row has no more
prompt tokens than output tokens, or one client. `--rows` prints each row too. `--fit` fits the constants of
djl_trtllm/sizing/speed.toml to the fitted half, by coordinate descent, and prints them.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from djl_trtllm.files import read_table
from djl_trtllm.listing import columns
from djl_trtllm.sizing.estimate import Conditions, Estimate
from djl_trtllm.sizing.machines import GPUS
from djl_trtllm.sizing.speed import CONSTANTS, PROMPT_TOKENS, Constants, Load, Rank, Roofline
from tools.sizing.check_tables import model_sizes

SEED = 15
NEAR = 0.25
_FIRST_FACTOR, _LAST_FACTOR = 1.25, 1.01
_SHARES = ("bandwidth", "bf16", "fp8", "fp4", "attention", "experts", "link")


@dataclass(frozen=True)
class Row:
    """A published speed in output tokens per second. `batch` of the `requests` ran at a time."""

    source: str
    engine: str
    model: str
    gpu: str
    conditions: Conditions
    isl: int
    osl: int
    requests: int
    batch: int
    speed: float
    unfitted: bool

    @property
    def decode(self) -> bool:
        return self.osl >= self.isl or (self.batch == 1 and self.osl > 1)

    def ratio(self, constants: Constants | None = None) -> float:
        """The predicted speed by the published one."""
        roofline = Roofline(_rank(self.model, self.gpu, self.conditions), constants or CONSTANTS[self.engine])
        whole, rest = divmod(self.requests, self.batch)
        seconds = whole * roofline.wave(Load(self.isl, self.osl, self.batch))
        seconds += roofline.wave(Load(self.isl, self.osl, rest)) if rest else 0.0
        return self.requests * self.osl / seconds / self.speed

    def __str__(self) -> str:
        where = self.conditions
        machine = f"{where.ranks} x {self.gpu} {where.quantization or '16 bits'} tp {where.tensor_parallel}"
        return f"{self.source}: {self.model}, {machine}, {self.isl}/{self.osl}, {self.batch} at a time"


@cache
def _rank(model: str, gpu: str, conditions: Conditions) -> Rank:
    return Rank(model_sizes(model), conditions, GPUS[gpu])


@cache
def rows() -> tuple[Row, ...]:
    """All rows, in the file's order."""
    return tuple(
        _row(table, column, (int(row[0]), int(row[1]), int(row[2])), published)
        for table in read_table("speeds.toml", "tools.sizing")["tables"]
        for row in table["rows"]
        for column, published in zip(table["columns"], row[3:], strict=True)
        if published
    )


def _row(table: dict[str, Any], column: Sequence[Any], load: tuple[int, int, int], published: float) -> Row:
    gpu, quantization, tensor_parallel, pipeline_parallel = column
    isl, osl, requests = load
    conditions = Conditions(
        GPUS[gpu].memory,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        quantization=quantization or None,
        kv_dtype=(quantization and table["kv_format"]) or None,
        fraction=table.get("kv", 0.9),
        backend="tensorrt" if table["engine"] == "tensorrt" else "pytorch",
    )
    source, engine, model, unfitted = (table.get(name, False) for name in ("source", "engine", "model", "unfitted"))
    batch = requests
    if table.get("offered"):
        held = Estimate(model_sizes(model), conditions).sequences_of(isl + osl, PROMPT_TOKENS)
        batch = min(requests, table["batch"], max(1, held))
    speed = 1000 / published if table.get("first_token") else published
    speed *= conditions.ranks if table.get("per_gpu") else 1
    return Row(source, engine, model, gpu, conditions, isl, osl, requests, batch, speed, unfitted)


def halves() -> tuple[list[Row], list[Row]]:
    """The rows to fit to and those held out: of each two neighbours by machine and speed, one by chance."""
    coin = random.Random(SEED)  # noqa: S311
    ordered = sorted(
        (row for row in rows() if not row.unfitted), key=lambda row: (row.gpu, str(row.conditions), row.speed)
    )
    fitted = {id(coin.choice(ordered[start : start + 2])) for start in range(0, len(ordered), 2)}
    return [row for row in ordered if id(row) in fitted], [row for row in ordered if id(row) not in fitted]


def _near(checked: Sequence[Row]) -> tuple[str, str]:
    if not checked:
        return "", ""
    ratios = [row.ratio() for row in checked]
    near = sum(abs(ratio - 1) <= NEAR for ratio in ratios)
    return f"{near} of {len(ratios)} ({near / len(ratios):.0%})", f"{statistics.median(ratios):.2f}"


def summary() -> list[str]:
    """The tables that docs/sizing.md has."""
    fitted, held_out = halves()
    parts = {
        "half": [("fitted half", row) for row in fitted] + [("held-out half", row) for row in held_out],
        "GPU, held-out half": [(row.gpu, row) for row in held_out],
        "source, held-out half": [(row.source, row) for row in held_out],
        "nothing fitted to": [(row.source, row) for row in rows() if row.unfitted],
    }
    lines = []
    for title, named in parts.items():
        table = [(title, "decode rows within 25 %", "median", "other rows within 25 %", "median")]
        for name in dict.fromkeys(name for name, _ in named):
            found = [row for each, row in named if each == name]
            decode, others = [row for row in found if row.decode], [row for row in found if not row.decode]
            table.append((name, *_near(decode), *_near(others)))
        lines += [*columns(table, right=(2, 4)), ""]
    return lines


def constants_now() -> dict[str, float]:
    """The constants that are fitted: those of all engines by their names, and `sequence` by its engine."""
    shared = {name: value for name, value in CONSTANTS["pytorch"].items() if name != "sequence"}
    return shared | {engine: CONSTANTS[engine]["sequence"] for engine in ("tensorrt", "pytorch")}


def fit(fitted: Sequence[Row]) -> dict[str, float]:
    """The constants with the least cost."""
    constants = constants_now()
    least, factor = cost(fitted, constants), _FIRST_FACTOR
    while factor > _LAST_FACTOR:
        before = least
        for name in constants:
            for by in (factor, 1 / factor):
                tried = constants | {name: constants[name] * by}
                if (name in _SHARES and tried[name] > 1) or (costs := cost(fitted, tried)) >= least:
                    continue
                least, constants = costs, tried
        factor = math.sqrt(factor) if least == before else factor
    return constants


def cost(fitted: Sequence[Row], constants: Mapping[str, float]) -> float:
    """The cost of a row is the logarithm of its ratio, at most that of two; of a source the root of their number."""
    shared = {name: value for name, value in constants.items() if name not in CONSTANTS}
    found = {name: {**shared, "sequence": value} for name, value in constants.items() if name in CONSTANTS}
    counts = Counter(row.source for row in fitted)
    return sum(
        min(math.log(2), abs(math.log(row.ratio(found[row.engine])))) / math.sqrt(counts[row.source]) for row in fitted
    )


def main() -> None:
    if "--fit" in sys.argv:
        found = fit([row for row in halves()[0] if row.engine != "vllm"])
        print("\n".join(f"{name} = {value:.3g}" for name, value in found.items()))
        return
    print("\n".join(summary()))
    shown = rows() if "--rows" in sys.argv else [row for row in rows() if row.unfitted]
    table = [(str(row), f"{row.speed:,.0f}", f"{row.ratio() * row.speed:,.0f}", f"{row.ratio():.2f}") for row in shown]
    print("\n".join(columns([("", "tok/s", "predicted", "ratio"), *table], right=(1, 2, 3))))


if __name__ == "__main__":
    main()
