"""Every option, declared once.

A field's annotation is its type and its `Option`; its value is the default. Messages, the resolved table,
`docs/options.md` and `serving.properties.example` are all made from these declarations.
"""

from __future__ import annotations

from djl_trtllm.config.options.architecture import ArchitectureOptions
from djl_trtllm.config.options.build import BuildOptions
from djl_trtllm.config.options.decoding import DecodingOptions
from djl_trtllm.config.options.djl_handler import DjlHandlerOptions
from djl_trtllm.config.options.djl_server import DjlServerOptions
from djl_trtllm.config.options.djl_worker import DjlWorkerOptions
from djl_trtllm.config.options.engine import EngineOptions
from djl_trtllm.config.options.kv_cache import KvCacheOptions
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
from djl_trtllm.config.options.triton import TritonOptions


# Pydantic collects the fields of the last base first, so that documents list the groups in the opposite order.
class Options(
    DjlServerOptions,
    DjlWorkerOptions,
    DjlHandlerOptions,
    TritonOptions,
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


GROUPS: tuple[tuple[str, type], ...] = (
    ("Model", ModelOptions),
    ("Lengths and batch", LimitOptions),
    ("KV cache", KvCacheOptions),
    ("Scheduler", SchedulerOptions),
    ("Parallelism", ParallelismOptions),
    ("Engine", EngineOptions),
    ("Compiling", BuildOptions),
    ("Kernels of a compiled engine", PluginOptions),
    ("Quantisation", QuantizationOptions),
    ("Model architecture", ArchitectureOptions),
    ("Decoding", DecodingOptions),
    ("TensorRT-LLM's PyTorch backend", PyTorchOptions),
    ("Adapters", LoraOptions),
    ("Serving one model", ServingOptions),
    ("The server process", ServerOptions),
    ("Keys of Triton repositories", TritonOptions),
    ("Options of DJL Serving's handlers", DjlHandlerOptions),
    ("DJL Serving's workers", DjlWorkerOptions),
    ("DJL Serving's front end", DjlServerOptions),
)
"""The groups of options and their titles, in the order in which documents show them."""

__all__ = ["GROUPS", "Options"]
