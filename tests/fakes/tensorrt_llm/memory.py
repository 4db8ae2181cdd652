"""What a GPU's memory holds: weights, activations by max_num_tokens, the KV cache (facts §5.1, §5.2).

Only where the script has `memory`; all sizes are bytes of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from .settings import device_memory, script

GIB = 1 << 30


@dataclass(frozen=True)
class MemoryModel:
    """`building`, `loaded` and `running` are for each token: of max_num_tokens while the engine is built and once it is
    loaded, and of an iteration beside that. `kv_cache` is for each token that it holds; None: as the model has it."""

    weights: int
    overhead: int = 0
    building: int = 0
    loaded: int = 0
    running: int = 0
    kv_cache: int | None = None

    def builds(self, max_num_tokens: int) -> bool:
        return self.weights + self.overhead + self.building * max_num_tokens <= device_memory()

    def free(self, max_num_tokens: int) -> int:
        """Once an engine is loaded, before the KV cache; negative where it cannot be."""
        return device_memory() - self.weights - self.overhead - self.loaded * max_num_tokens

    def runs(self, tokens: int, max_num_tokens: int, kv_bytes: int) -> bool:
        """Whether an iteration with this number of tokens fits beside the KV cache."""
        return self.running * tokens <= self.free(max_num_tokens) - kv_bytes


def memory_model() -> MemoryModel | None:
    """What the script says."""
    given = script()["memory"]
    return None if given is None else MemoryModel(**given)


def torch_out_of_memory() -> str:
    """PyTorch's message."""
    total = device_memory() / GIB
    return (
        f"CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of {total:.2f} GiB of which 1.06 "
        f"GiB is free. Including non-PyTorch memory, this process has {total - 1.06:.2f} GiB memory in use. Of the "
        f"allocated memory {total - 2.06:.2f} GiB is allocated by PyTorch, and 130.43 MiB is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
        "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


ENGINE_OUT_OF_MEMORY = (
    "[TensorRT-LLM][ERROR] CUDA runtime error in ::cudaMallocAsync(ptr, n, mCudaStream->get()): out of memory "
    "(/src/tensorrt_llm/cpp/tensorrt_llm/runtime/tllmBuffers.h:127)"
)
NO_KV_CACHE = "Impossible to fit in any sequence in kvCache"
"""resource_manager.py, `get_max_atten_window_upper_bound`; kvCacheManager.cpp has the same words."""
