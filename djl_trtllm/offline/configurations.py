"""TensorRT-LLM's configuration objects: `LLM(..., kv_cache_config=KvCacheConfig(free_gpu_memory_fraction=0.95))`.

Their fields are options of this project. Which ones is read from TensorRT-LLM's option maps, so that an object has a
field if an option becomes that field there; on another backend the option does what it does there.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from djl_trtllm.backends.base import effects_on
from djl_trtllm.backends.effects import Derived, Passed
from djl_trtllm.config import Backend
from djl_trtllm.config.options import OPTIONS, find
from djl_trtllm.errors import ConfigError


def _options_of(owner: str) -> dict[str, str]:
    """The fields of a class with their options. Where several options set a field, the one passed unchanged wins."""
    found: dict[str, str] = {}
    for kind in (Passed, Derived):
        for effects in (effects_on(Backend.TENSORRT), effects_on(Backend.PYTORCH)):
            for option, effect in effects.items():
                for target in effect.targets if isinstance(effect, kind) else ():
                    if target.owner == owner:
                        found.setdefault(target.name, option)
    return found


class Configuration:
    """One of TensorRT-LLM's configuration objects.

    Keyword arguments are its fields; those that are not given, or None, have their defaults. Raises ConfigError for
    names that it does not have.
    """

    _by_field: ClassVar[dict[str, str]] = {}
    _by_keyword: ClassVar[dict[str, type[Configuration]]] = {}

    def __init_subclass__(cls) -> None:
        cls._by_field = _options_of(cls.__name__)
        # KvCacheConfig is the argument kv_cache_config.
        Configuration._by_keyword[re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()] = cls

    def __init__(self, **fields: Any) -> None:
        problems = [self._unknown(name) for name in fields if self._option(name) is None and not _is_nested(name)]
        if problems:
            raise ConfigError(problems)
        self._fields = fields

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._fields.items())})"

    def options(self) -> dict[str, Any]:
        """The options that its fields set, by the names of `docs/options.md` without `option.`."""
        given = {name: value for name, value in self._fields.items() if value is not None}
        nested = {name: value for name, value in given.items() if _is_nested(name)}
        own = {str(self._option(name)): value for name, value in given.items() if name not in nested}
        return own | flattened(nested)

    @classmethod
    def _option(cls, field: str) -> str | None:
        option = cls._by_field.get(field)
        if option is not None:
            return OPTIONS[option].key.removeprefix("option.")
        declared = find(f"option.{field}")
        # TensorRT-LLM has this field, and it has no effect there or here.
        return None if declared is None or not declared.option.legacy else field

    @classmethod
    def _unknown(cls, field: str) -> str:
        near = difflib.get_close_matches(field, cls._by_field, n=1)
        advice = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(cls._by_field))}"
        return f"{cls.__name__}({field}=...): there is no such field here; {advice}"


class SchedulerConfig(Configuration):
    """How requests share the engine: `capacity_scheduler_policy`, `context_chunking_policy`, ..."""


class DynamicBatchConfig(Configuration):
    """Tuning of the batch by the load, the field `dynamic_batch_config` of `SchedulerConfig`."""


class KvCacheConfig(Configuration):
    """The KV cache: `free_gpu_memory_fraction`, `max_tokens`, `max_attention_window`, ..."""


class PeftCacheConfig(Configuration):
    """The cache of LoRA adapters."""


class LoraConfig(Configuration):
    """LoRA adapters."""


class BuildConfig(Configuration):
    """The limits and features that an engine is compiled for."""


class PluginConfig(Configuration):
    """Plugins of a compiled engine, the field `plugin_config` of `BuildConfig`."""


class QuantConfig(Configuration):
    """How weights and the KV cache are quantised."""


class CalibConfig(Configuration):
    """On what a quantisation is calibrated."""


class ExtendedRuntimePerfKnobConfig(Configuration):
    """Performance switches of a compiled engine."""


class CudaGraphConfig(Configuration):
    """CUDA graphs of the PyTorch backend."""


class TorchCompileConfig(Configuration):
    """torch.compile on the PyTorch backend."""


class MoeConfig(Configuration):
    """Mixture of experts on the PyTorch backend."""


def flattened(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of LLM, with the fields of configuration objects as options of their own.

    An object may also be a dictionary of its fields, or TensorRT-LLM's own. Raises ConfigError.
    """
    flat: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in _unpacked(arguments, problems):
        if name in flat and flat[name] != value:
            problems.append(f"{name} is given twice: {flat[name]!r} and {value!r}; keep one")
        flat[name] = value
    if problems:
        raise ConfigError(problems)
    return flat


def _unpacked(arguments: Mapping[str, Any], problems: list[str]) -> Iterator[tuple[str, Any]]:
    for name, value in arguments.items():
        expected = Configuration._by_keyword.get(name)
        if expected is None or value is None or isinstance(value, str):
            if isinstance(value, Configuration):
                problems.append(f"{name}={value!r}: expected a value; {type(value).__name__} belongs elsewhere")
                continue
            yield name, value
            continue
        fields = value if isinstance(value, Mapping) else _set_fields(value, expected)
        if isinstance(value, expected) or fields is not None:
            yield from (value if isinstance(value, expected) else expected(**(fields or {}))).options().items()
        else:
            problems.append(f"{name}={value!r}: expected {expected.__name__}(...)")


def _set_fields(value: Any, expected: type[Configuration]) -> dict[str, Any] | None:
    """The fields that a program set in TensorRT-LLM's own object, a pydantic model of the same name."""
    if type(value).__name__ != expected.__name__ or not hasattr(value, "model_fields_set"):
        return None
    return {name: getattr(value, name) for name in value.model_fields_set}


def _is_nested(name: str) -> bool:
    return name in Configuration._by_keyword
