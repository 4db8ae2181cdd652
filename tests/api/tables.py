"""What tables of parameters and descriptions of paths say, as text that is compared with `golden/`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from djl_trtllm.api import Dialect
from djl_trtllm.api.base import Operation
from djl_trtllm.api.parameters import IGNORED, Parameter, Problems, Table
from djl_trtllm.api.sampling import ADAPTER, NOT_HONOURED, SAMPLING
from tests.api.scripts import check_golden

SHARED = frozenset(map(id, (*SAMPLING, *ADAPTER, *NOT_HONOURED)))
MISPLACED = ("details", "do_sample", "inputs", "max_new_tokens", "messages", "parameters", "prompt", "stream")
"""Names that belong into another dialect's bodies, or beside an object and not in it."""


def dumped(value: Any) -> str:
    return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS).decode()


def _plain(value: Any) -> Any:
    return dict(value) if hasattr(value, "keys") else list(value)


def lines_of(row: Parameter) -> Iterator[str]:
    """A row: its names and where its value goes, what is expected, and the JSON schema."""
    target = "refused" if row.target is None else "ignored" if row.target == IGNORED else row.target
    yield f"{', '.join(row.names)} -> {target}{' (joined)' if row.union else ''}"
    if row.target is None:
        yield f"  unless {dumped(row.neutral)}; {row.advice}"
    elif row.kind is not None:
        yield from (f"  {row.kind.expected}", f"  {dumped(row.kind.schema)}")


def check_rows(name: str, rows: Iterable[Parameter]) -> None:
    """Compare rows with `golden/parameters-NAME.txt`; UPDATE_GOLDEN=1 stores them."""
    check_golden(f"parameters-{name}", "".join(f"{line}\n" for row in rows for line in lines_of(row)).encode())


def check_tables(name: str, **tables: Table) -> None:
    """Compare tables with `golden/parameters-NAME.txt`, which has only the names of rows that all dialects share."""
    lines: list[str] = []
    for title, table in tables.items():
        problems = Problems()
        misplaced = [each for each in MISPLACED if each not in table.rows]
        table.read(dict.fromkeys(misplaced, 1), problems, "name")
        lines += [title, f"required: {table.schema().get('required', [])}", *problems.invalid]
        rows = {id(row): row for row in table.rows.values()}
        lines.append("shared: " + ", ".join(row.names[0] for at, row in rows.items() if at in SHARED))
        lines += [line for at, row in rows.items() if at not in SHARED for line in lines_of(row)]
        lines.append("")
    check_golden(f"parameters-{name}", "\n".join(lines).encode())


def check_descriptions(dialect: Dialect) -> None:
    """Compare what a dialect says of its paths with `golden/description-DIALECT.txt`."""
    keys = [*dialect.paths, *dialect.actions, *(f"GET {path}" for path in dialect.pages)]
    keys += [f"DELETE {path}" for path in dialect.removals]
    assert dialect.descriptions.keys() <= {*keys} and dialect.tables.keys() <= {*keys}
    lines = [f"aliases: {sorted(dialect.aliases)}, names_model: {dialect.names_model}, sagemaker: {dialect.sagemaker}"]
    groups: dict[str, list[str]] = {}
    for key in keys:
        described = dialect.descriptions.get(key, Operation())._asdict()
        said = [f"  {name}: {dumped(value)}" for name, value in described.items() if value]
        said += [f"  table: {', '.join(table.schema()['properties'])}" for table in dialect.tables.get(key, ())]
        groups.setdefault("\n".join(said), []).append(key)
    lines += [f"{', '.join(paths)}\n{text}" for text, paths in groups.items()]
    check_golden(f"description-{type(dialect).__name__}", ("\n".join(lines) + "\n").encode())
