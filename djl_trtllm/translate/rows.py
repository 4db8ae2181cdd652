"""The rows between the engines: what one option is called in each, how near that is, and what its values become.

For example the row `enable_kv_cache_reuse` is `enable_prefix_caching` in vLLM and `!disable_radix_cache` in SGLang.
Most names come from tables of this package (the option maps of backends, `config/compat`); `rows.toml` has the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from djl_trtllm.backends.base import effects_on
from djl_trtllm.backends.effects import Passed, Target
from djl_trtllm.backends.vllm.names import known_versions, tabled_arguments
from djl_trtllm.config import Backend
from djl_trtllm.config.compat import triton, truss
from djl_trtllm.config.options import OPTIONS, find, suggest
from djl_trtllm.config.options.option import NotAValueError, as_text
from djl_trtllm.files import read_table
from djl_trtllm.translate.names import TITLES, WORKERS, names_of

_ROWS = read_table("rows.toml", __package__)
REPLACED: Mapping[str, Mapping[str, str]] = _ROWS.pop("replaced")
_PATCH = "trt_llm.runtime.patch_kwargs"
_UNCHECKED = "patch_kwargs passes it to TensorRT-LLM, and Truss does not check it"


@dataclass(frozen=True)
class Name:
    """A row's name in one engine. `near` is the reason why it is not the same, "" where it is.

    `values` are that engine's by those of the option; a value without one is lost. A number there is the option's
    divided by `scale`. `negated` is the opposite switch. `borrowed` belongs to another row.
    """

    name: str
    near: str = ""
    negated: bool = False
    values: Mapping[str, str] | None = None
    scale: float = 1
    borrowed: bool = False

    def write(self, value: Any, raw: Any) -> Any:
        """The value of the option as this engine writes it; `raw` is what another engine wrote, where that is text.

        Raises ValueError for a value that this engine does not have.
        """
        if self.values is not None:
            if as_text(value) not in self.values:
                raise ValueError(f"{self.name} has no such value; it has {', '.join(self.values.values())}")
            found = self.values[as_text(value)]
            return None if found == "null" else found
        if self.negated or self.scale != 1:
            if not isinstance(value, (int, float)):
                raise ValueError(f"{self.name} needs {'true or false' if self.negated else 'a number'}")
            return not value if self.negated else round(value / self.scale, 3)
        return raw if isinstance(value, str) else value

    def read(self, row: str, value: Any) -> tuple[Any, Any]:
        """The option's value of one that this engine writes, and that value as others may write it.

        Raises NotAValueError for a value that the option does not have.
        """
        text = "null" if value is None else as_text(value)
        if self.values is not None:
            inverse = {theirs: ours for ours, theirs in self.values.items()}
            if text not in inverse and _has_words(row) and not _PLACEHOLDER.search(text):
                raise NotAValueError(f"it is a word of {self.name}")
            ours = _typed(row, inverse.get(text, text))
            return ours, ours
        ours = _typed(row, value)
        if self.negated and isinstance(ours, bool):
            ours = not ours
        if self.scale != 1 and isinstance(ours, (int, float)):
            ours = ours * self.scale
        return ours, ours if not isinstance(ours, str) else value


_PLACEHOLDER = re.compile(r"\$\w|\${")
"""The beginning of a variable of the shell, or of a placeholder of Triton's scripts, which may be any value."""


def _has_words(row: str) -> bool:
    """Whether an option takes any text, and each engine knows some words only."""
    declared = OPTIONS.get(row)
    return declared is None or not declared.type.choices or "words" in _ROWS[row]


def _typed(row: str, value: Any) -> Any:
    """The value of an option by its type. Raises NotAValueError for other text."""
    declared, text = OPTIONS.get(row), as_text(value)
    if isinstance(value, dict) or value is None or (isinstance(value, list) and declared and not declared.type.many):
        return value
    if declared is not None and "words" not in _ROWS.get(row, {}):
        try:
            return as_plain(declared.type.parse(text, declared.option))
        except NotAValueError:
            if declared.type.base is int and (number := _human(text)) is not None:
                return number
            if _PLACEHOLDER.search(text):
                return value
            raise
    return scalar(value)


