"""Serve a compiled engine with the limits that it was compiled for, where the user set no others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from djl_trtllm.config import Config
from djl_trtllm.config.format_setting import format_setting
from djl_trtllm.config.options.registry import OPTIONS
from djl_trtllm.config.sources.origin import Origin

LIMITS = (
    "max_rolling_batch_size",
    "max_num_sequences",
    "max_input_len",
    "max_output_len",
    "max_seq_len",
    "max_num_tokens",
    "max_beam_width",
)
"""The fields of `Options` that an engine is compiled for."""


@dataclass(frozen=True)
class Bound:
    """The most that an option can be: what the engine was compiled for, or what another option of the user leaves.

    `name` is the engine's name for it. `option` is the field of that other option.
    """

    value: int
    name: str
    option: str | None = None


@dataclass(frozen=True)
class Built:
    """What an engine was compiled for, by fields of `Options`.

    `where` names the file that says so. `defaults` are the values of options that the user did not set, `bounds` those
    that options cannot exceed.
    """

    where: str
    defaults: Mapping[str, Any]
    bounds: Mapping[str, Bound] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def apply(config: Config, built: Built) -> Config:
    """The configuration with the engine's limits below everything that the user set, and within its bounds.

    A user's value above a bound is lowered to it with a warning, as TensorRT-LLM does.
    """
    warnings = []
    asked = config
    for name, bound in built.bounds.items():
        value = getattr(config.options, name)
        if not config.is_set(name) or value is None or value <= bound.value:
            continue
        setting = format_setting(asked, name)
        if bound.option is None:
            where, compiled = built.where, f"the engine was compiled with {bound.name} {bound.value}, which applies"
            warnings.append(f"{setting}: {compiled}; leave the option out, or compile the checkpoint again for more")
        else:
            where = format_setting(asked, bound.option)
            warnings.append(f"{setting}: {where} leaves {bound.name} {bound.value}, which applies; change one of them")
        config = config.replace(
            Origin.derived(f"{where}, which lowers {value} ({asked.origin(name)})"), **{name: bound.value}
        )
    defaults = {name: value for name, value in built.defaults.items() if not config.is_set(name)}
    config = config.replace(Origin.derived(built.where), **defaults)
    return replace(config, warnings=(*config.warnings, *warnings), notes=(*config.notes, *built.notes))


def describe_limits(config: Config) -> str:
    """One line with every limit that has a value, grouped by where the values came from."""
    groups: dict[str, list[str]] = {}
    for name in LIMITS:
        value = getattr(config.options, name)
        if value is not None:
            groups.setdefault(str(config.origin(name)), []).append(f"{OPTIONS[name].key}={value}")
    return "limits: " + "; ".join(f"{', '.join(settings)} ({origin})" for origin, settings in groups.items())
