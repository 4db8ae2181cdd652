"""What rules between options look at: values, where they came from, and what is known of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from djl_trtllm.config.configuration import Config
from djl_trtllm.config.derive import Draft
from djl_trtllm.config.masking import masked
from djl_trtllm.config.options.registry import OPTIONS
from djl_trtllm.config.options.values import as_text
from djl_trtllm.config.sources.origin import Origin


@dataclass(frozen=True)
class RuleContext:
    """Options by the names of their fields.

    `value(name)` is the value that counts, `is_set(name)` whether the user set it, `cited(name)` is `key=value` and its
    origin, `wrote(name)` the name the user wrote. `model_type` is that of config.json, `is_engine` whether the model is
    compiled, `compiled_as` with which quantisation; None where it is not known.
    """

    value: Callable[[str], Any]
    is_set: Callable[[str], bool]
    cited: Callable[[str], str]
    wrote: Callable[[str], str]
    model_type: str | None = None
    is_engine: bool | None = None
    compiled_as: str | None = None


def subject_of_draft(draft: Draft) -> RuleContext:
    """The options of a resolution that is under way."""

    def value(name: str) -> Any:
        return draft.values.get(name, OPTIONS[name].default)

    def cited(name: str) -> str:
        if name in draft.chosen and name not in draft.origins:
            return draft.chosen[name].cited
        return _cited(name, value(name), draft.origins.get(name, Origin.default()))

    def wrote(name: str) -> str:
        return draft.chosen[name].wrote if name in draft.chosen else OPTIONS[name].key

    return RuleContext(value, draft.is_set, cited, wrote)


def subject_of(
    config: Config, model_type: str | None, is_engine: bool | None, compiled_as: str | None = None
) -> RuleContext:
    """The options of a configuration, with what is known of the model."""

    def value(name: str) -> Any:
        return getattr(config.options, name)

    def cited(name: str) -> str:
        return _cited(name, value(name), config.origin(name))

    def wrote(name: str) -> str:
        return OPTIONS[name].key

    return RuleContext(value, config.is_set, cited, wrote, model_type, is_engine, compiled_as)


def _cited(name: str, value: Any, origin: Origin) -> str:
    key = OPTIONS[name].key
    return f"{key}={masked(key, as_text(value)) or 'none'} ({masked('', str(origin))})"