def scalar(value: Any) -> Any:
    """The number or the switch that a text is; other text, and what is none, as it is."""
    text = as_text(value)
    if not isinstance(value, str) or not re.fullmatch(r"-?\d{1,18}(\.\d{1,18})?|true|false", text, re.IGNORECASE):
        return value
    return json.loads(text.lower()) if not re.match(r"-?0\d", text) else value


_UNITS = {"k": 1000, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _human(text: str) -> int | None:
    """The number of `8k`, which is 8000 for vLLM, or of `8K`, which is 8192; None for other text."""
    digits, unit = text[:-1], text[-1:]
    return int(float(digits) * _UNITS[unit]) if unit in _UNITS and digits.replace(".", "", 1).isdigit() else None


def as_plain(value: Any) -> Any:
    """A value of an option as TOML and JSON have it."""
    if isinstance(value, tuple):
        return [as_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, list, type(None))) else as_text(value)


def name_in(row: str, engine: str) -> Name | str:
    """The row's name in an engine (or worker of Dynamo), or the reason why it has none."""
    rules, base = _ROWS.get(row, {}), WORKERS.get(engine, engine)
    column = "dynamo" if engine in WORKERS and "dynamo" in {*rules, *rules.get("lost", ())} else base
    lost = rules.get("lost", {})
    reason = rules.get("secret") or lost.get(column)
    if reason is None and column not in rules and engine != "lmi":
        reason = lost.get("all")
    if reason is not None:
        return str(reason)
    own = _own_name(row, engine)
    if own is not None:
        return own
    instead = rules.get("instead", {}).get(base)
    if instead is not None:
        other = name_in(instead["row"], engine)
        if isinstance(other, str):
            return other
        near, values = "; ".join(filter(None, (instead["reason"], other.near))), other.values
        if "values" in instead:
            values = {ours: (values or {}).get(theirs, theirs) for ours, theirs in instead["values"].items()}
        return replace(other, near=near, borrowed=True, values=values)
    return dropped(engine, row) or f"{names_of(engine).title} has no counterpart"


def _own_name(row: str, engine: str) -> Name | None:
    rules = _ROWS.get(row, {})
    base = WORKERS.get(engine, engine)
    column = "dynamo" if engine in WORKERS and "dynamo" in rules else base
    if engine in WORKERS and row.startswith(f"{engine}."):
        return Name(row.removeprefix(f"{engine}."))
    written = rules.get(column) or _derived(engine if engine == "lmi" else base, row)
    if written is None:
        return _patched(row) if engine == "truss" else None
    name = written.removeprefix("!")
    if engine == "dynamo.trtllm" and column == base:
        name = name.removeprefix("--")
        name = name if name in names_of(engine).names else f"trtllm.{name}"
    if engine in WORKERS and not names_of(engine).has(name):
        return None
    rule = {part: rules.get(part, {}).get(column) for part in ("near", "values", "scale")}
    return Name(name, rule["near"] or "", written.startswith("!"), rule["values"], rule["scale"] or 1)


def _patched(row: str) -> Name | None:
    """An argument of TensorRT-LLM that Truss has no name for."""
    known = name_in(row, "trtllm-serve")
    if isinstance(known, str) or known.name.startswith("--") or known.borrowed:
        return None
    near = "; ".join(filter(None, (known.near, _UNCHECKED)))
    return replace(known, name=f"{_PATCH}.{known.name}", near=near)


def _derived(engine: str, row: str) -> str | None:
    if engine == "lmi":
        return _lmi_key(row)
    private = f"{engine}."  # the row of a name that this engine alone knows, see `row_of`
    return row.removeprefix(private) if row.startswith(private) else _tables()[engine].get(row)


def _lmi_key(row: str) -> str | None:
    """LMI's key: that of the option, else `option.NAME` of an argument of vLLM's engine, which LMI passes on."""
    if row in OPTIONS:
        return OPTIONS[row].key
    argument = _ROWS.get(row, {}).get("vllm") or row.removeprefix("vllm.")
    passed = argument in tabled_arguments(known_versions()[-1]) and argument not in OPTIONS
    return f"option.{argument}" if passed else None


