"""The enumerations of option values.

Members are strings: `options.backend == "openvino"` and `options.backend is Backend.OPENVINO` both hold.
"""

from __future__ import annotations

import enum

from djl_trtllm.plugins import BACKENDS, plugins


class Choice(str, enum.Enum):
    """A value of an enumeration; `str()` gives the value."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def all_values(cls) -> tuple[str, ...]:
        return tuple(member.value for member in cls)


class Backend(Choice):
    """The engine that runs the model: the members, and the names of backends in other packages."""

    AUTO = "auto"
    TENSORRT = "tensorrt"
    PYTORCH = "pytorch"
    AUTODEPLOY = "autodeploy"
    VLLM = "vllm"
    OPENVINO = "openvino"
    SCRIPTED = "scripted"

    @classmethod
    def all_values(cls) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*super().all_values(), *plugins(BACKENDS))))

    @classmethod
    def _missing_(cls, value: object) -> Backend | None:
        if not isinstance(value, str) or value not in plugins(BACKENDS):
            return None
        if value not in _ADDED:
            _ADDED[value] = added = str.__new__(cls, value)
            added._name_, added._value_ = value.upper(), value
        return _ADDED[value]


_ADDED: dict[str, Backend] = {}
"""Values beside the members. There is one object of each, so that `is` compares them."""


class RollingBatch(Choice):
    """LMI's batching libraries."""

    AUTO = "auto"
    TRTLLM = "trtllm"
    VLLM = "vllm"
    LMI_DIST = "lmi-dist"
    ENABLE = "enable"
    DISABLE = "disable"
    DEEPSPEED = "deepspeed"
    SCHEDULER = "scheduler"


class SchedulingPolicy(Choice):
    FAIR = "fair"
    FCFS = "fcfs"


class DType(Choice):
    AUTO = "auto"
    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


class Quantization(Choice):
    INT8 = "int8"
    INT4 = "int4"
    AWQ = "awq"
    W4A8_AWQ = "w4a8_awq"
    SMOOTHQUANT = "smoothquant"
    FP8 = "fp8"


class KvCacheDType(Choice):
    AUTO = "auto"
    FP16 = "fp16"
    FP32 = "fp32"
    INT8 = "int8"
    FP8 = "fp8"


class SchedulerPolicy(Choice):
    MAX_UTILIZATION = "max_utilization"
    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    STATIC_BATCH = "static_batch"


class ChunkingPolicy(Choice):
    FIRST_COME_FIRST_SERVED = "first_come_first_served"
    EQUAL_PROGRESS = "equal_progress"


class BatchingType(Choice):
    INFLIGHT = "inflight"
    STATIC = "static"


class KvCacheType(Choice):
    PAGED = "paged"
    CONTINUOUS = "continuous"
    DISABLED = "disabled"


class PluginDType(Choice):
    """Number format of a plugin of a compiled engine; `disable` compiles without the plugin."""

    AUTO = "auto"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    INT32 = "int32"
    FP8 = "fp8"
    NVFP4 = "nvfp4"
    DISABLE = "disable"


class AwqFormat(Choice):
    INT4_AWQ = "int4_awq"
    W4A8_AWQ = "w4a8_awq"


class QuantAlgorithm(Choice):
    """TensorRT-LLM's names of quantisations."""

    W8A16 = "W8A16"
    W4A16 = "W4A16"
    W4A16_AWQ = "W4A16_AWQ"
    W4A8_AWQ = "W4A8_AWQ"
    W8A16_GPTQ = "W8A16_GPTQ"
    W4A16_GPTQ = "W4A16_GPTQ"
    W8A8_SQ_PER_CHANNEL = "W8A8_SQ_PER_CHANNEL"
    W8A8_SQ_PER_TENSOR_PLUGIN = "W8A8_SQ_PER_TENSOR_PLUGIN"
    W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN = "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"  # noqa: S105  # a name
    W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN = "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN"
    W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN = "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN"  # noqa: S105
    W4A8_QSERVE_PER_GROUP = "W4A8_QSERVE_PER_GROUP"
    W4A8_QSERVE_PER_CHANNEL = "W4A8_QSERVE_PER_CHANNEL"
    FP8 = "FP8"
    FP8_PER_CHANNEL_PER_TOKEN = "FP8_PER_CHANNEL_PER_TOKEN"  # noqa: S105
    FP8_BLOCK_SCALES = "FP8_BLOCK_SCALES"
    INT8 = "INT8"
    MIXED_PRECISION = "MIXED_PRECISION"
    NVFP4 = "NVFP4"
    W4A8_NVFP4_FP8 = "W4A8_NVFP4_FP8"
    W4A8_MXFP4_FP8 = "W4A8_MXFP4_FP8"
    W4A8_MXFP4_MXFP8 = "W4A8_MXFP4_MXFP8"
    W4A16_MXFP4 = "W4A16_MXFP4"
    NO_QUANT = "NO_QUANT"


class KvCacheQuantAlgorithm(Choice):
    """TensorRT-LLM's names of quantisations of the KV cache."""

    FP8 = "FP8"
    INT8 = "INT8"
    NVFP4 = "NVFP4"


class ChatGlmVersion(Choice):
    """ChatGLM models of the LMI document."""

    UNSPECIFIED = "unspecified"
    CHATGLM_6B = "chatglm_6b"
    CHATGLM2_6B = "chatglm2_6b"
    CHATGLM2_6B_32K = "chatglm2_6b_32k"
    CHATGLM3_6B = "chatglm3_6b"
    CHATGLM3_6B_BASE = "chatglm3_6b_base"
    CHATGLM3_6B_32K = "chatglm3_6b_32k"
    GLM_10B = "glm_10b"


class GptVersion(Choice):
    """Models of the GPT-2 family of the LMI document."""

    GPT2 = "gpt2"
    SANTACODER = "santacoder"
    STARCODER = "starcoder"


class RotaryScaling(Choice):
    LINEAR = "linear"
    DYNAMIC = "dynamic"


class GuidedDecoding(Choice):
    XGRAMMAR = "xgrammar"
    LLGUIDANCE = "llguidance"


class SamplerType(Choice):
    AUTO = "auto"
    TRTLLM = "TRTLLMSampler"
    TORCH = "TorchSampler"


class ToolCallFormat(Choice):
    """How a model writes tool calls."""

    AUTO = "auto"
    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    NONE = "none"


class ReasoningFormat(Choice):
    """How a model writes its reasoning."""

    AUTO = "auto"
    DEEPSEEK_R1 = "deepseek_r1"
    QWEN3 = "qwen3"
    NONE = "none"


class UnknownParameters(Choice):
    """The answer to a request with fields that are not known."""

    REFUSE = "refuse"
    WARN = "warn"


class Orchestrator(Choice):
    """How the ranks of an engine talk to each other, other than by MPI."""

    RPC = "rpc"
    RAY = "ray"


class LoadFormat(Choice):
    AUTO = "auto"
    DUMMY = "dummy"


class LogFormat(Choice):
    TEXT = "text"
    JSON = "json"


class LogLevel(Choice):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"
