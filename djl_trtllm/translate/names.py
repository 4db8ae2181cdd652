"""The engines' names, and the rows between them: what one option is called in each, and how near that is.

`names.json` is made by `python -m tools.engine_names` from the engines' own argument classes. It leaves out what other
tables have: vLLM's EngineArgs (`backends/vllm/names.json`), Triton's names (`config/compat/triton.toml`), and options.
Most rows come from tables of this package too (the option maps of backends, `config/compat`); `rows.toml` has the
others. For example the row `enable_kv_cache_reuse` is `enable_prefix_caching` in vLLM and `!disable_radix_cache` in
SGLang.
"""

from __future__ import annotations

import difflib
import json
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from djl_trtllm.backends.base import effects_on
from djl_trtllm.backends.effects import Passed, Target
from djl_trtllm.backends.extra_options import kinds_of
from djl_trtllm.backends.vllm.names import known_versions, tabled_arguments
from djl_trtllm.config import Backend
from djl_trtllm.config.compat import triton, truss
from djl_trtllm.config.options import OPTIONS, find, suggest
from djl_trtllm.config.options.option import NotAValueError, as_text
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
    own: dict[str, Any] = _names().get(engine, {"version": row.get("version", "")})
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
def _names() -> dict[str, Any]:
    return read_table("names.json", __package__)


# -- the rows ----------------------------------------------------------------------------------------------------------

_TABLE = read_table("rows.toml", __package__)
REPLACED: Mapping[str, Mapping[str, str]] = _TABLE.pop("replaced")
_ROWS: Mapping[str, Mapping[str, Any]] = {
    row: {key: {"name": rule} if key in TITLES and isinstance(rule, str) else rule for key, rule in rules.items()}
    for row, rules in _TABLE.items()
}
PATCH = "trt_llm.runtime.patch_kwargs."
_UNCHECKED = "patch_kwargs passes it to TensorRT-LLM, and Truss does not check it"


@dataclass(frozen=True)
class Name:
    """A row's name in one engine. `near` is the reason why it is not the same, "" where it is.

    `values` are that engine's by those of the option; a value without one is lost. A number there is the option's
    divided by `scale`. `negated` is the opposite switch. With `many` it takes nothing but a list. `borrowed` belongs to
    another row.
    """

    name: str
    near: str = ""
    negated: bool = False
    values: Mapping[str, str] | None = None
    scale: float = 1
    many: bool = False
    borrowed: bool = False

    def write(self, value: Any) -> Any:
        """The value of the option as this engine writes it. Raises ValueError for a value that it does not have."""
        if self.values is not None:
            if as_text(value) not in self.values:
                raise ValueError(f"{self.name} has no such value; it has {', '.join(self.values.values())}")
            return None if self.values[as_text(value)] == "null" else self.values[as_text(value)]
        if not self.negated and self.scale == 1:
            return [value] if self.many and not isinstance(value, (list, dict, type(None))) else value
        if not isinstance(value, (int, float)):
            raise ValueError(f"{self.name} needs {'true or false' if self.negated else 'a number'}")
        return not value if self.negated else round(value / self.scale, 3)

    def read(self, row: str, value: Any) -> Any:
        """The option's value that this engine's `value` means. Raises NotAValueError if the option has no such one."""
        if self.values is not None:
            text = "null" if value is None else as_text(value)
            inverse = {theirs: ours for ours, theirs in self.values.items()}
            declared = OPTIONS.get(row)
            words = declared is None or not declared.type.choices or rule(row, "words")
            if text not in inverse and words and not PLACEHOLDER.search(text):
                raise NotAValueError(f"it is a word of {self.name}")
            return _typed(row, inverse.get(text, text))
        ours = _typed(row, value)
        if self.negated and isinstance(ours, bool):
            return not ours
        return ours * self.scale if self.scale != 1 and isinstance(ours, (int, float)) else ours


PLACEHOLDER = re.compile(r"\$\w|\${")
"""The beginning of a variable of the shell, or of a placeholder of Triton's scripts, which may be any value."""


def _typed(row: str, value: Any) -> Any:
    """The value of an option by its type. Raises NotAValueError for other text."""
    declared, text = OPTIONS.get(row), as_text(value)
    if isinstance(value, dict) or value is None or (isinstance(value, list) and declared and not declared.type.many):
        return value
    if declared is None or rule(row, "words"):
        return scalar(value)
    try:
        return _plain(declared.type.parse(text, declared.option))
    except NotAValueError:
        if PLACEHOLDER.search(text):
            return value
        if declared.type.base is int and (match := _HUMAN.fullmatch(text)):
            return int(float(match[1]) * _UNITS[match[2]])
        raise


