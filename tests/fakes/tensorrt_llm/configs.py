"""Enums and configuration classes of the table (facts §2.4, §2.5), with the checks of the source."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

import pydantic

from . import settings
from .build import is_engine, positions, read_config
from .settings import SINCE_1_2, SINCE_1_3, compute_capability, logger


def _enum(name: str) -> type[enum.Enum]:
    values = {member: description["default"] for member, description in settings.members(name).items()}
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


class _Dataclass(Strict):
    """Names are checked, values are not: what a wrong one does, it does later."""

    def __init__(self, **fields: Any) -> None:
        for name in fields:
            if name not in type(self).model_fields:
                raise TypeError(f"{type(self).__name__}.__init__() got an unexpected keyword argument '{name}'")
        super().__init__()
        self.__dict__.update(fields)
        self.model_fields_set.update(fields)


class _Ignoring(Strict):
    """`BuildConfig` of 1.2: values are checked, unknown names are dropped without a word (the JSON schema of 1.2.1 has
    no `additionalProperties: false` for it, unlike for the others)."""

    model_config = pydantic.ConfigDict(extra="ignore")


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
    for member_name, member in settings.members(name).items():
        if member["kind"] in ("argument", "attribute"):
            fields[member_name] = (settings.type_of(member), default_of(member))
    return pydantic.create_model(name, __base__=base, __module__=__name__, **fields)


def default_of(member: dict[str, Any]) -> Any:
    if member["required"]:
        return ...
    default = member["default"]
    if isinstance(default, dict) and "class" in default:
        made = settings.NAMESPACE[default["class"]]
        return pydantic.Field(default_factory=made)
    if isinstance(default, dict) and "enum" in default:
        return settings.NAMESPACE[default["enum"]][default["name"]]
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
    "DraftTargetDecodingConfig": Strict,
    "EagleDecodingConfig": Strict,
    "LookaheadDecodingConfig": Strict,
    "MTPDecodingConfig": Strict,
    "MedusaDecodingConfig": Strict,
    "NGramDecodingConfig": Strict,
    "CalibConfig": _Plain,
    # Dataclasses in the JSON schema of 1.2.1.
    "QuantConfig": _Plain if SINCE_1_3 else _Dataclass,
    "LoraConfig": _Plain if SINCE_1_3 else _Dataclass,
    "PluginConfig": _Plugins if SINCE_1_2 else _Attributes,
    "BuildConfig": _Ignoring if SINCE_1_2 else _Dataclass,
}

for _name in ENUMS:
    if settings.has(_name):
        settings.NAMESPACE[_name] = globals()[_name] = _enum(_name)
for _name, _base in CONFIGS.items():
    if settings.has(_name):
        settings.NAMESPACE[_name] = globals()[_name] = _config(_name, _base)


# -- what the constructor's arguments become: TrtLlmArgs and TorchLlmArgs (facts §2.2 to §2.4) -------------------------

_LIMITS = ("max_batch_size", "max_num_tokens")
_SHAPE = ("max_seq_len", "max_beam_width", "max_input_len")


class BaseLlmArgs(Strict):
    """Checks that both share. `_model` adds the fields; here and below, annotations say their types."""

    if TYPE_CHECKING:
        model: str | Path
        dtype: str
        tensor_parallel_size: int
        pipeline_parallel_size: int
        context_parallel_size: int

    @property
    def worker_count(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _normalise_none(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """From 1.3 on, None stands for these arguments' defaults."""
        if SINCE_1_3 and value is None and info.field_name in ("max_batch_size", "max_input_len", "max_beam_width"):
            return cls.model_fields[info.field_name].default
        return value

    @pydantic.model_validator(mode="after")
    def _check_dtype(self) -> Any:
        """`validate_dtype` of `llmapi/llm_args.py` (1.3rc-mid, as in 1.2rc): elsewhere `auto` stays until loading."""
        if compute_capability() < (8, 0):
            if self.dtype == "auto":
                self.__dict__["dtype"] = "float16"
            if self.dtype == "bfloat16":
                raise RuntimeError("Pre SM 80 GPUs do not support bfloat16")
        return self


_Args = TypeVar("_Args", bound=BaseLlmArgs)


class _TorchArgs(BaseLlmArgs):
    if TYPE_CHECKING:
        stream_interval: int
        enable_iter_perf_stats: bool
        enable_iter_req_stats: bool

    @pydantic.model_validator(mode="after")
    def _check(self) -> Any:
        if self.stream_interval <= 0:
            raise ValueError(f"stream_interval must be positive, got {self.stream_interval}")
        if self.enable_iter_req_stats and not self.enable_iter_perf_stats:
            raise ValueError("enable_iter_req_stats requires enable_iter_perf_stats")
        return self


