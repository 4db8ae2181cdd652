"""Offline batches: many prompts through one model, in this process and without HTTP.

    from djl_trtllm import LLM, SamplingParams

    with LLM("serving/models/tiny-stories") as llm:
        for output in llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95)):
            print(output.prompt, output.outputs[0].text)

The names are those of TensorRT-LLM's LLM API; what runs is what `djl-trtllm serve` runs, on any backend: the same
configuration, engine process and rolling batch. `djl-trtllm generate` is the same for files.
"""

from djl_trtllm.config.options.choices import (
    BatchingType,
    ChunkingPolicy as ContextChunkingPolicy,
    QuantAlgorithm as QuantAlgo,
    SchedulerPolicy as CapacitySchedulerPolicy,
)
from djl_trtllm.offline.arguments import (
    BuildConfig,
    CalibConfig,
    CudaGraphConfig,
    DynamicBatchConfig,
    ExtendedRuntimePerfKnobConfig,
    GuidedDecodingParams,
    KvCacheConfig,
    LoraConfig,
    MoeConfig,
    PeftCacheConfig,
    PluginConfig,
    QuantConfig,
    SamplingParams,
    SchedulerConfig,
    TorchCompileConfig,
)
from djl_trtllm.offline.llm import (
    LLM,
    CompletionOutput,
    EmbeddingOutput,
    Logprob,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)

__all__ = [
    "LLM",
    "BatchingType",
    "BuildConfig",
    "CalibConfig",
    "CapacitySchedulerPolicy",
    "CompletionOutput",
    "ContextChunkingPolicy",
    "CudaGraphConfig",
    "DynamicBatchConfig",
    "EmbeddingOutput",
    "ExtendedRuntimePerfKnobConfig",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "Logprob",
    "LoraConfig",
    "MoeConfig",
    "PeftCacheConfig",
    "PluginConfig",
    "PoolingRequestOutput",
    "QuantAlgo",
    "QuantConfig",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "ScoringOutput",
    "TorchCompileConfig",
]
