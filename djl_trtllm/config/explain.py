"""The resolved configuration as a list for people and as a structure for programs; secrets are masked in both."""

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.text import Text

from djl_trtllm.config.options import OPTIONS, DeclaredOption
from djl_trtllm.config.options.choices import Backend
from djl_trtllm.config.options.option import as_text
from djl_trtllm.config.sources import Config, OriginKind, masked, shortened
from djl_trtllm.listing import Listing

_LONGEST_VALUE = 60

Describe = Callable[[DeclaredOption, Backend], str]
"""A function that describes an option's effect on a backend for readers: `backends.planning.describe`."""


def declared_effect(declared: DeclaredOption, backend: Backend) -> str:
    """The effect that an option has on every backend, as `Describe` without the backends' own."""
    return declared.option.effect_everywhere


def render(
    config: Config,
    backend: Backend | None = None,
    *,
    only_set: bool = False,
    describe: Describe = declared_effect,
    width: int | None = None,
) -> Text:
    """A list of all options with their values: where each came from, and its effect on the backend.

    `backend` is the chosen one if `option.backend` is `auto`; without it, the effect on each backend is shown.
    `only_set` leaves out options that have their default. Lines are wrapped at `width`, if it is given. Places are
    relative to the model's directory. `config.warnings` are not part of the list.
    """
    chosen = backend or config.options.backend
    title = f"Configuration (backend: {chosen})"
    if config.model_dir is not None:
        title += f" of {masked('', str(config.model_dir))}"
    listing = Listing(title, width)
    group = ""
    for declared in OPTIONS.values():
        origin = config.origin(declared.name)
        is_default = origin.kind is OriginKind.DEFAULT
        if only_set and is_default:
            continue
        if group != declared.group.name:
            listing.space()
        group = declared.group.name
        value = shown_value(declared, getattr(config.options, declared.name))
        listing.item(
            f"{declared.key} = {value}",
            {"from": _place(config, declared), "effect": describe(declared, chosen)},
            dim=is_default,
        )
    return listing.text


def _place(config: Config, declared: DeclaredOption) -> str:
    """Return where a value came from and what it overrides, relative to the model's directory."""
    overridden = [str(setting) for setting in config.overridden.get(declared.name, ())]
    text = str(config.origin(declared.name)) + (f", overrides {', '.join(overridden)}" if overridden else "")
    return masked("", text if config.model_dir is None else text.replace(f"{config.model_dir}/", ""))


def as_json(config: Config, backend: Backend | None = None, *, describe: Describe = declared_effect) -> dict[str, Any]:
    """The resolved configuration as JSON values.

    `options` maps field names to `key`, `value`, `default`, `unit`, `set` (by the user), `origin` (`kind`, `where`,
    `line`, `text`), `effect` and `overridden` (the settings that this value overrides).
    """
    chosen = backend or config.options.backend
    return {
        "backend": chosen.value,
        "model_dir": None if config.model_dir is None else str(config.model_dir),
        "options": {
            declared.name: _entry(config, declared, describe(declared, chosen)) for declared in OPTIONS.values()
        },
        "warnings": list(config.warnings),
        "notes": list(config.notes),
    }


def _entry(config: Config, declared: DeclaredOption, effect: str) -> dict[str, Any]:
    origin = config.origin(declared.name)
    return {
        "key": declared.key,
        "value": plain_value(declared, getattr(config.options, declared.name)),
        "default": plain_value(declared, declared.default),
        "unit": declared.option.unit or None,
        "set": config.is_set(declared.name),
        "origin": {
            "kind": origin.kind.value,
            "where": masked("", origin.where) or None,
            "line": origin.line,
            "text": shown_origin(config, declared),
        },
        "effect": effect,
        "overridden": [
            {"wrote": setting.assignment, "origin": str(setting.origin)}
            for setting in config.overridden.get(declared.name, ())
        ],
    }


def shown_origin(config: Config, declared: DeclaredOption) -> str:
    """Return where a value came from, masked."""
    return masked("", str(config.origin(declared.name)))


def plain_value(declared: DeclaredOption, value: Any) -> Any:
    """A value as JSON has it, masked."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (str, Path)):
        return masked(declared.key, str(value))
    if isinstance(value, tuple):
        return [plain_value(declared, item) for item in value]
    return value


def shown_value(declared: DeclaredOption, value: Any) -> str:
    """A value with its unit, masked and shortened."""
    if value is None:
        note = declared.option.default_note
        return f"not set: {note}" if note else "not set"
    text = shortened(masked(declared.key, as_text(value)), _LONGEST_VALUE)
    unit = declared.option.unit
    return f"{text} {unit}" if unit and isinstance(value, (int, float)) else text


def differences(first: Config, second: Config) -> list[DeclaredOption]:
    """The options whose values differ, in the order of the documents."""
    return [
        declared for name, declared in OPTIONS.items() if getattr(first.options, name) != getattr(second.options, name)
    ]


def _differing(count: int) -> str:
    return f"{count} option{'s differ' if count > 1 else ' differs'}" if count else "the same"


def render_diff(first: Config, second: Config, names: tuple[str, str], width: int | None = None) -> Text:
    """A list of the differences, with `names` for the two sides, wrapped at `width`, if it is given."""
    found = differences(first, second)
    listing = Listing(f"{names[0]} and {names[1]}: " + _differing(len(found)), width)
    for declared in found:
        listing.space()
        listing.item(
            declared.key,
            {
                name: f"{shown_value(declared, getattr(side.options, declared.name))} ({shown_origin(side, declared)})"
                for name, side in zip(("first", "second"), (first, second), strict=True)
            },
        )
    return listing.text


def diff_as_json(first: Config, second: Config) -> dict[str, Any]:
    """The differences for programs: by field name, `key` and a list of two sides with `value` and `origin`."""
    return {
        declared.name: {
            "key": declared.key,
            "sides": [
                {
                    "value": plain_value(declared, getattr(side.options, declared.name)),
                    "origin": shown_origin(side, declared),
                }
                for side in (first, second)
            ],
        }
        for declared in differences(first, second)
    }
