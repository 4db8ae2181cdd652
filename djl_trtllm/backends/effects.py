"""What an option does on a backend: the types of a backend's option map, and their description for readers.

Each backend has one map, `options.py` in its folder, from the fields of `Options` to effects. An option that the map
does not name has no effect there, unless its declaration says what it does everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from djl_trtllm.config import Config
from djl_trtllm.config.explain import shown_origin, shown_value
from djl_trtllm.config.format_setting import format_setting
from djl_trtllm.config.options.registry import OPTIONS, DeclaredOption
from djl_trtllm.config.options.values import as_text


@dataclass(frozen=True, order=True)
class Target:
    """One argument: a field of a configuration class (`KvCacheConfig.dtype`), or an argument of LLM itself."""

    owner: str
    name: str

    def __str__(self) -> str:
        return f"LLM({self.name})" if self.owner == "LLM" else f"{self.owner}.{self.name}"


@dataclass(frozen=True)
class Needs:
    """A setting of another option."""

    option: str
    value: Any

    def met(self, config: Config) -> bool:
        return bool(getattr(config.options, self.option) == self.value)

    def __str__(self) -> str:
        return f"{OPTIONS[self.option].key}={as_text(self.value)}"


@dataclass(frozen=True)
class Passed:
    """The value is passed as each of `targets`, without further code.

    With `when_set` only a value that the user set is passed; otherwise also a default that differs from the engine's.
    `bound` and `needs` as in `Derived`.
    """

    targets: tuple[Target, ...]
    when_set: bool = False
    bound: str = ""
    needs: Needs | None = None

    def __str__(self) -> str:
        return _joined(self.targets) + (", when set" if self.when_set else "") + _condition(self)


@dataclass(frozen=True)
class Derived:
    """Code reads the value. `targets` are the arguments that follow from it, `note` says how.

    `bound` is the attribute of the plan that holds what the value becomes, where that may be lower. `needs` is the
    setting of another option without which the value has no effect.
    """

    note: str
    targets: tuple[Target, ...] = ()
    bound: str = ""
    needs: Needs | None = None

    def __str__(self) -> str:
        text = f"{_joined(self.targets)}: {self.note}" if self.targets else self.note
        return text + _condition(self)


@dataclass(frozen=True)
class Fixed:
    """The backend always does what `value` says, for a reason that a user may want to know."""

    value: Any
    reason: str

    def __str__(self) -> str:
        return f"always {as_text(self.value)}: {self.reason}"


@dataclass(frozen=True)
class NoEffect:
    """Nothing reads the value, for a reason that a user may want to know."""

    reason: str

    def __str__(self) -> str:
        return f"no effect: {self.reason}"


SENT_TOGETHER = Derived("the engine process sends the output of as many iterations together")
"""`stream_interval` of an engine whose iterations the engine process runs."""

_READ = (Passed, Derived)
Effect = Passed | Derived | Fixed | NoEffect
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


def fixed(reason: str, **values: Any) -> dict[str, Effect]:
    return {name: Fixed(value, reason) for name, value in values.items()}


def bounded(effects: Effects) -> Effects:
    """The map, with the limits that a plan may lower to what model, engine and memory allow."""
    return {
        name: replace(effect, bound=_BOUNDS[name]) if name in _BOUNDS and isinstance(effect, _READ) else effect
        for name, effect in effects.items()
    }


def needing(option: str, value: Any, effects: Effects) -> Effects:
    """Options that have no effect unless `option` has this value."""
    return {
        name: replace(effect, needs=Needs(option, value)) if isinstance(effect, _READ) else effect
        for name, effect in effects.items()
    }


def describe(declared: DeclaredOption, effects: Effects, backend: str) -> str:
    """What an option does on a backend, for readers."""
    everywhere = declared.option.effect_everywhere
    return everywhere or str(effects.get(declared.name, f"no effect on {backend}"))


def has_effect(declared: DeclaredOption, effects: Effects) -> bool:
    """Whether anything reads the option on a backend with these effects."""
    if declared.option.effect:
        return True
    return not declared.option.legacy and not isinstance(effects.get(declared.name), Fixed | NoEffect | None)


def effective_value(config: Config, effects: Effects, name: str) -> Any:
    """The value that an option has on a backend: the configured one, or what it always is there."""
    declared = OPTIONS[name]
    if has_effect(declared, effects):
        return getattr(config.options, name)
    effect = effects.get(name)
    return effect.value if isinstance(effect, Fixed) else declared.default


def deviations(
    config: Config, effects: Effects, backend: str, plan: object = None, *, under_djl: bool = False
) -> tuple[str, ...]:
    """One line for each option that the user set and that does nothing on the backend, something else, or less.

    `plan` has what limits have become. Options that a warning of the configuration or a note of the plan names for the
    same reason are left out, and with `under_djl` those that DJL Serving reads.
    """
    lines = []
    for declared in OPTIONS.values():
        option = declared.option
        if not config.is_set(declared.name) or option.warn or option.effect or (under_djl and option.under_djl):
            continue
        deviation = _deviation(config, declared, effects, backend, plan)
        if deviation and not _is_reported(config, declared.name, getattr(plan, "notes", ())):
            lines.append(setting_line(config, declared, deviation))
    return tuple(lines)


def setting_line(config: Config, declared: DeclaredOption, effect: str) -> str:
    """An option's value, where that came from, and what it does."""
    value = shown_value(declared, getattr(config.options, declared.name))
    return f"{declared.key} = {value} ({shown_origin(config, declared)}): {effect}"


def _is_reported(config: Config, name: str, notes: Iterable[str]) -> bool:
    setting = format_setting(config, name)
    warned = any(line.startswith(setting) and "has no effect" in line for line in config.warnings)
    return warned or any(setting in note for note in notes)


def _deviation(config: Config, declared: DeclaredOption, effects: Effects, backend: str, plan: object) -> str:
    """What is different from what the value says; "" if nothing is."""
    effect = effects.get(declared.name)
    value = getattr(config.options, declared.name)
    if declared.option.legacy or effect is None or isinstance(effect, NoEffect):
        return describe(declared, effects, backend)
    if isinstance(effect, Fixed):
        return str(effect) if value not in (None, effect.value) else ""
    if effect.needs and not effect.needs.met(config):
        return f"no effect without {effect.needs}"
    if not effect.bound or plan is None or value is None:
        return ""
    used = getattr(plan, effect.bound)
    return f"{shown_value(declared, used)} here: {effect}" if used < value else ""


_BOUNDS = {
    "max_input_len": "max_input_len",
    "max_seq_len": "max_seq_len",
    "max_rolling_batch_size": "max_sequences",
    "max_num_sequences": "max_sequences",
}
"""Attributes of `EnginePlan` by the options that ask for them."""


def _condition(effect: Passed | Derived) -> str:
    bound = ", or less where model, engine or memory allow no more" if effect.bound else ""
    return bound + (f", with {effect.needs}" if effect.needs else "")


def _joined(targets: Iterable[Target]) -> str:
    return " and ".join(map(str, targets))