class _TrtArgs(BaseLlmArgs):
    _is_engine: bool = pydantic.PrivateAttr(default=False)

    if TYPE_CHECKING:
        kv_cache_config: KvCacheConfigFields
        guided_decoding_backend: str | None
        build_config: Any
        enable_lora: bool

    @pydantic.model_validator(mode="after")
    def _check(self) -> Any:
        assert self.kv_cache_config.dtype == "auto", "KvCacheConfig.dtype is not supported by the TensorRT backend."
        if self.guided_decoding_backend not in (None, "xgrammar"):
            raise ValueError(f"Unsupported guided decoding backend {self.guided_decoding_backend}")
        for name, kind in (("quant_config", "QuantConfig"), ("calib_config", "CalibConfig")):
            if getattr(self, name) is None:
                self.__dict__[name] = settings.NAMESPACE[kind]()
        self._infer_format()
        self._settle_build_config()
        return self

    def _infer_format(self) -> None:
        directory = Path(self.model)
        if not directory.is_dir() or not is_engine(directory):
            return
        self._is_engine = True
        config = read_config(directory)
        mapping = config["pretrained_config"].get("mapping", {})
        for argument, name in (
            ("tensor_parallel_size", "tp_size"),
            ("pipeline_parallel_size", "pp_size"),
            ("context_parallel_size", "cp_size"),
        ):
            given, found = getattr(self, argument), mapping.get(name, 1)
            if given not in (1, found):
                raise ValueError(f"{name} {given} is not consistent with the engine's {name} {found}")
            self.__dict__[argument] = found
        if self.build_config is not None:
            logger.warning("The build_config is ignored for model format of TLLM_ENGINE.")
        known = settings.NAMESPACE["BuildConfig"]
        fields = {name: value for name, value in config["build_config"].items() if name in known.model_fields}
        self.__dict__["build_config"] = known.model_construct(**fields)

    def _settle_build_config(self) -> None:
        if self.build_config is None:
            given = {name: getattr(self, name) for name in (*_LIMITS, *_SHAPE)}
            made = {name: value for name, value in given.items() if value}
            self.__dict__["build_config"] = settings.NAMESPACE["BuildConfig"](**made)
        build = self.build_config
        # validate_build_config_with_runtime_params, llmapi/llm_args.py of 121,745 characters (1.2rc): it logs the value
        # that it has already lowered. 1.1 refuses it (seen in a log of 1.1.0).
        for name in _LIMITS:
            value, limit = getattr(self, name), getattr(build, name)
            if value is not None and value > limit and not SINCE_1_2:
                raise ValueError(f"{name} [{value}] is greater than build_config.{name} [{limit}] in build_config")
            if value is not None and value > limit:
                self.__dict__[name] = limit
                logger.warning(f"{name} [{limit}] is overridden by build_config.{name} [{limit}] in build_config")
        for name in _SHAPE:
            value, limit = getattr(self, name), getattr(build, name)
            if value is not None and limit is not None and value != limit:
                logger.warning(f"{name} [{value}] is overridden by build_config.{name} [{limit}] in build_config")
        if build.max_batch_size > build.max_num_tokens:
            logger.warning(
                f"max_batch_size [{build.max_batch_size}] should be less than or equal to max_num_tokens "
                f"[{build.max_num_tokens}]"
            )
        plugins = build.plugin_config
        if not self._is_engine:
            if self.worker_count == 1:
                plugins.__dict__["nccl_plugin"] = None
            if self.enable_lora:
                plugins.__dict__["lora_plugin"] = "auto"

    def build_config_json(self, config: dict[str, Any]) -> dict[str, Any]:
        """The build_config as config.json keeps it: all fields, lengths settled."""
        data: dict[str, Any] = json.loads(self.build_config.model_dump_json(warnings=False))
        for name in ("dry_run", "visualize_network"):
            data.pop(name, None)
        data["max_seq_len"] = data["max_seq_len"] or positions(config)
        data["plugin_config"]["dtype"] = config["dtype"]
        data["kv_cache_type"] = "PAGED"
        if data["opt_num_tokens"] is None:
            data["opt_num_tokens"] = min(data["max_num_tokens"], data["max_batch_size"] * data["max_beam_width"])
        return data


def _model(owner: str, base: type[_Args]) -> type[_Args] | None:
    if not settings.has(owner):
        return None
    fields: dict[str, Any] = {
        name: (settings.type_of(member), default_of(member)) for name, member in settings.arguments(owner).items()
    }
    return pydantic.create_model(owner.replace(".", "_"), __base__=base, __module__=__name__, **fields)


TrtLlmArgs = _model("LLM.tensorrt", _TrtArgs)
TorchLlmArgs = _model("LLM.pytorch", _TorchArgs)
AutoDeployLlmArgs = _model("LLM.autodeploy", _TorchArgs)
