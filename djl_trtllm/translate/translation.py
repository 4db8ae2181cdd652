"""Turns settings of one engine into those of another: the engines' names, the rows between them, and lines.

A row says what one option is called in each engine, and how near that is. A line is one setting with its origin,
exactness and reason.

`names.json` is made by `python -m tools.engine_names` from the engines' own argument classes. It leaves out what other
tables have: vLLM's EngineArgs (`backends/vllm/names.json`), Triton's names (`config/compat/triton.toml`), and options.
Most rows come from tables of this package too (the option maps of backends, `config/compat`); `rows.toml` has the
others. For example the row `enable_kv_cache_reuse` is `enable_prefix_caching` in vLLM and `!disable_radix_cache` in
SGLang.
"""

import difflib
import json
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from djl_trtllm.backends.base import effects_on
from djl_trtllm.backends.effects import Passed, Target
from djl_trtllm.backends.extra_options import kinds_of
from djl_trtllm.backends.vllm.names import known_versions, tabled_arguments
from djl_trtllm.config import Backend
from djl_trtllm.config.compat import triton, truss
from djl_trtllm.config.explain import plain_value
from djl_trtllm.config.options import OPTIONS, find, suggest
from djl_trtllm.config.options.option import NotAValueError, as_text
from djl_trtllm.config.sources import Origin, masked, shortened
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.files import read_table

_ENGINES = read_table("engines.toml", __package__)
_NAMES = read_table("names.json", __package__)
WORKERS: Mapping[str, str] = {engine: row["runs"] for engine, row in _ENGINES.items() if "runs" in row}
"""Dynamo's workers, each with the engine whose arguments it takes beside its own."""
TITLES: Mapping[str, str] = {engine: row["title"] for engine, row in _ENGINES.items() if engine not in WORKERS}
"""The engines by the names that users write, with the names that messages show."""
STARTS = {tuple(words.split()): engine for engine, row in _ENGINES.items() for words in row.get("starts", ())}
"""The words that start an engine."""
ENGINES = tuple(engine for engine in _ENGINES if engine != "dynamo")
"""The engines that have names of their own."""
_BOUNDS = {"ge": "of at least", "gt": "greater than", "le": "of at most", "lt": "less than"}
"""The bounds of a number in words, by the names of Pydantic in a type (`Field(ge=1)`) and of Python's operators."""


def base(engine: str) -> str:
    """The engine that does the work: that of a worker of Dynamo, else the engine itself."""
    return WORKERS.get(engine, engine)


