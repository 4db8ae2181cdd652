"""What an option does on a backend: the types of a backend's option map, and their description for readers.

Each backend has one map, `options.py` in its folder, from the fields of `Options` to effects. An option that the map
does not name has no effect there, unless its declaration says what it does everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from djl_trtllm.config import Config
from djl_trtllm.config.explain import shown_origin, shown_value
from djl_trtllm.config.options.registry import OPTIONS, DeclaredOption


@dataclass(frozen=True, order=True)
class Target:
    """One argument: a field of a configuration class (`KvCacheConfig.dtype`), or an argument of LLM itself."""

    owner: str
    name: str

    def __str__(self) -> str:
        return f"LLM({self.name})" if self.owner == "LLM" else f"{self.owner}.{self.name}"


@dataclass(frozen=True)
class Passed:
    """The value is passed as each of `targets`, without further code.

    With `when_set` only a value that the user set is passed; otherwise also a default that differs from the engine's.
    """

    targets: tuple[Target, ...]
    when_set: bool = False

    def __str__(self) -> str:
        return _joined(self.targets) + (", when set" if self.when_set else "")


@dataclass(frozen=True)
class Derived:
    """Code reads the value. `targets` are the arguments that follow from it, `note` says how."""

    note: str
    targets: tuple[Target, ...] = ()

    def __str__(self) -> str:
        return f"{_joined(self.targets)}: {self.note}" if self.targets else self.note


@dataclass(frozen=True)
class NoEffect:
    """Nothing reads the value, for a reason that a user may want to know."""

    reason: str

    def __str__(self) -> str:
        return f"no effect: {self.reason}"


Effect = Passed | Derived | NoEffect
Effects = Mapping[str, Effect]
"""The option map of a backend: effects by field of `Options`."""


def fields(owner: str, *names: str, **renamed: str) -> dict[str, Effect]:
    """Options that are passed as fields of one class: those with the same name, and `option="field"`."""
    return {name: Passed((Target(owner, field),)) for name, field in ({n: n for n in names} | renamed).items()}


def passed(*, when_set: bool = False, **targets: str) -> Passed:
    """An option that is passed as several arguments, or only when set; `targets` are `OWNER="argument"`."""
    return Passed(tuple(Target(owner, name) for owner, name in targets.items()), when_set)


def derived(note: str, **targets: str) -> Derived:
    """An option that arguments follow from; `targets` are `OWNER="argument"`."""
    return Derived(note, tuple(Target(owner, name) for owner, name in targets.items()))


def without(reason: str, *names: str) -> dict[str, Effect]:
    return dict.fromkeys(names, NoEffect(reason))


def describe(declared: DeclaredOption, effects: Effects, backend: str) -> str:
    """What an option does on a backend, for readers."""
    everywhere = declared.option.effect_everywhere
    return everywhere or str(effects.get(declared.name, f"no effect on {backend}"))


def has_effect(declared: DeclaredOption, effects: Effects) -> bool:
    """Whether anything reads the option on a backend with these effects."""
    if declared.option.effect:
        return True
    return not declared.option.legacy and not isinstance(effects.get(declared.name), NoEffect | None)


def without_effect(config: Config, effects: Effects, backend: str, *, under_djl: bool = False) -> tuple[str, ...]:
    """One line for each option that the user set and that has no effect on the backend, with the reason.

    Options that are a warning of the configuration when they are set are left out, and with `under_djl` those that
    DJL Serving reads.
    """
    lines = []
    for declared in OPTIONS.values():
        if under_djl and declared.option.under_djl:
            continue
        if config.is_set(declared.name) and not declared.option.warn and not has_effect(declared, effects):
            value = shown_value(declared, getattr(config.options, declared.name))
            reason = describe(declared, effects, backend)
            lines.append(f"{declared.key} = {value} ({shown_origin(config, declared)}): {reason}")
    return tuple(lines)


def _joined(targets: Iterable[Target]) -> str:
    return " and ".join(map(str, targets))
