"""The names that each engine's files and command lines have, with their types, and those that an engine dropped.

`names.json` is made by `python -m tools.engine_names` from the engines' own argument classes. It leaves out what other
tables have: vLLM's EngineArgs (`backends/vllm/names.json`), Triton's names (`config/compat/triton.toml`), and options.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from djl_trtllm.backends.vllm.names import known_versions, tabled_arguments
from djl_trtllm.config.compat import triton
from djl_trtllm.config.options import OPTIONS

TITLES = {
    "lmi": "LMI",
    "vllm": "vLLM",
    "trtllm-serve": "trtllm-serve",
    "sglang": "SGLang",
    "triton": "Triton",
    "truss": "Truss",
    "dynamo": "Dynamo",
}
"""The engines by the names that users write, with the names that messages show."""
WORKERS = {"dynamo.vllm": "vllm", "dynamo.sglang": "sglang", "dynamo.trtllm": "trtllm-serve"}
"""Dynamo's workers, each with the engine whose arguments it takes beside its own."""


@dataclass(frozen=True)
class EngineNames:
    """The names of one engine with their types, and other spellings of them.

    `dropped` has the last version with a name and the first one without it, of those that were read. A command line of
    one that `abbreviates` may have the beginning of a name.
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
        bare = spelling.lstrip("-").replace("-", "_")
        known = (name for name in (spelling, bare, self.aliases.get(bare, "")) if name in self.names)
        inside = self.find(head) if dot else None
        return next(known, None) or self._abbreviated(spelling, bare) or (f"{inside}.{rest}" if inside else None)

    def _abbreviated(self, spelling: str, bare: str) -> str | None:
        """The only name that begins so: argparse takes `--gpu-memory-util`."""
        if not self.abbreviates or not spelling.startswith("--"):
            return None
        meant = {self.aliases.get(name, name) for name in (*self.names, *self.aliases) if name.startswith(bare)}
        return next(iter(meant)) if len(meant) == 1 else None

    def has(self, path: str) -> bool:
        """Whether the engine has a name, or an object that a path such as `speculative_config.method` begins with."""
        return any(path[:end] in self.names for end in (*(m.start() for m in re.finditer(r"\.", path)), len(path)))

    def was(self, spelling: str) -> str | None:
        """The sentence about a name that the engine had once; None where it never had it."""
        versions = self.dropped.get(spelling.lstrip("-").replace("-", "_"))
        return None if versions is None else f"{self.title} {versions[0]} had it, {versions[1]} does not"

    def similar(self, spelling: str) -> str | None:
        bare = spelling.lstrip("-").replace("-", "_")
        near = difflib.get_close_matches(bare, (*self.names, *self.aliases), n=1, cutoff=0.75)
        return near[0] if near else None

    def is_switch(self, name: str) -> bool:
        return "bool" in self.names[name] and "str" not in self.names[name]

    def takes_many(self, name: str) -> bool:
        return "list[" in self.names[name].lower()


@cache
def names_of(engine: str) -> EngineNames:
    """The names of an engine, or of a worker of Dynamo (`dynamo.vllm`)."""
    if engine == "lmi":
        keys = {declared.key: declared.expectation for declared in OPTIONS.values()}
        spellings = {other: declared.key for declared in OPTIONS.values() for other in declared.option.aliases}
        return EngineNames("LMI", "", keys, spellings)
    if engine == "triton":
        return EngineNames("Triton's TensorRT-LLM backend", "0.19", dict.fromkeys(triton.OPTION_OF, "str"))
    if engine in WORKERS:
        return _worker(engine, WORKERS[engine])
    own = _table()[engine]
    names, version = dict(own["names"]), own["version"]
    dropped = {name: (last, first) for name, (last, first) in own["dropped"].items()}
    if engine == "vllm":
        *earlier, version = known_versions()
        names |= tabled_arguments(version)
        dropped |= {n: (last, version) for last in earlier for n in tabled_arguments(last) if n not in names}
    return EngineNames(TITLES[engine], version, names, own["aliases"], dropped, engine in ("vllm", "sglang"))


def _worker(engine: str, base: str) -> EngineNames:
    """Dynamo's own flags, and the engine's; TensorRT-LLM's arguments are `--trtllm.kv_cache_config.dtype` and so on."""
    prefix = engine.removeprefix("dynamo.") + "."
    table = _table()["dynamo"]
    workers = tuple(f"{worker.removeprefix('dynamo.')}." for worker in WORKERS)
    own = {name: kind for name, kind in table["names"].items() if not name.startswith(workers)}
    own |= {name.removeprefix(prefix): kind for name, kind in table["names"].items() if name.startswith(prefix)}
    if base == "trtllm-serve":
        arguments = names_of(base)
        inner = {f"trtllm.{name}": kind for name, kind in arguments.names.items() if not name.startswith("--")}
        return EngineNames(f"Dynamo ({base})", table["version"], own | inner)
    taken = tabled_arguments(known_versions()[-1]) if base == "vllm" else names_of(base).names
    return EngineNames(f"Dynamo ({TITLES[base]})", table["version"], own | dict(taken), names_of(base).aliases)


@cache
def _table() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("names.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table