@dataclass(frozen=True)
class EngineNames:
    """The names of one engine with their types, and other spellings of them.

    `dropped` has the last version with a name and the first one without it, of those that were read. `module` is the
    Python module that starts the engine. A command line of an engine that `abbreviates` may have the beginning of a
    name.
    """

    title: str
    version: str
    names: Mapping[str, str]
    aliases: Mapping[str, str]
    dropped: Mapping[str, Sequence[str]]
    module: str
    abbreviates: bool

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
        return any(f"{path}.".startswith(f"{name}.") for name in self.names)

    def is_list(self, name: str) -> bool:
        """Whether a name has a list and nothing else as its value; `str | list[str]` takes a text too."""
        kind = self.names.get(name, "")
        return "list[" in kind.lower() and {*(kinds_of(kind, {}) or ["text"])} <= {"a list", "null"}

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError for a number that is not within the bounds of its type, such as `Field(ge=1, le=2048)`."""
        for kind, bound in re.findall(r"\b([gl][et])=(\d+)", self.names.get(name, "")):
            if isinstance(value, (int, float)) and not getattr(operator, kind)(value, int(bound)):
                raise ValueError(f"{self.title} takes a number {_BOUNDS[kind]} {bound}")

    def similar(self, spelling: str) -> str | None:
        known = (*self.names, *self.aliases)
        return next(iter(difflib.get_close_matches(bare(spelling), known, n=1, cutoff=0.75)), None)


def bare(spelling: str) -> str:
    return spelling.lstrip("-").replace("-", "_")


@cache
def names_of(engine: str) -> EngineNames:
    """The names of an engine, or of a worker of Dynamo (`dynamo.vllm`)."""
    row = {"version": "", "names": {}, "aliases": {}, "dropped": {}} | _ENGINES[engine] | _NAMES.get(engine, {})
    names, aliases, dropped = dict(row["names"]), row["aliases"], dict(row["dropped"])
    *earlier, newest = known_versions()
    if engine == "lmi":
        names = {declared.key: declared.expectation for declared in OPTIONS.values()}
        aliases = {other: declared.key for declared in OPTIONS.values() for other in declared.option.aliases}
    elif engine == "triton":
        names = dict.fromkeys(triton.OPTION_OF, "str")
    elif engine == "vllm":
        names |= tabled_arguments(newest)
        aliases = {"O": "optimization_level"} | aliases  # which its parser has, and no argument
        dropped |= {n: (last, newest) for last in earlier for n in tabled_arguments(last) if n not in names}
    elif engine in WORKERS:
        inside, prefix = names_of(base(engine)), row.get("prefix", "")
        taken = tabled_arguments(newest) if base(engine) == "vllm" else inside.names
        names |= {f"{prefix}{name}": kind for name, kind in taken.items() if not name.startswith("--")}
        aliases = aliases if prefix else {**inside.aliases, **aliases}
    module, abbreviates = row.get("starts", [""])[-1], row.get("abbreviates", False)
    return EngineNames(row["title"], row["version"], names, aliases, dropped, module, abbreviates)


# -- values ------------------------------------------------------------------------------------------------------------

_PLACEHOLDER = "$"
"""The beginning of a variable of the shell, or of a placeholder of Triton's scripts, which may be any value."""
_HUMAN = re.compile(r"(\d+(?:\.\d*)?)([kmgKMG])")
_UNITS = {"k": 1000, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
"""`8k` is 8000 for vLLM, and `8K` is 8192."""
_SCALAR = re.compile(r"-?(0|[1-9]\d{0,17})(\.\d{1,18})?|true|false", re.IGNORECASE | re.ASCII)
_MOST_NESTED = 200


@dataclass(frozen=True)
class Name:
    """A row's name in one engine, or why it is `lost` there. `near` has the reasons why it is not the same.

    `values` are that engine's by those of the option; a value without one is lost. A number there is the option's
    divided by `scale`. `negated` is the opposite switch. With `many` it takes nothing but a list.
    """

    name: str = ""
    near: Sequence[str] = ()
    lost: str = ""
    values: Mapping[str, str] | None = None
    scale: int = 1
    negated: bool = False
    many: bool = False

    def as_json(self) -> dict[str, Any]:
        exactness = "lost" if self.lost else "near" if self.near else "same"
        shown = {"name": "!" * self.negated + self.name or None, "exactness": exactness}
        return shown | {"reason": self.lost or "; ".join(self.near)} | ({"values": self.values} if self.values else {})

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
            words = row not in OPTIONS or not OPTIONS[row].type.choices or rule(row, "words")
            if text not in inverse and words and _PLACEHOLDER not in text:
                raise NotAValueError(f"it is a word of {self.name}")
            return _typed(row, inverse.get(text, text))
        if self.scale != 1 and isinstance(number := scalar(value), (int, float)):
            value = round(number * self.scale)
        ours = _typed(row, value)
        return not ours if self.negated and isinstance(ours, bool) else ours


def _typed(row: str, value: Any) -> Any:
    """The value of an option by its type. Raises NotAValueError for other text."""
    declared, text = OPTIONS.get(row), str(value) if isinstance(value, float) else as_text(value)
    if isinstance(value, dict) or value is None or (isinstance(value, list) and declared and not declared.type.many):
        return value
    if declared is None or rule(row, "words"):
        return scalar(value)
    try:
        return plain_value(declared, declared.type.parse(text, declared.option))
    except NotAValueError:
        if _PLACEHOLDER in text:
            return value
        if declared.type.base is int and (match := _HUMAN.fullmatch(text)):
            return int(float(match[1]) * _UNITS[match[2]])
        raise


def scalar(value: Any) -> Any:
    """The number or the switch that a text is. Other text, and a value that is no text, stays as it is."""
    return json.loads(value.lower()) if isinstance(value, str) and _SCALAR.fullmatch(value) else value


def parsed(text: str) -> Any:
    """A value of a command line or a file: JSON where it is an object or a list, else text."""
    if text[:1] in ("{", "[") and text.count("{") + text.count("[") <= _MOST_NESTED:
        with suppress(ValueError):
            return json.loads(text)
    return text


# -- the rows ----------------------------------------------------------------------------------------------------------

PATCH = str(_ENGINES["truss"]["prefix"])


def _path(target: Target, places: Mapping[str, str]) -> str:
    """The argument as the YAML file of trtllm-serve has it: `kv_cache_config.max_tokens`."""
    if target.owner == "LLM":
        return target.name
    owner, _, name = places[target.owner].partition(".")
    return f"{_path(Target(owner, name), places)}.{target.name}"


def _elsewhere() -> Iterator[tuple[str, str, str]]:
    """The names that other tables have: engine, row and name."""
    places = read_table("options.toml", "djl_trtllm.backends.tensorrt_llm")["places"]
    for backend, engine in ((Backend.PYTORCH, "trtllm-serve"), (Backend.VLLM, "vllm")):
        for row, effect in effects_on(backend).items():
            if isinstance(effect, Passed):
                name = effect.targets[0].name if engine == "vllm" else _path(effect.targets[0], places)
                if engine == "vllm" or name in names_of(engine).names:
                    yield engine, row, name
    for row, declared in OPTIONS.items():
        yield "lmi", row, declared.key
        if declared.option.legacy and row in names_of("vllm").names:
            yield "vllm", row, row
    for engine, options in (("triton", triton.OPTION_OF), ("truss", truss.OPTION_OF)):
        for name, key in options.items():
            option = find(key)
            if option is not None and name in names_of(engine).names:
                yield engine, option.name, name


def _rows() -> dict[str, dict[str, Any]]:
    """The table with the names that other tables have: of a row with `all` it says itself which engines have one."""
    found: dict[str, dict[str, Any]] = {row: {} for row in OPTIONS}
    for row, rules in _TABLE.items():
        found[row] = {key: {"name": r} if key in _ENGINES and isinstance(r, str) else r for key, r in rules.items()}
    for engine, row, name in _elsewhere():
        if engine == "lmi" or "all" not in found[row]:
            found[row].setdefault(engine, {}).setdefault("name", name)
    return found


_TABLE = read_table("rows.toml", __package__)
REPLACED: Mapping[str, Mapping[str, str]] = _TABLE.pop("replaced")
ROWS = _rows()
"""The rows by name, the options first: the cell of each engine by the engine's name, and what holds for all engines."""


def rule(row: str, part: str) -> Any:
    """The value in a row that holds for all engines, such as `part_of`; None where there is none."""
    return ROWS.get(row, {}).get(part)


def cell(row: str, engine: str) -> Mapping[str, Any]:
    """The value in a row for an engine: of a worker of Dynamo its own, that of all workers or of the engine it runs."""
    places = (engine, "dynamo", base(engine)) if engine in WORKERS else (engine,)
    return next(filter(None, (rule(row, place) for place in places)), {})


def name_in(row: str, engine: str) -> Name:
    """The row's name in an engine (or worker of Dynamo)."""
    own, everywhere = cell(row, engine), {} if engine == "lmi" else rule(row, "all") or {}
    lost = rule(row, "secret") or own.get("lost") or ("name" not in own and everywhere.get("lost"))
    found = None if lost else _own_name(row, engine) or _handed_on(row, engine)
    return found or Name(lost=lost or dropped(engine, row) or f"{names_of(engine).title} has no counterpart")


def _own_name(row: str, engine: str) -> Name | None:
    own, names = cell(row, engine), names_of(engine)
    # A name that this engine alone knows has its own row, see `row_of`.
    private = next((row.removeprefix(f"{each}.") for each in (engine, base(engine)) if row.startswith(f"{each}.")), "")
    written = private or own.get("name")
    if written is None:
        return None
    name = written.removeprefix("!")
    if engine in WORKERS:
        # Arguments of TensorRT-LLM for which its worker has no flag are `--trtllm.NAME` there.
        own_flag = bare(name)
        name = next(filter(names.has, (own_flag, f"trtllm.{own_flag}")), "")
        if not name:
            return None
    rules = {part: own[part] for part in ("near", "values", "scale") if part in own}
    return Name(name, negated=written.startswith("!"), many=names.is_list(name), **rules)


def _handed_on(row: str, engine: str) -> Name | None:
    """The name of an argument that the engine only hands on, LMI to vLLM and Truss to TensorRT-LLM."""
    rules = _ENGINES[engine]
    there = name_in(row, rules["hands_to"]) if "hands_to" in rules else Name()
    taken = tabled_arguments(known_versions()[-1]) if engine == "lmi" else [there.name]
    if not there.name or there.name.startswith("--") or there.name not in taken:
        return None
    key = f"{rules['prefix']}{there.name}"
    other = find(key)  # an option may have the argument's name, and mean something else
    if other is not None and name_in(other.name, "vllm").name != there.name:
        return None
    return replace(there, name=key, near=(*there.near, *rules.get("near", ())))


def name_in_lmi_of_vllm(row: str) -> Name:
    """The row's name in LMI where it runs vLLM: an option without effect there is passed on by vLLM's own name."""
    declared = OPTIONS.get(row)
    if declared is None or declared.option.effect_everywhere or row in effects_on(Backend.VLLM):
        return name_in(row, "lmi")
    there = name_in(row, "vllm")
    return there if there.lost else _handed_on(row, "lmi") or Name(lost="LMI has no counterpart on vLLM")


@cache
def _claims(engine: str) -> Mapping[str, str]:
    """The row of each name of an engine. Of several rows with a name the one with the fewest reasons has it."""
    owned = [(own, row) for row in ROWS if (own := _own_name(row, engine)) is not None]
    also = {cell(row, engine)["also"]: row for row in ROWS if "also" in cell(row, engine)}
    ordered = sorted(owned, key=lambda pair: (len(pair[0].near), pair[0].negated))
    return {own.name: row for own, row in reversed(ordered)} | also


def row_of(name: str, engine: str) -> str:
    """The row of an engine's name; a name that no row has is one of its own, which that engine alone knows."""
    if engine == "lmi":
        declared = find(name)
        row = name if name in _TABLE else declared.name if declared is not None else _claims("lmi").get(name)
        return row or row_of(name.removeprefix("option."), "vllm")
    claimed, inside = _claims(engine).get(name), name.removeprefix(prefix := _ENGINES[engine].get("prefix", ""))
    if claimed is None and engine in WORKERS and name.startswith(prefix) and names_of(base(engine)).has(inside):
        return row_of(inside, base(engine))
    return claimed or f"{engine}.{name}"


# -- what is said of a name --------------------------------------------------------------------------------------------


def explained(spelling: str) -> Mapping[str, Mapping[str, Any]]:
    """One option in every engine by any of its names, as JSON, or why an engine has none.

    Raises `DjlTrtllmError` for a name that none has, with what replaced it, or a similar one.
    """
    declared = find(spelling) or find(f"option.{spelling}")
    named = (row_of(name, engine) for engine in ENGINES if (name := names_of(engine).find(spelling)))
    row = declared.name if declared is not None else spelling if spelling in _TABLE else next(named, None)
    if row is not None:
        return {engine: {"version": names_of(engine).version, **name_in(row, engine).as_json()} for engine in ENGINES}
    gone = next(filter(None, (dropped(engine, spelling) for engine in ENGINES)), None)
    near = suggest(spelling) or next(filter(None, (names_of(engine).similar(spelling) for engine in ENGINES)), None)
    advice = f": {gone}" if gone else f"; did you mean {near}?" if near else ""
    raise DjlTrtllmError(f"{spelling} is a name of no engine that is known here{advice}")


def dropped(engine: str, spelling: str) -> str | None:
    """The sentence about a name that an engine had, with what replaced it; None where it never had it."""
    names, instead = names_of(engine), REPLACED.get(base(engine), {}).get(bare(spelling))
    versions = names.dropped.get(bare(spelling))
    was = f"{names.title} {versions[0]} had it, {versions[1]} does not" if versions else None
    was = was or (f"{names.title} dropped it" if instead else None)
    return f"{was}; instead: {instead}" if was and instead else was


# -- lines ------------------------------------------------------------------------------------------------------------


_LONGEST = 100
COMMAND_LINE = Origin.override("command line")


@dataclass(frozen=True)
class Line:
    """One setting in the terms of an engine, as it was `written`: a name and a value; a lost one has neither.

    `reason` says why it is near or lost, and `row` is the row of `rows.toml` that it was translated by. What is
    `of_this_server` sets nothing here: its reason is of no other engine.
    """

    written: str
    engine: str
    value: Any = None
    origin: Origin = COMMAND_LINE
    name: str | None = None
    reason: str = ""
    row: str = ""
    of_this_server: bool = False

    @property
    def exactness(self) -> str:
        """`same` where the engine does the same with the line, `near`, or `lost` where it has no line."""
        return "lost" if self.name is None else "near" if self.reason else "same"

    def lost(self, reason: str) -> "Line":
        return replace(self, name=None, value=None, reason=reason)

    def as_json(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in ("exactness", "reason", "name", "value", "row")}
        return {"written": self.written, "origin": str(self.origin), **named}

    def __str__(self) -> str:
        """One line about it: `near: --max-model-len=8192 (command line): the reason`."""
        text = f"{self.exactness}: {self.written} ({self.origin})"
        return " ".join((f"{text}: {self.reason}" if self.reason else text).split())


def shown(written: str, value: Any = None) -> str:
    """`NAME=VALUE` with secrets masked, and shortened."""
    if value is None or value == []:
        return shortened(masked("", written), _LONGEST)
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{written}={shortened(masked(written, text), _LONGEST)}"


@dataclass(frozen=True)
class Translation:
    """The settings of `source` as lines for `target`, in the order of the source; where they were read, both are one.

    As read, the settings of Triton and Truss have LMI's names, as those of LMI. `notes` are remarks of reading that are
    about no single setting.
    """

    source: str
    target: str
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()

    @property
    def lost(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.name is None)

    @property
    def kept(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.name is not None)


_ECHOES = ("max_input_len", "max_output_len")
"""Options that `config/` sets by Truss's max_seq_len, because this server bounds prompts and outputs too."""


def engine_named(name: str) -> str:
    """The engine of this name. Raises `DjlTrtllmError`."""
    if name not in (*TITLES, *WORKERS):
        known = ", ".join((*TITLES, *WORKERS))
        raise DjlTrtllmError(f"{name} is no engine that is known here: expected one of {known}")
    return name


def engine_of_lmi(source: str) -> str:
    """The engine that LMI is to run in place of another one: `vllm` or `trtllm`."""
    return "vllm" if base(source) in ("vllm", "sglang") else "trtllm"


def translate(given: Translation, target: str) -> Translation:
    """The settings of one engine as those of `target`; of Dynamo's workers the one that runs the source's engine."""
    target = _worker(given) if target == "dynamo" else engine_named(target)
    lines = [line for each in given.lines for line in _lines(each, given.source, target)]
    return replace(given, target=target, lines=tuple(_once([*_wholes(lines, target)])))


def _worker(given: Translation) -> str:
    """Dynamo's worker for the engine that the source runs on."""
    for worker, engine in WORKERS.items():
        if given.source in (worker, engine):
            return worker
    chosen = " ".join(str(each.value) for each in given.kept if rule(row_of(str(each.name), "lmi"), "chooses"))
    return "dynamo.vllm" if "vllm" in chosen or "lmi-dist" in chosen else "dynamo.trtllm"


def _lines(given: Line, source: str, target: str) -> Iterator[Line]:
    if given.name is None:
        elsewhere = given.of_this_server and target != "lmi"
        yield given.lost(f"{names_of(target).title} has no counterpart" if elsewhere else given.reason)
        return
    row = row_of(given.name, given.engine)
    given = replace(given, row=row)
    if source == "truss" and row in _ECHOES and ".max_seq_len=" in given.written and target != "lmi":
        return
    passes = target == "lmi" and engine_of_lmi(source) == "vllm"
    there = name_in_lmi_of_vllm(row) if passes else name_in(row, target)
    own = name_in(row, given.engine)
    if isinstance(given.value, dict) and there.lost:
        fields = list(_fields(given, target))
        yield from fields if any(each.name for each in fields) else [given.lost(there.lost)]
        return
    if given.value in (None, "") and own.values is None:
        there = Name(lost="it sets nothing, and needs no line")
    try:
        if there.lost:
            raise ValueError(there.lost)
        value = _value(own, there, given, source, target)
        names_of(target).check(there.name, value)
    except ValueError as error:
        # What Triton does was compiled into its engine.
        idle = target != "triton" and as_text(given.value).lower() == rule(row, "idle")
        yield given.lost(f"{as_text(given.value)} is what the target does anyway" if idle else str(error))
        return
    # What is near in both engines in the same way is the same between them. Triton's and Truss's have LMI's names here.
    here = cell(row, source if given.engine == "lmi" else given.engine).get("near", ())
    near = [reason for reason in (*here, *there.near) if (reason in here) != (reason in there.near)]
    if row == "model_name" and isinstance(value, list) and value and base(target) != "vllm":
        near += ["it has one name, which is the first"] if len(value) > 1 else []
        value = value[0]
    if str(value).startswith((".", "/", "~")) and (remote := cell(row, target).get("remote")):
        near.append(remote)
    reason = "" if source == target else "; ".join(near)
    yield replace(given, engine=target, name=there.name, value=value, reason=reason)


def _value(own: Name, there: Name, given: Line, source: str, target: str) -> Any:
    """The value as the target writes it. Raises ValueError for one that the target does not have, or may not have."""
    engines, value = {base(source), base(target)}, given.value
    try:
        ours = own.read(given.row, value)
    except NotAValueError as error:
        # What only one engine knows stays as it is where it runs the target too: LMI hands its words to vLLM.
        if (len(engines) == 1 and own.values == there.values) or (there.values is None and engines <= {"lmi", "vllm"}):
            return value
        if there.values is None:
            raise ValueError(f"no other engine is known to have this value: {error}") from None
        return there.write(value)
    if target != "lmi" and as_text(ours) in (refused := rule(given.row, "refused") or {}):
        raise ValueError(refused[as_text(ours)])
    # Words that both take from the option are written as they stand: each may have spellings of its own.
    stands = isinstance(ours, str) and isinstance(value, str) and own.values is None and there.values is None
    return there.write(value if stands else ours)


def _fields(given: Line, target: str) -> Iterator[Line]:
    """The fields of an object that the target does not have as a whole, each on its own."""
    engine = "vllm" if given.engine == "lmi" else given.engine
    name = name_in(given.row, engine).name or str(given.name)
    for field, value in given.value.items():
        path = f"{name}.{field}"
        written = f"{re.split('[= ]', given.written)[0]} {shown(path, value)}"
        yield from _lines(Line(written, engine, value, given.origin, path), engine, target)


def _wholes(lines: list[Line], target: str) -> Iterator[Line]:
    """The lines. A line is lost too if it tunes a setting that is lost, or that the target needs and does not have."""
    kept = {line.row for line in lines if line.name is not None}
    lost = {line.row for line in lines} - kept
    for line in lines:
        whole = rule(line.row, "part_of")
        if whole is None or whole in kept or (whole not in lost and target in rule(whole, "found_by")):
            yield line
        else:
            yield line.lost(f"{whole} is lost" if whole in lost else f"the target needs {whole}, which is not set")


def _once(lines: list[Line]) -> Iterator[Line]:
    """One line for each name: the exact one, or else the last one, because the last of repeated flags wins.

    A field of an object that another line sets as a whole is lost.
    """
    best: dict[str | None, Line] = {}
    for line in lines:
        earlier = best.setdefault(line.name, line)
        if line.row == earlier.row or line.exactness in (earlier.exactness, "same"):
            best[line.name] = line
    for line in lines:
        path = [] if line.name is None else line.name.split(".")
        objects = (".".join(path[:end]) for end in range(1, len(path)))
        winner = next((best[name] for name in objects if name in best), best[line.name])
        if line.name is None or line is winner:
            yield line
        elif (winner.written, winner.value) != (line.written, line.value):
            yield line.lost(f"{winner.written} sets {winner.name}")
