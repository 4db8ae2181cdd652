"""The names that each engine's files and command lines have, with their types, and those that an engine dropped.

`names.json` is made by `python -m tools.engine_names` from the engines' own argument classes. It leaves out what other
tables have: vLLM's EngineArgs (`backends/vllm/names.json`), Triton's names (`config/compat/triton.toml`), and options.
"""

from __future__ import annotations

import difflib
import json
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from djl_trtllm.backends.extra_options import kinds_of
from djl_trtllm.backends.vllm.names import known_versions, tabled_arguments
from djl_trtllm.config.compat import triton
from djl_trtllm.config.options import OPTIONS
from djl_trtllm.files import read_table

_ENGINES = read_table("engines.toml", __package__)
WORKERS: Mapping[str, str] = {engine: row["runs"] for engine, row in _ENGINES.items() if "runs" in row}
"""Dynamo's workers, each with the engine whose arguments it takes beside its own."""
TITLES: Mapping[str, str] = {engine: row["title"] for engine, row in _ENGINES.items() if engine not in WORKERS}
"""The engines by the names that users write, with the names that messages show."""
MODULES: Mapping[str, str] = {engine: row["starts"][-1] for engine, row in _ENGINES.items() if "starts" in row}
"""The Python modules, or programs, that start the engines."""
STARTS = {tuple(words.split()): engine for engine, row in _ENGINES.items() for words in row.get("starts", ())}
"""The words that start an engine."""
ENGINES = tuple(engine for engine in _ENGINES if engine != "dynamo")
"""The engines that have names of their own."""
_BOUND = re.compile(r"\b([gl][et])=(\d+)")
"""A bound of a number, as Pydantic writes it in a type."""
_BOUNDS = {
    "ge": ("of at least", operator.ge),
    "gt": ("above", operator.gt),
    "le": ("of at most", operator.le),
    "lt": ("below", operator.lt),
}


def base(engine: str) -> str:
    """The engine that does the work: that of a worker of Dynamo, else the engine itself."""
    return WORKERS.get(engine, engine)


@dataclass(frozen=True)
class EngineNames:
    """The names of one engine with their types, and other spellings of them.

    `dropped` has the last version with a name and the first one without it, of those that were read. A command line of
    an engine that `abbreviates` may have the beginning of a name.
    """

    title: str
    version: str
    names: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    abbreviates: bool = False

    def find(self, spelling: str) -> str | None:
        """The name that a flag or a key means: `--max-model-len` is `max_model_len`; None where there is none.

        A field of an object has the object's name in front: `--speculative-config.method`.
        """
        head, dot, rest = spelling.partition(".")
        written = bare(spelling)
        for name in (spelling, written, self.aliases.get(written)):
            if name in self.names:
                return name
        if self.abbreviates and spelling.startswith("--"):
            known = (*self.names, *self.aliases)
            meant = {self.aliases.get(name, name) for name in known if name.startswith(written)}
            if len(meant) == 1:
                return meant.pop()
        inside = self.find(head) if dot else None
        return f"{inside}.{rest}" if inside else None

    def has(self, path: str) -> bool:
        """Whether the engine has a name, or an object that a path such as `speculative_config.method` begins with."""
        return any(path[:end] in self.names for end in (*(m.start() for m in re.finditer(r"\.", path)), len(path)))

    def is_list(self, name: str) -> bool:
        """Whether a name has a list and nothing else as its value; `str | list[str]` takes a text too."""
        kind = self.names.get(name, "")
        return "list[" in kind.lower() and {*(kinds_of(kind, {}) or ["text"])} <= {"a list", "null"}

    def refusal(self, name: str, value: Any) -> str:
        """Why the engine refuses a number, by the bounds of its type (`Field(ge=1, le=2048)`); "" where it does not."""
        bounds = _BOUND.findall(self.names.get(name, ""))
        if not isinstance(value, (int, float)) or all(_BOUNDS[kind][1](value, int(most)) for kind, most in bounds):
            return ""
        return f"{self.title} takes a number {' and '.join(f'{_BOUNDS[kind][0]} {most}' for kind, most in bounds)}"

    def similar(self, spelling: str) -> str | None:
        known = (*self.names, *self.aliases)
        return next(iter(difflib.get_close_matches(bare(spelling), known, n=1, cutoff=0.75)), None)


def bare(spelling: str) -> str:
    return spelling.lstrip("-").replace("-", "_")


@cache
def names_of(engine: str) -> EngineNames:
    """The names of an engine, or of a worker of Dynamo (`dynamo.vllm`)."""
    row = _ENGINES[engine]
    own: dict[str, Any] = _table().get(engine, {"version": row.get("version", "")})
    names, aliases = dict(own.get("names", {})), own.get("aliases", {})
    dropped = {name: (last, first) for name, (last, first) in own.get("dropped", {}).items()}
    *earlier, newest = known_versions()
    if engine == "lmi":
        names = {declared.key: declared.expectation for declared in OPTIONS.values()}
        aliases = {other: declared.key for declared in OPTIONS.values() for other in declared.option.aliases}
    elif engine == "triton":
        names = dict.fromkeys(triton.OPTION_OF, "str")
    elif engine == "vllm":
        names |= tabled_arguments(newest)
        dropped |= {n: (last, newest) for last in earlier for n in tabled_arguments(last) if n not in names}
    elif engine in WORKERS:
        inside = names_of(base(engine))
        taken = tabled_arguments(newest) if base(engine) == "vllm" else inside.names
        prefix = row.get("prefix", "")
        names |= {f"{prefix}{name}": kind for name, kind in taken.items() if not name.startswith("--")}
        aliases = {} if prefix else inside.aliases
    return EngineNames(row["title"], own["version"], names, aliases, dropped, row.get("abbreviates", False))


@cache
def _table() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("names.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table
