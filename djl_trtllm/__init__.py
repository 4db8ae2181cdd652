"""TensorRT-LLM model handler for DJL Serving and SageMaker."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from djl_trtllm.version import __version__

if TYPE_CHECKING:
    from djl_trtllm.offline import (
        LLM,
        BatchingType,
        BuildConfig,
        CalibConfig,
        CapacitySchedulerPolicy,
        ContextChunkingPolicy,
        CudaGraphConfig,
        DynamicBatchConfig,
        ExtendedRuntimePerfKnobConfig,
        GuidedDecodingParams,
        KvCacheConfig,
        LoraConfig,
        MoeConfig,
        PeftCacheConfig,
        PluginConfig,
        QuantAlgo,
        QuantConfig,
        SamplingParams,
        SchedulerConfig,
        TorchCompileConfig,
    )


__all__ = [
    "LLM",
    "BatchingType",
    "BuildConfig",
    "CalibConfig",
    "CapacitySchedulerPolicy",
    "ContextChunkingPolicy",
    "CudaGraphConfig",
    "DynamicBatchConfig",
    "ExtendedRuntimePerfKnobConfig",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "LoraConfig",
    "MoeConfig",
    "PeftCacheConfig",
    "PluginConfig",
    "QuantAlgo",
    "QuantConfig",
    "SamplingParams",
    "SchedulerConfig",
    "TorchCompileConfig",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """The offline API on first use: every command imports this package, and few need what stands behind the API."""
    if name in __all__:
        return getattr(import_module("djl_trtllm.offline"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
