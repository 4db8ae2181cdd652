"""The arguments of TensorRT-LLM that an option's declared effect names."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TARGET = re.compile(r"LLM\((?P<argument>\w+)\)|(?P<owner>[A-Z]\w*)\.(?P<name>\w+)")
_AND = " and "
_WHEN_SET = ", when set"


@dataclass(frozen=True, order=True)
class Target:
    """One argument: a field of a configuration class (`KvCacheConfig.dtype`), or an argument of LLM itself."""

    owner: str
    name: str

    def __str__(self) -> str:
        return f"LLM({self.name})" if self.owner == "LLM" else f"{self.owner}.{self.name}"


@dataclass(frozen=True)
class Effect:
    """What a declared effect says when it consists of arguments and nothing else.

    The option's value is then passed as each of `targets`. With `when_set` only a value that the user set is passed;
    otherwise a default that differs from TensorRT-LLM's own is passed too.
    """

    targets: tuple[Target, ...]
    when_set: bool = False


def read_effect(text: str) -> Effect | None:
    """Read `TARGET`, `TARGET and TARGET` or either with `, when set` behind it; None for any other text."""
    bare = text.removesuffix(_WHEN_SET)
    targets = []
    for part in bare.split(_AND):
        found = _TARGET.fullmatch(part)
        if found is None:
            return None
        targets.append(Target(found["owner"] or "LLM", found["argument"] or found["name"]))
    return Effect(tuple(targets), when_set=bare != text)


def named_targets(text: str) -> tuple[Target, ...]:
    """Every argument that a text names, also between other words."""
    return tuple(
        Target(found["owner"] or "LLM", found["argument"] or found["name"])
        for found in re.finditer(rf"\b(?:{_TARGET.pattern})", text)
    )
