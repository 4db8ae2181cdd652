"""The closed sets of words some options take.

Members are strings: `options.backend == "openvino"` and `options.backend is Backend.OPENVINO` both hold.
"""

from __future__ import annotations

import enum


class Choice(str, enum.Enum):
    """A word of a closed set; prints as the word."""

    def __str__(self) -> str:
        return str(self.value)


class Backend(Choice):
    """Which engine runs the model."""

    AUTO = "auto"
    TENSORRT = "tensorrt"
    PYTORCH = "pytorch"
    AUTODEPLOY = "autodeploy"
    OPENVINO = "openvino"
    SCRIPTED = "scripted"


class DType(Choice):
    """Number format of weights and activations."""

    AUTO = "auto"
    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


class Quantization(Choice):
    """Weight (and activation) quantisation applied while compiling."""

    INT8 = "int8"
    INT4 = "int4"
    AWQ = "awq"
    SMOOTHQUANT = "smoothquant"
    FP8 = "fp8"


class KvCacheDType(Choice):
    """Number format of the KV cache."""

    AUTO = "auto"
    FP16 = "fp16"
    FP32 = "fp32"
    INT8 = "int8"


class SchedulerPolicy(Choice):
    """How sequences are admitted when the KV cache may not hold all of them to their end."""

    MAX_UTILIZATION = "max_utilization"
    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    STATIC_BATCH = "static_batch"


class RollingBatch(Choice):
    """DJL Serving's choice of a rolling batch implementation."""

    AUTO = "auto"
    TRTLLM = "trtllm"
    DISABLE = "disable"
    VLLM = "vllm"
    LMI_DIST = "lmi-dist"
    SCHEDULER = "scheduler"
