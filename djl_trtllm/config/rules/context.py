"""The inputs of rules between options: values, their origins, and the model's type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from djl_trtllm.config.configuration import Config
from djl_trtllm.config.derive import Draft
from djl_trtllm.config.format_setting import format_setting, format_value
from djl_trtllm.config.options.registry import OPTIONS
from djl_trtllm.config.sources.origin import Origin


@dataclass(frozen=True)
class RuleContext:
    """Options by the names of their fields.

    `value(name)` is the resolved value, `is_set(name)` whether the user set it, `formatted(name)` is `KEY=VALUE
    (origin)`, `wrote(name)` the name that the user wrote. `model_type` is that of config.json, `is_engine` whether the
    model is compiled, `compiled_as` with which quantisation; None if unknown.
    """

    value: Callable[[str], Any]
    is_set: Callable[[str], bool]
    formatted: Callable[[str], str]
    wrote: Callable[[str], str]
    model_type: str | None = None
    is_engine: bool | None = None
    compiled_as: str | None = None


def context_of_draft(draft: Draft) -> RuleContext:
    """The context of a resolution that is not complete."""

    def value(name: str) -> Any:
        return draft.values.get(name, OPTIONS[name].default)

    def formatted(name: str) -> str:
        if name in draft.chosen and name not in draft.origins:
            return draft.chosen[name].formatted
        return format_value(name, value(name), draft.origins.get(name, Origin.default()))

    def wrote(name: str) -> str:
        return draft.chosen[name].wrote if name in draft.chosen else OPTIONS[name].key

    return RuleContext(value, draft.is_set, formatted, wrote)


def context_of(
    config: Config, model_type: str | None, is_engine: bool | None, compiled_as: str | None = None
) -> RuleContext:
    """The context of a configuration and a model."""
    return RuleContext(
        partial(getattr, config.options),
        config.is_set,
        partial(format_setting, config),
        lambda name: OPTIONS[name].key,
        model_type,
        is_engine,
        compiled_as,
    )
