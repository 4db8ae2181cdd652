"""Where and how a model is to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from djl_trtllm.errors import SizingError

if TYPE_CHECKING:
    from djl_trtllm.sizing.checkpoint import CheckpointSizes

Backend = Literal["tensorrt", "pytorch"]


@dataclass(frozen=True)
class LoraSlots:
    """Room for LoRA adapters: as many as are on the GPU at a time, or a share of the memory that the model leaves.

    `modules` by TensorRT-LLM's names (option.lora_target_modules). With `free_share`, which is
    option.lora_cache_gpu_memory_fraction, TensorRT-LLM reserves a part however many adapters there are.
    """

    adapters: int = 4
    rank: int = 64
    modules: tuple[str, ...] = ("attn_q", "attn_k", "attn_v")
    free_share: float = 0.0


@dataclass(frozen=True)
class Conditions:
    """`gpu_memory` is that of one GPU in bytes, as NVML reports it. Raises SizingError for impossible values."""

    gpu_memory: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    dtype: str | None = None
    """Type of unquantised weights, `bfloat16`; None: the checkpoint's."""
    quantization: str | None = None
    """Applied while the model is compiled: a value of option.quantize or a name of TensorRT-LLM. None: as stored."""
    kv_dtype: str | None = None
    """fp8, int8, nvfp4, bfloat16, ...; None or `auto`: as the checkpoint says, else the weights' type."""
    fraction: float = 0.9
    """Of the memory that weights, activations and buffers leave, for the KV cache."""
    max_batch_size: int = 256
    max_input_len: int | None = None
    max_output_len: int | None = None
    max_beam_width: int = 1
    attention_windows: tuple[int, ...] | None = None
    """option.max_attention_window, repeated over the layers. Without it every layer keeps the whole sequence."""
    draft: CheckpointSizes | None = None
    """A draft model, which runs beside the model with the same division."""
    lora: LoraSlots | None = None
    backend: Backend = "tensorrt"

    def __post_init__(self) -> None:
        for name in ("gpu_memory", "tensor_parallel", "pipeline_parallel", "max_batch_size", "max_beam_width"):
            if getattr(self, name) < 1:
                raise SizingError(f"{name}={getattr(self, name)}: expected a number of at least 1")
        if not 0 < self.fraction <= 1:
            raise SizingError(f"fraction={self.fraction}: expected a part of the free memory, above 0 and at most 1")

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel
