"""Effects of options on a backend: the types of a backend's option map, and their description for readers.

Each backend has one map, `options.toml` in its folder, from the fields of `Options` to effects. An option that the map
does not name has no effect there, unless its declaration says what it does everywhere.
"""

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from djl_trtllm.config import Config
from djl_trtllm.config.options import OPTIONS, DeclaredOption
from djl_trtllm.config.options.option import as_text
from djl_trtllm.files import read_table


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
    `bound`, `needs` and `refused` as in `Derived`.
    """

    targets: tuple[Target, ...]
    when_set: bool = False
    bound: str = ""
    needs: Needs | None = None
    refused: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return _joined(self.targets) + (", when set" if self.when_set else "") + _condition(self)


@dataclass(frozen=True)
class Derived:
    """Code reads the value. `targets` are the arguments that follow from it, `note` says how they follow.

    `bound` is the attribute of the plan that holds what the value becomes, where that may be lower. `needs` is the
    setting of another option without which the value has no effect. `refused` are values that the engine does not have,
    with what to do instead.
    """

    note: str
    targets: tuple[Target, ...] = ()
    bound: str = ""
    needs: Needs | None = None
    refused: Mapping[str, str] = field(default_factory=dict)

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


_READ = (Passed, Derived)
Effect = Passed | Derived | Fixed | NoEffect
Effects = Mapping[str, Effect]
"""The option map of a backend: effects by field of `Options`."""
_ARGUMENTS = re.compile(r"(\w+\.\w+(?:, \w+\.\w+)*): ")


def read_effects(package: str, *groups: str) -> Effects:
    """Return the option map in `options.toml` beside the modules of `package`; a later group overrides an earlier one.

    A group has tables of these names, for example:

        passed = { LLM = ["dtype", "option=argument"] }      the value as it is; passed_when_set: none by default
        passed_as = { option = "OWNER.argument, OWNER.argument" }
        derived = { option = "OWNER.argument: note" }        or the note alone
        fixed = { "reason" = { option = 32 } }
        without = { "reason" = ["option"] }
        needing = { "enable_lora=true" = { passed = ... } }  a group that has an effect with this setting only
        refused = { option = { value = "what to do instead" } }  of an option that a group has
    """
    table = read_table("options.toml", package)
    found = {name: effect for group in groups for name, effect in _effects(table[group]).items()}
    for group in groups:
        for name, values in table[group].get("refused", {}).items():
            found[name] = replace(found[name], refused=values)
    return found


def _effects(group: Mapping[str, Any]) -> dict[str, Effect]:
    found: dict[str, Effect] = {}
    for when_set, key in ((False, "passed"), (True, "passed_when_set")):
        for owner, names in group.get(key, {}).items():
            pairs = (name.partition("=") for name in names)
            found |= {name: Passed((Target(owner, argument or name),), when_set) for name, _, argument in pairs}
    found |= {name: Passed(_targets(text)) for name, text in group.get("passed_as", {}).items()}
    for name, text in group.get("derived", {}).items():
        arguments = _ARGUMENTS.match(text)
        found[name] = Derived(text[arguments.end() :], _targets(arguments[1])) if arguments else Derived(text)
    for reason, values in group.get("fixed", {}).items():
        found |= {name: Fixed(_value(name, value), reason) for name, value in values.items()}
    for reason, names in group.get("without", {}).items():
        found |= dict.fromkeys(names, NoEffect(reason))
    for setting, part in group.get("needing", {}).items():
        name, _, text = setting.partition("=")
        needs = Needs(name, _value(name, text))
        found |= {n: replace(effect, needs=needs) for n, effect in _effects(part).items() if isinstance(effect, _READ)}
    return found


def _targets(text: str) -> tuple[Target, ...]:
    return tuple(Target(*argument.split(".")) for argument in text.split(", "))


def _value(name: str, value: Any) -> Any:
    return OPTIONS[name].type.check(value, OPTIONS[name].option)


def passed_values(config: Config, effects: Effects, *, without: Container[str] = ()) -> dict[str, Any]:
    """The arguments of options that are passed as they are, by name as plain data, but for the options `without`."""
    found: dict[str, Any] = {}
    for name, effect in effects.items():
        value = getattr(config.options, name)
        if not isinstance(effect, Passed) or value is None or name in without:
            continue
        if (effect.needs and not effect.needs.met(config)) or (effect.when_set and not config.is_set(name)):
            continue
        plain = list(value) if isinstance(value, tuple) else getattr(value, "value", value)
        found |= {target.name: plain for target in effect.targets}
    return found


def refusals(config: Config, effects: Effects, engine: str) -> list[str]:
    """The problems of options with a value that `engine` does not have."""
    found = []
    for name, effect in effects.items():
        advice = effect.refused.get(as_text(getattr(config.options, name))) if isinstance(effect, _READ) else None
        if advice is not None:
            found.append(f"{config.format_setting(name)} is not available with {engine}: {advice}")
    return found


def with_admission(effects: Effects) -> Effects:
    """The map with what admission does on every backend, and with limits that a plan may lower (`Derived.bound`)."""
    return {
        name: replace(effect, bound=_BOUNDS[name]) if name in _BOUNDS and isinstance(effect, _READ) else effect
        for name, effect in (_ADMISSION | dict(effects)).items()
    }


def describe_effect(declared: DeclaredOption, effects: Effects, backend: str) -> str:
    """Describe an option's effect on a backend, for readers."""
    everywhere = declared.option.effect_everywhere
    return everywhere or str(effects.get(declared.name, f"no effect on {backend}"))


def has_effect(declared: DeclaredOption, effects: Effects) -> bool:
    """Return whether anything reads the option on a backend with these effects."""
    if declared.option.effect:
        return True
    return not declared.option.legacy and not isinstance(effects.get(declared.name), Fixed | NoEffect | None)


_BOUNDS = {
    "max_input_len": "max_input_len",
    "max_seq_len": "max_seq_len",
    "max_rolling_batch_size": "max_sequences",
    "max_num_sequences": "max_sequences",
}
"""Attributes of `EnginePlan` by the options that ask for them."""

_ADMISSION: dict[str, Effect] = {
    **dict.fromkeys(("max_input_len", "max_output_len", "max_seq_len"), Derived("limit at admission")),
    "max_rolling_batch_size": Derived("limit at admission"),
    "max_num_sequences": Derived("limit at admission, the smaller of this and max_rolling_batch_size"),
}
"""Requests are admitted by the server, before any engine gets them."""


def _condition(effect: Passed | Derived) -> str:
    bound = ", or less where model, engine or memory allow no more" if effect.bound else ""
    return bound + (f", with {effect.needs}" if effect.needs else "")


def _joined(targets: Iterable[Target]) -> str:
    return " and ".join(map(str, targets))
