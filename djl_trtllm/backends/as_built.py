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
class Built:
    """What an engine was compiled for, by fields of `Options`.

    `where` names the file that says so. `defaults` are the values of options that the user did not set. `bounds` are
    those that the engine cannot exceed, each with the engine's own name for it and its value.
    """

    where: str
    defaults: Mapping[str, Any]
    bounds: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def apply(config: Config, built: Built) -> Config:
    """The configuration with the engine's limits below everything that the user set, and within its bounds.

    A user's value above a bound is lowered to it with a warning, as TensorRT-LLM does.
    """
    warnings = []
    for name, (engines_name, bound) in built.bounds.items():
        value = getattr(config.options, name)
        if not config.is_set(name) or value is None or value <= bound:
            continue
        warnings.append(
            f"{format_setting(config, name)}: the engine was compiled with {engines_name} {bound}, which applies; "
            f"leave the option out, or compile the checkpoint again for more"
        )
        config = config.replace(
            Origin.derived(f"{built.where}, which lowers {value} ({config.origin(name)})"), **{name: bound}
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
