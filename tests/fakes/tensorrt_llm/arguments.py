"""What the constructor's arguments become: TrtLlmArgs and TorchLlmArgs (facts §2.2 to §2.4)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pydantic

from . import configs, engine_files, names
from .build import positions
from .logger import logger
from .settings import SINCE_1_2, SINCE_1_3, compute_capability

_LIMITS = ("max_batch_size", "max_num_tokens")
_SHAPE = ("max_seq_len", "max_beam_width", "max_input_len")


class BaseLlmArgs(configs.Strict):
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
    _format: str = pydantic.PrivateAttr(default=engine_files.HF)
    _mapping: dict[str, int] | None = pydantic.PrivateAttr(default=None)

    if TYPE_CHECKING:
        kv_cache_config: configs.KvCacheConfigFields
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
                self.__dict__[name] = names.NAMESPACE[kind]()
        self._infer_format()
        self._settle_build_config()
        return self

    def _infer_format(self) -> None:
        directory = Path(self.model)
        if not directory.is_dir():
            return
        self._format = engine_files.get_model_format(directory)
        if self._format == engine_files.HF:
            return
        config = engine_files.read_config(directory)
        pretrained = config["pretrained_config"] if self._format == engine_files.TLLM_ENGINE else config
        mapping = pretrained.get("mapping", {})
        kind = "engine" if self._format == engine_files.TLLM_ENGINE else "checkpoint"
        for argument, name in (
            ("tensor_parallel_size", "tp_size"),
            ("pipeline_parallel_size", "pp_size"),
            ("context_parallel_size", "cp_size"),
        ):
            given, found = getattr(self, argument), mapping.get(name, 1)
            if given not in (1, found):
                raise ValueError(f"{name} {given} is not consistent with the {kind}'s {name} {found}")
            self.__dict__[argument] = found
        if self._format == engine_files.TLLM_ENGINE:
            if self.build_config is not None:
                logger.warning("The build_config is ignored for model format of TLLM_ENGINE.")
            known = names.NAMESPACE["BuildConfig"]
            fields = {name: value for name, value in config["build_config"].items() if name in known.model_fields}
            self.__dict__["build_config"] = known.model_construct(**fields)

    def _settle_build_config(self) -> None:
        if self.build_config is None:
            given = {name: getattr(self, name) for name in (*_LIMITS, *_SHAPE)}
            made = {name: value for name, value in given.items() if value}
            self.__dict__["build_config"] = names.NAMESPACE["BuildConfig"](**made)
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
        if self._format != engine_files.TLLM_ENGINE:
            if self.worker_count == 1:
                plugins.__dict__["nccl_plugin"] = None
            if self.enable_lora:
                plugins.__dict__["lora_plugin"] = "auto"

    def build_config_json(self, config: dict[str, Any]) -> dict[str, Any]:
        """As config.json keeps it: all fields, lengths settled."""
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
    if not names.has(owner):
        return None
    fields: dict[str, Any] = {
        name: (names.type_of(member), configs.default_of(member)) for name, member in names.arguments(owner).items()
    }
    return pydantic.create_model(owner.replace(".", "_"), __base__=base, __module__=__name__, **fields)


TrtLlmArgs = _model("LLM.tensorrt", _TrtArgs)
TorchLlmArgs = _model("LLM.pytorch", _TorchArgs)
AutoDeployLlmArgs = _model("LLM.autodeploy", _TorchArgs)