_HUMAN = re.compile(r"(\d+(?:\.\d*)?)([kmgKMG])")
_UNITS = {"k": 1000, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
"""`8k` is 8000 for vLLM, and `8K` is 8192."""


def _plain(value: Any) -> Any:
    """A value of an option as TOML and JSON have it."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, list, type(None))) else as_text(value)


def scalar(value: Any) -> Any:
    """The number or the switch that a text is. Other text, and a value that is no text, stays as it is."""
    text = as_text(value)
    if not isinstance(value, str) or not re.fullmatch(r"-?\d{1,18}(\.\d{1,18})?|true|false", text, re.IGNORECASE):
        return value
    return json.loads(text.lower()) if not re.match(r"-?0\d", text) else value


def rule(row: str, part: str) -> Any:
    """The value in a row of `rows.toml` that holds for all engines, such as `part_of`; None where there is none."""
    return _ROWS.get(row, {}).get(part)


def cell(row: str, engine: str) -> Mapping[str, Any]:
    """The value in a row for an engine. A worker of Dynamo has that of all workers, else that of the engine it runs."""
    shared = rule(row, "dynamo") if engine in WORKERS else None
    found: Mapping[str, Any] = shared or rule(row, base(engine)) or {}
    return found


def name_in(row: str, engine: str) -> Name | str:
    """The row's name in an engine (or worker of Dynamo), or the reason why it has none."""
    own = cell(row, engine)
    lost = rule(row, "secret") or own.get("lost")
    if "name" not in own and engine != "lmi":
        lost = lost or (rule(row, "all") or {}).get("lost")
    found = lost or _own_name(row, engine) or _instead(row, engine)
    return found or dropped(engine, row) or f"{names_of(engine).title} has no counterpart"


def _own_name(row: str, engine: str) -> Name | None:
    own, names = cell(row, engine), names_of(engine)
    if row.startswith(f"{engine}."):
        name = row.removeprefix(f"{engine}.")  # a name that this engine alone knows, see `row_of`
        return Name(name, many=names.is_list(name))
    private = row.removeprefix(f"{base(engine)}.") if row.startswith(f"{base(engine)}.") else None
    written = own.get("name") or private or (_lmi_key(row) if engine == "lmi" else _tables()[base(engine)].get(row))
    if written is None:
        return _patched(row) if engine == "truss" else None
    name = written.removeprefix("!")
    if engine in WORKERS:
        # Arguments of TensorRT-LLM for which its worker has no flag are `--trtllm.NAME` there.
        own_flag = bare(name)
        name = next(filter(names.has, (own_flag, f"trtllm.{own_flag}")), "")
        if not name:
            return None
    rules = {part: own[part] for part in ("near", "values", "scale") if part in own}
    return Name(name, negated=written.startswith("!"), many=names.is_list(name), **rules)


def _patched(row: str) -> Name | None:
    """An argument of TensorRT-LLM that Truss has no name for."""
    known = name_in(row, "trtllm-serve")
    if isinstance(known, str) or known.name.startswith("--") or known.borrowed:
        return None
    return replace(known, name=f"{PATCH}{known.name}", near="; ".join(filter(None, (known.near, _UNCHECKED))))


def _instead(row: str, engine: str) -> Name | str | None:
    """The name of another row that is near."""
    instead = cell(row, engine).get("instead")
    if instead is None:
        return None
    other = name_in(instead["row"], engine)
    if isinstance(other, str):
        return other
    values = other.values
    if "values" in instead:
        values = {ours: (values or {}).get(theirs, theirs) for ours, theirs in instead["values"].items()}
    near = "; ".join(filter(None, (instead["reason"], other.near)))
    return replace(other, near=near, borrowed=True, values=values)


def _lmi_key(row: str) -> str | None:
    """LMI's key: that of the option, else `option.NAME` of an argument of vLLM's engine, which LMI passes on."""
    if row in OPTIONS:
        return OPTIONS[row].key
    argument = cell(row, "vllm").get("name") or row.removeprefix("vllm.")
    passed = argument in tabled_arguments(known_versions()[-1]) and argument not in OPTIONS
    return f"option.{argument}" if passed else None


def name_in_lmi_of_vllm(row: str) -> Name | str:
    """The row's name in LMI where it runs vLLM: an option without effect there is passed on by vLLM's own name."""
    declared = OPTIONS.get(row)
    if declared is None or declared.option.effect_everywhere or row in effects_on(Backend.VLLM):
        return name_in(row, "lmi")
    there = name_in(row, "vllm")
    if isinstance(there, str) or there.name in tabled_arguments(known_versions()[-1]):
        return there if isinstance(there, str) else replace(there, name=f"option.{there.name}")
    return "LMI has no counterpart where it runs vLLM"


@cache
def _tables() -> Mapping[str, Mapping[str, str]]:
    """The names that other tables have, by engine and option."""
    places = read_table("options.toml", "djl_trtllm.backends.tensorrt_llm")["places"]
    passed = {
        backend: {name: effect.targets[0] for name, effect in effects_on(backend).items() if isinstance(effect, Passed)}
        for backend in (Backend.PYTORCH, Backend.VLLM)
    }
    paths = {name: _path(target, places) for name, target in passed[Backend.PYTORCH].items()}
    found: dict[str, dict[str, str]] = {engine: {} for engine in TITLES}
    found["trtllm-serve"] = {name: path for name, path in paths.items() if path in names_of("trtllm-serve").names}
    legacy = [name for name, declared in OPTIONS.items() if declared.option.legacy and name in names_of("vllm").names]
    found["vllm"] = {name: target.name for name, target in passed[Backend.VLLM].items()} | {n: n for n in legacy}
    for engine, options in (("triton", triton.OPTION_OF), ("truss", truss.OPTION_OF)):
        for name, key in options.items():
            declared = find(key)
            if declared is not None and (engine == "triton" or name in names_of("truss").names):
                found[engine].setdefault(declared.name, name)
    return found


def _path(target: Target, places: Mapping[str, str]) -> str:
    """The argument as the YAML file of trtllm-serve has it: `kv_cache_config.max_tokens`."""
    if target.owner == "LLM":
        return target.name
    owner, _, name = places[target.owner].partition(".")
    return f"{_path(Target(owner, name), places)}.{target.name}"


@cache
def rows() -> tuple[str, ...]:
    """Every row: the options, and the settings that are none."""
    return (*OPTIONS, *(row for row in _ROWS if row not in OPTIONS))


@cache
def _claims(engine: str) -> Mapping[str, str]:
    """The row of each name of an engine. Several rows may have a name: a row that means the same there comes first."""
    names = ((_own_name(row, engine), row) for row in rows())
    owned = [(own, row) for own, row in names if own is not None and not own.name.startswith(PATCH)]
    found: dict[str, str] = {}
    for own, row in sorted(owned, key=lambda pair: (bool(pair[0].near), pair[0].negated)):
        found.setdefault(own.name, row)
    return {cell(row, engine)["also"]: row for row in _ROWS if "also" in cell(row, engine)} | found


def row_of(name: str, engine: str) -> str:
    """The row of an engine's name; a name that no row has is one of its own, which that engine alone knows."""
    if engine == "lmi":
        declared = find(name)
        row = name if name in _ROWS else declared.name if declared is not None else _claims("lmi").get(name)
        return row or row_of(name.removeprefix("option."), "vllm")
    claimed = _claims(engine).get(name)
    if claimed is None and engine in WORKERS and names_of(base(engine)).has(name := name.removeprefix("trtllm.")):
        return row_of(name, base(engine))
    return claimed or f"{engine}.{name}"


def explained(spelling: str) -> Mapping[str, Mapping[str, Any]] | None:
    """One option in every engine by any of its names, as JSON, or why an engine has none; None if none knows it."""
    declared = find(spelling) or find(f"option.{spelling}")
    row = declared.name if declared is not None else spelling if spelling in _ROWS else None
    for engine in ENGINES:
        name = names_of(engine).find(spelling)
        row = row or (None if name is None else row_of(name, engine))
    if row is None:
        return None
    return {engine: {"version": names_of(engine).version, **_described(name_in(row, engine))} for engine in ENGINES}


def _described(own: Name | str) -> Mapping[str, Any]:
    if isinstance(own, str):
        return {"name": None, "exactness": "lost", "reason": own}
    shown = {"name": "!" * own.negated + own.name, "exactness": "near" if own.near else "same", "reason": own.near}
    return shown | ({"values": own.values} if own.values else {})


def nearest(spelling: str) -> str:
    """The advice about a name that no engine has: what replaced it, or a similar one."""
    gone = next(filter(None, (dropped(engine, spelling) for engine in ENGINES)), None)
    found = suggest(spelling) or next(filter(None, (names_of(engine).similar(spelling) for engine in ENGINES)), None)
    return f": {gone}" if gone else f"; did you mean {found}?" if found else ""


def dropped(engine: str, spelling: str) -> str | None:
    """The sentence about a name that an engine had, with what replaced it; None where it never had it."""
    names, instead = names_of(engine), REPLACED.get(base(engine), {}).get(bare(spelling))
    versions = names.dropped.get(bare(spelling))
    was = f"{names.title} {versions[0]} had it, {versions[1]} does not" if versions else None
    was = was or (f"{names.title} dropped it" if instead else None)
    return f"{was}; instead: {instead}" if was and instead else was


def parsed(text: str) -> Any:
    """A value of a command line or a file: JSON where it is an object or a list, else text."""
    if text[:1] in ("{", "[") and text.count("{") + text.count("[") <= _MOST_NESTED:
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


_MOST_NESTED = 200
