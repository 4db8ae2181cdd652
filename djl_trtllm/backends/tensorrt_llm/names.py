"""The names of TensorRT-LLM that this package uses: what each version has, and how that is known.

The rows are in `names.json`, one per line. They are the one source for what may be passed to
TensorRT-LLM, for the version gates, and for `docs/tensorrt-llm-names.md`; `tools.tensorrt_llm.check` compares them with
a real package. `build_arguments` is the one place that imports TensorRT-LLM's configuration classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

import msgspec
from packaging.version import Version

from djl_trtllm.files import read_table


class _Required(Enum):
    REQUIRED = "required"

    def __repr__(self) -> str:
        return self.name


REQUIRED: Final = _Required.REQUIRED
"""The default of a member that has none."""

KNOWN_VERSIONS: Final = ("1.0.0", "1.1.0", "1.2.0", "1.2.1", "1.3.0rc20", "1.3.0rc21", "1.3.0", "1.4.0rc1")
"""Versions that the table distinguishes and the tests cover."""

MemberKind: TypeAlias = Literal["argument", "field", "attribute", "method", "enum"]
OwnerKind: TypeAlias = Literal["class", "enum", "function"]


@dataclass(frozen=True, kw_only=True)
class Member:
    """One name that an owner has from `since` on and before `until`.

    `kind`: an `argument` of the constructor or function; a `field` of an object that TensorRT-LLM makes; an
    `attribute` that is set or read on the object and is no constructor argument; a `method`; a member of an `enum`.
    `default` is plain data: `{"class": X}` stands for X(), `{"enum": X, "name": N}` for X.N.
    """

    owner: str
    name: str
    type: str
    default: object = REQUIRED
    since: str
    until: str | None = None
    evidence: str
    kind: MemberKind


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A class, enum or function of TensorRT-LLM.

    `imports` says since when and until when it is imported from which module, as `symbol` (a dotted path inside the
    module). Its members are those of its own rows and of the owners in `base`; a base that is no owner is a class of
    Python that it derives from. `declared` is the class (`module:name`) that declares the arguments of a constructor
    that only passes keywords on.
    """

    name: str
    imports: tuple[tuple[str, str | None, str], ...]
    base: tuple[str, ...] = ()
    kind: OwnerKind
    symbol: str
    declared: str | None = None


def owners() -> Mapping[str, Owner]:
    return _table()[0]


def all_members() -> tuple[Member, ...]:
    """Every row, by owner, name and version."""
    return _table()[1]


def eras() -> Mapping[str, str]:
    """The tags in `evidence`: the files that each stands for, and about which version they belong to."""
    return _table()[2]


def lora_modules() -> Mapping[str, str]:
    """TensorRT-LLM's modules that adapters change, with Hugging Face's (`lora_helper.py`, about 1.2 and 1.3)."""
    return _table()[3]


def members(owner: str, version: str) -> Mapping[str, Member]:
    """Return the members of `owner` in `version`, with those of its bases; none where the version lacks the owner.

    Raises KeyError for an owner that the table does not have.
    """
    return _members(owner, Version(version))


def has(owner: str, name: str, version: str) -> bool:
    return name in members(owner, version)


def default_of(owner: str, name: str, version: str) -> object:
    """The default of a member, REQUIRED where it has none; KeyError where the version lacks the member."""
    return members(owner, version)[name].default


def module_of(owner: str, version: str) -> str:
    """The module that `owner` is imported from in `version`; KeyError where that version does not have it."""
    wanted = Version(version)
    for since, until, module in owners()[owner].imports:
        if _within(wanted, since, until):
            return module
    raise KeyError(f"{owner} is not in TensorRT-LLM {version}")


@cache
def _members(owner: str, version: Version) -> Mapping[str, Member]:
    declared, rows, *_ = _table()
    found: dict[str, Member] = {}
    if any(_within(version, since, until) for since, until, _ in declared[owner].imports):
        for base in declared[owner].base:
            if base in declared:
                found.update(_members(base, version))
        for row in rows:
            if row.owner == owner and _within(version, row.since, row.until):
                found[row.name] = row
    return MappingProxyType(found)


def _within(version: Version, since: str, until: str | None) -> bool:
    return Version(since) <= version and (until is None or version < Version(until))


@cache
def _table() -> tuple[Mapping[str, Owner], tuple[Member, ...], Mapping[str, str], Mapping[str, str]]:
    data = read_table("names.json", __package__)
    named = {row["name"]: msgspec.convert({"symbol": row["name"], **row}, Owner) for row in data["owners"]}
    rows = msgspec.convert(data["members"], tuple[Member, ...])
    return MappingProxyType(named), rows, MappingProxyType(data["eras"]), MappingProxyType(data["lora_modules"])


def build_arguments(data: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of LLM that `data` describes (see `arguments.Arguments`).

    Raises what TensorRT-LLM's classes raise for values they do not take (ValueError, pydantic's ValidationError).
    """
    version = import_module("tensorrt_llm").__version__
    return {name: _object(value, version) for name, value in data.items()}


def _object(value: Any, version: str) -> Any:
    if isinstance(value, list):
        return [_object(item, version) for item in value]
    if not isinstance(value, Mapping):
        return value
    if "enum" in value:
        return getattr(_import(value["enum"], version), value["name"])
    fields = {name: _object(item, version) for name, item in value.items() if name != "class"}
    return _instance(value["class"], fields, version) if "class" in value else fields


def _instance(owner: str, fields: dict[str, Any], version: str) -> Any:
    known = members(owner, version)
    attributes = {name for name, member in known.items() if member.kind == "attribute"}
    arguments = {name: item for name, item in fields.items() if name not in attributes}
    instance = _import(owner, version)(**arguments)
    # Some classes have no constructor arguments, only attributes: PluginConfig.
    for name in fields.keys() - arguments.keys():
        setattr(instance, name, fields[name])
    return instance


def _import(owner: str, version: str) -> Any:
    found: Any = import_module(module_of(owner, version))
    for name in owners()[owner].symbol.split("."):
        found = getattr(found, name)
    return found
