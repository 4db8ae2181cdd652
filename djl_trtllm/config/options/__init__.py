"""Every option, declared once.

A field has a type and `option(DEFAULT, DESCRIPTION, ...)`. Messages, the resolved table, the pages of
`docs/options/` and `serving.properties.example` are made from these declarations. Options without effect are rows of
`config/compat/legacy.toml`.
"""

from __future__ import annotations

from dataclasses import dataclass

from djl_trtllm.config.options.access import AccessOptions
from djl_trtllm.config.options.architecture import ArchitectureOptions
from djl_trtllm.config.options.build import BuildOptions
from djl_trtllm.config.options.clients import ClientOptions
from djl_trtllm.config.options.connections import ConnectionOptions
from djl_trtllm.config.options.decoding import DecodingOptions
from djl_trtllm.config.options.djl_server import DjlServerOptions
from djl_trtllm.config.options.engine import EngineOptions
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.kv_cache import KvCacheOptions
from djl_trtllm.config.options.legacy import LegacyOptions, with_legacy
from djl_trtllm.config.options.limits import LimitOptions
from djl_trtllm.config.options.lora import LoraOptions
from djl_trtllm.config.options.model import ModelOptions
from djl_trtllm.config.options.parallelism import ParallelismOptions
from djl_trtllm.config.options.plugins import PluginOptions
from djl_trtllm.config.options.pytorch import PyTorchOptions
from djl_trtllm.config.options.quantization import QuantizationOptions
from djl_trtllm.config.options.scheduler import SchedulerOptions
from djl_trtllm.config.options.server import ServerOptions
from djl_trtllm.config.options.serving import ServingOptions
from djl_trtllm.config.options.telemetry import TelemetryOptions
from djl_trtllm.config.options.triton import TritonOptions


class Options(
    LegacyOptions,  # type: ignore[valid-type, misc]  # made at run time
    DjlServerOptions,
    TritonOptions,
    TelemetryOptions,
    ConnectionOptions,
    AccessOptions,
    ClientOptions,
    ServerOptions,
    ServingOptions,
    LoraOptions,
    PyTorchOptions,
    DecodingOptions,
    ArchitectureOptions,
    QuantizationOptions,
    PluginOptions,
    BuildOptions,
    EngineOptions,
    ParallelismOptions,
    SchedulerOptions,
    KvCacheOptions,
    LimitOptions,
    ModelOptions,
):
    """The values of all options, typed and frozen. Made by `resolve`; where values came from is in `Config`."""


@dataclass(frozen=True)
class Group:
    """A group of options as documents show it; `name` is that of its page and of its rows in `legacy.toml`."""

    name: str
    title: str
    declarations: type[OptionGroup] = OptionGroup

    @property
    def fields(self) -> list[str]:
        """The fields of the group in the order of the documents, those without effect in their places."""
        return with_legacy(self.name, list(self.declarations.model_fields))


GROUPS: tuple[Group, ...] = (
    Group("model", "Model", ModelOptions),
    Group("limits", "Lengths and batch", LimitOptions),
    Group("kv_cache", "KV cache", KvCacheOptions),
    Group("scheduler", "Scheduler", SchedulerOptions),
    Group("parallelism", "Parallelism", ParallelismOptions),
    Group("engine", "Engine", EngineOptions),
    Group("build", "Compiling", BuildOptions),
    Group("plugins", "Kernels of a compiled engine", PluginOptions),
    Group("quantization", "Quantisation", QuantizationOptions),
    Group("architecture", "Model architecture", ArchitectureOptions),
    Group("decoding", "Decoding", DecodingOptions),
    Group("pytorch", "TensorRT-LLM's PyTorch backend", PyTorchOptions),
    Group("lora", "Adapters", LoraOptions),
    Group("serving", "Serving one model", ServingOptions),
    Group("server", "The server process", ServerOptions),
    Group("connections", "Connections", ConnectionOptions),
    Group("access", "API keys, TLS and the management API", AccessOptions),
    Group("clients", "Fairness among clients", ClientOptions),
    Group("telemetry", "Log and traces", TelemetryOptions),
    Group("triton", "Triton's API and model repositories", TritonOptions),
    Group("djl_handler", "Options of DJL Serving's handlers"),
    Group("djl_worker", "DJL Serving's workers"),
    Group("djl_server", "DJL Serving's front end", DjlServerOptions),
)
"""The groups of options, in the order of the documents."""

__all__ = ["GROUPS", "Group", "Options"]