@cache
def _tables() -> Mapping[str, Mapping[str, str]]:
    """The names that other tables have, by engine and option."""
    places = read_table("options.toml", "djl_trtllm.backends.tensorrt_llm")["places"]
    trtllm = names_of("trtllm-serve").names
    found: dict[str, dict[str, str]] = {engine: {} for engine in TITLES}
    for name, effect in effects_on(Backend.PYTORCH).items():
        if isinstance(effect, Passed) and (path := _path(effect.targets[0], places)) in trtllm:
            found["trtllm-serve"][name] = path
    for name, effect in effects_on(Backend.VLLM).items():
        if isinstance(effect, Passed):
            found["vllm"][name] = effect.targets[0].name
    arguments = names_of("vllm").names
    found["vllm"] |= {name: name for name, declared in OPTIONS.items() if declared.option.legacy and name in arguments}
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
    found: dict[str, tuple[tuple[bool, bool], str]] = {}
    for row in rows():
        own = _own_name(row, engine)
        if own is not None and not own.name.startswith(_PATCH):
            rank = (bool(own.near), own.negated)
            if own.name not in found or rank < found[own.name][0]:
                found[own.name] = (rank, row)
    also = {_ROWS[row]["also"][engine]: row for row in _ROWS if engine in _ROWS[row].get("also", {})}
    return also | {name: row for name, (_, row) in found.items()}


def row_of(name: str, engine: str) -> str:
    """The row of an engine's name; a name that no row has is one of its own, which that engine alone knows."""
    if engine == "lmi" and name in _ROWS:
        return name
    if engine == "lmi" and (declared := find(name)) is not None:
        return declared.name
    claimed = _claims(engine).get(name)
    base = WORKERS.get(engine, engine)
    if claimed is None and engine == "lmi":
        return row_of(name.removeprefix("option."), "vllm")
    if claimed is None and engine in WORKERS and names_of(base).has(name := name.removeprefix("trtllm.")):
        return row_of(name, base)
    return claimed or f"{engine}.{name}"


def rule(row: str, part: str, of: str | None = None) -> str | None:
    """A part of a row in `rows.toml`, such as `part_of`; of a part with several texts that `of` one engine or value."""
    found = _ROWS.get(row, {}).get(part)
    text: str | None = (found or {}).get(of) if of is not None else found
    return text


def _engines() -> list[str]:
    return [*(engine for engine in TITLES if engine != "dynamo"), *WORKERS]


def name_in_lmi_of_vllm(row: str) -> Name | str:
    """The row's name in LMI where it runs vLLM: an option without effect there is passed on by vLLM's own name."""
    declared = OPTIONS.get(row)
    if declared is None or declared.option.effect_everywhere or row in effects_on(Backend.VLLM):
        return name_in(row, "lmi")
    there = name_in(row, "vllm")
    if isinstance(there, str) or there.name in tabled_arguments(known_versions()[-1]):
        return there if isinstance(there, str) else replace(there, name=f"option.{there.name}")
    return "LMI has no counterpart where it runs vLLM"


def explained(spelling: str) -> Mapping[str, Name | str] | None:
    """One option in every engine by any of its names, or the reason why one has none; None if no engine knows it."""
    declared = find(spelling) or find(f"option.{spelling}")
    row = declared.name if declared is not None else spelling if spelling in _ROWS else None
    for engine in _engines():
        name = names_of(engine).find(spelling)
        row = row or (None if name is None else row_of(name, engine))
    return None if row is None else {engine: name_in(row, engine) for engine in _engines()}


def nearest(spelling: str) -> str:
    """The advice about a name that no engine has: what replaced it, or a similar one."""
    gone = next(filter(None, (dropped(engine, spelling) for engine in _engines())), None)
    if gone is not None:
        return f": {gone}"
    similar = (suggest(spelling), *(names_of(engine).similar(spelling) for engine in _engines()))
    found = next(filter(None, similar), None)
    return f"; did you mean {found}?" if found else ""


def dropped(engine: str, spelling: str) -> str | None:
    """The sentence about a name that an engine had, with what replaced it; None where it never had it."""
    bare, base = spelling.lstrip("-").replace("-", "_"), WORKERS.get(engine, engine)
    names, instead = names_of(engine), REPLACED.get(base, {}).get(bare)
    was = names.was(bare) or (f"{names.title} dropped it" if instead else None)
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
