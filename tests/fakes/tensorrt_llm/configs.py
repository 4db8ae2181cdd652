"""Enums and configuration classes of the table (facts §2.4, §2.5), with the checks of the source."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, cast, get_args

import pydantic

from . import names
from .settings import SINCE_1_2, SINCE_1_3


def _enum(name: str) -> type[enum.Enum]:
    values = {member: description["default"] for member, description in names.members(name).items()}
    return cast("type[enum.Enum]", enum.Enum(name, values, type=str, module=__name__))


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True, use_enum_values=False)

    def explicit_fields(self) -> list[str]:
        return [name for name in type(self).model_fields if name in self.model_fields_set]


class _Plain(Strict):
    """A dataclass before 1.2: an unknown field is a TypeError."""

    def __init__(self, **fields: Any) -> None:
        if not SINCE_1_2:
            for name in fields:
                if name not in type(self).model_fields:
                    raise TypeError(f"{type(self).__name__}.__init__() got an unexpected keyword argument '{name}'")
        super().__init__(**fields)

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


class _Dataclass(Strict):
    """Names are checked, values are not: what a wrong one does, it does later."""

    def __init__(self, **fields: Any) -> None:
        for name in fields:
            if name not in type(self).model_fields:
                raise TypeError(f"{type(self).__name__}.__init__() got an unexpected keyword argument '{name}'")
        super().__init__()
        self.__dict__.update(fields)
        self.model_fields_set.update(fields)

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json", warnings=False)


class _Ignoring(Strict):
    """`BuildConfig` of 1.2: values are checked, unknown names are dropped without a word (the JSON schema of 1.2.1 has
    no `additionalProperties: false` for it, unlike for the others)."""

    model_config = pydantic.ConfigDict(extra="ignore")

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json", warnings=False)


class _Plugins(_Ignoring):
    """`plugin/plugin.py` of 29,952 characters (1.2): keywords are taken, unknown ones dropped; values are checked, also
    when they are assigned. A plugin's `auto` is resolved when it is read, to `dtype`, which the builder sets to the
    model's (`builder.py` of 66,173 characters, `build`)."""

    model_config = pydantic.ConfigDict(validate_assignment=True)

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        return self.dtype if name != "dtype" and isinstance(value, str) and value == "auto" else value

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _convert(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        if value == "enable":
            return True
        if value == "disable":
            annotation = cls.model_fields[str(info.field_name)].annotation
            return False if annotation is bool or bool in get_args(annotation) else None
        if info.field_name == "dtype" and value == "auto":
            raise ValueError("Plugin dtype cannot be 'auto'")
        return value


class _Attributes(Strict):
    """`PluginConfig` before 1.2: the constructor takes nothing; attributes are set, and checked then."""

    model_config = pydantic.ConfigDict(validate_assignment=True)

    def __init__(self, **fields: Any) -> None:
        if fields:
            name = next(iter(fields))
            raise TypeError(f"{type(self).__name__}.__init__() got an unexpected keyword argument '{name}'")
        super().__init__()

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


class KvCacheConfigFields(Strict):
    if TYPE_CHECKING:  # `_config` adds the fields.
        dtype: str
        free_gpu_memory_fraction: float | None
        max_attention_window: list[int] | None

    @pydantic.model_validator(mode="after")
    def _check(self) -> Any:
        fraction = self.free_gpu_memory_fraction
        if fraction is not None and not 0 <= fraction <= 1:
            raise ValueError("kv_cache_config.free_gpu_memory_fraction must be a float between 0 and 1")
        window = self.max_attention_window
        if window is not None and (not window or any(length <= 0 for length in window)):
            raise ValueError("max_attention_window must be a non-empty list of positive integers")
        return self


class CudaGraphConfigFields(Strict):
    if TYPE_CHECKING:
        batch_sizes: list[int] | None
        max_batch_size: int

    @pydantic.model_validator(mode="after")
    def _check(self) -> Any:
        if self.max_batch_size < 0:
            raise ValueError("cuda_graph_config.max_batch_size must be non-negative")
        if self.batch_sizes and self.max_batch_size and max(self.batch_sizes) != self.max_batch_size:
            raise ValueError(
                "Please don't set both cuda_graph_config.batch_sizes and cuda_graph_config.max_batch_size.\n"
                f"cuda_graph_config.batch_sizes: {self.batch_sizes}, "
                f"cuda_graph_config.max_batch_size: {self.max_batch_size}"
            )
        return self


def _config(name: str, base: type[Strict] = Strict) -> type[Strict]:
    fields: dict[str, Any] = {}
    for member_name, member in names.members(name).items():
        if member["kind"] in ("argument", "attribute"):
            fields[member_name] = (names.type_of(member), default_of(member))
    return pydantic.create_model(name, __base__=base, __module__=__name__, **fields)


def default_of(member: dict[str, Any]) -> Any:
    if member["required"]:
        return ...
    default = member["default"]
    if isinstance(default, dict) and "class" in default:
        made = names.NAMESPACE[default["class"]]
        return pydantic.Field(default_factory=made)
    if isinstance(default, dict) and "enum" in default:
        return names.NAMESPACE[default["enum"]][default["name"]]
    if isinstance(default, (list, dict)):
        return pydantic.Field(default_factory=lambda: type(default)(default))
    return default


ENUMS = (
    "CapacitySchedulerPolicy",
    "ContextChunkingPolicy",
    "BatchingType",
    "QuantAlgo",
    "KVCacheType",
    "LoadFormat",
    "SpeculativeDecodingMode",
)
CONFIGS: dict[str, type[Strict]] = {
    # Those that others name come first.
    "DynamicBatchConfig": Strict,
    "SchedulerConfig": Strict,
    "KvCacheConfig": KvCacheConfigFields,
    "PeftCacheConfig": Strict,
    "ExtendedRuntimePerfKnobConfig": Strict,
    "CudaGraphConfig": CudaGraphConfigFields,
    "TorchCompileConfig": Strict,
    "MoeConfig": Strict,
    "CalibConfig": _Plain,
    # Dataclasses in the JSON schema of 1.2.1.
    "QuantConfig": _Plain if SINCE_1_3 else _Dataclass,
    "LoraConfig": _Plain if SINCE_1_3 else _Dataclass,
    "PluginConfig": _Plugins if SINCE_1_2 else _Attributes,
    "BuildConfig": _Ignoring if SINCE_1_2 else _Dataclass,
}

for _name in ENUMS:
    if names.has(_name):
        names.NAMESPACE[_name] = globals()[_name] = _enum(_name)
for _name, _base in CONFIGS.items():
    if names.has(_name):
        names.NAMESPACE[_name] = globals()[_name] = _config(_name, _base)
