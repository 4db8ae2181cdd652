"""Compare predicted speeds with published ones (`speeds.toml`), on the half that was fitted to and the other.

    python -m tools.sizing.check_speed [--rows]

Prints, for each half, the share of rows that are predicted within 25 %: by GPU, and by source. A decode row has no more
prompt tokens than output tokens, or one client. `--rows` prints each row too. `tools/sizing/fit_speed.py` does the fit.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from djl_trtllm.files import read_table
from djl_trtllm.listing import columns
from djl_trtllm.sizing.estimate import Conditions, Estimate
from djl_trtllm.sizing.machines import GPUS
from djl_trtllm.sizing.speed import HOSTS, PROMPT_TOKENS, SHARES, GpuShares, HostTimes, Load, Rank, Roofline
from tools.sizing.check_tables import model_sizes

SEED = 15
NEAR = 0.25


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

    def ratio(self, shares: GpuShares = SHARES, host: HostTimes | None = None) -> float:
        """The predicted speed by the published one."""
        roofline = Roofline(_rank(self.model, self.gpu, self.conditions), host or HOSTS[self.engine], shares)
        whole, rest = divmod(self.requests, self.batch)
        seconds = whole * roofline.wave(Load(self.isl, self.osl, self.batch))
        if rest:
            seconds += roofline.wave(Load(self.isl, self.osl, rest))
        return self.requests * self.osl / seconds / self.speed

    def __str__(self) -> str:
        where = self.conditions
        machine = f"{where.ranks} x {self.gpu} {where.quantization or '16 bits'} tp {where.tensor_parallel}"
        return f"{self.source}: {self.model}, {machine}, {self.isl}/{self.osl}, {self.batch} at a time"


@cache
def _rank(model: str, gpu: str, conditions: Conditions) -> Rank:
    return Rank.of(model_sizes(model), conditions, GPUS[gpu])


@cache
def rows() -> tuple[Row, ...]:
    """All rows, in the file's order."""
    tables = read_table("speeds.toml", "tools.sizing")["tables"]
    return tuple(
        _row(table, column, row, number)
        for table in tables
        for row in table["rows"]
        for number, column in enumerate(table["columns"])
        if row[3 + number]
    )


def _row(table: dict[str, Any], column: Sequence[Any], row: Sequence[float], number: int) -> Row:
    gpu, quantization, tensor_parallel, pipeline_parallel = column
    isl, osl, requests = map(int, row[:3])
    published = row[3 + number]
    conditions = Conditions(
        GPUS[gpu].memory,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        quantization=quantization or None,
        kv_dtype=(quantization and table["kv_format"]) or None,
        fraction=table.get("kv", 0.9),
        backend="tensorrt" if table["engine"] == "tensorrt" else "pytorch",
    )
    batch = requests
    if table.get("offered"):
        held = Estimate(model_sizes(table["model"]), conditions).sequences_of(isl + osl, PROMPT_TOKENS)
        batch = min(requests, table["batch"], max(1, held))
    speed = 1000 / published if table.get("first_token") else published
    if table.get("per_gpu"):
        speed *= conditions.ranks
    unfitted = table.get("unfitted", False)
    return Row(
        table["source"], table["engine"], table["model"], gpu, conditions, isl, osl, requests, batch, speed, unfitted
    )


def halves() -> tuple[list[Row], list[Row]]:
    """The rows to fit to and those held out: of each two neighbours by machine and speed, one by chance."""
    coin = random.Random(SEED)  # noqa: S311
    ordered = sorted(
        (row for row in rows() if not row.unfitted), key=lambda row: (row.gpu, str(row.conditions), row.speed)
    )
    fitted = {id(coin.choice(ordered[start : start + 2])) for start in range(0, len(ordered), 2)}
    return [row for row in ordered if id(row) in fitted], [row for row in ordered if id(row) not in fitted]


def _line(name: str, checked: Sequence[Row]) -> tuple[str, ...]:
    decode, others = [row for row in checked if row.decode], [row for row in checked if not row.decode]
    return (name, *_near(decode), *_near(others))


def _near(checked: Sequence[Row]) -> tuple[str, ...]:
    if not checked:
        return ("", "")
    ratios = [row.ratio() for row in checked]
    near = sum(abs(ratio - 1) <= NEAR for ratio in ratios)
    return f"{near} of {len(ratios)} ({near / len(ratios):.0%})", f"{statistics.median(ratios):.2f}"


def _by(checked: Iterable[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in checked:
        groups.setdefault(key(row), []).append(row)
    return groups


def summary() -> list[str]:
    """The tables that docs/sizing.md has."""
    fitted, held_out = halves()
    head = ("", "decode rows within 25 %", "median", "other rows within 25 %", "median")
    parts = {
        "half": {"fitted half": fitted, "held-out half": held_out},
        "GPU, held-out half": _by(held_out, lambda row: row.gpu),
        "source, held-out half": _by(held_out, lambda row: row.source),
        "nothing fitted to": _by((row for row in rows() if row.unfitted), lambda row: row.source),
    }
    lines = []
    for name, groups in parts.items():
        table = [(name, *head[1:]), *(_line(*group) for group in groups.items())]
        lines += [*columns(table, right=(2, 4)), ""]
    return lines


def main() -> None:
    print("\n".join(summary()))
    shown = rows() if "--rows" in sys.argv else [row for row in rows() if row.unfitted]
    table = [(str(row), f"{row.speed:,.0f}", f"{row.ratio() * row.speed:,.0f}", f"{row.ratio():.2f}") for row in shown]
    print("\n".join(columns([("", "tok/s", "predicted", "ratio"), *table], right=(1, 2, 3))))


if __name__ == "__main__":
    main()
