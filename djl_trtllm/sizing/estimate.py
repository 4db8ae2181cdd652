"""How much of a GPU's memory a model takes, and how many tokens fit into the rest."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal

from djl_trtllm.errors import SizingError
from djl_trtllm.model.checkpoint import ModelShape
from djl_trtllm.sizing.checkpoint import CheckpointSizes, LayerCache
from djl_trtllm.sizing.tensors import (
    BITS,
    FLOATS,
    OF_TORCH,
    WEIGHT_FORMATS,
    Division,
    Part,
    cache_bits,
    indivisible_heads,
    stage_of,
    weight_bits,
)


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
    """The machine that a model is to run on, how its GPUs share the model, and the number formats.

    `gpu_memory` is that of one GPU in bytes, as NVML reports it. Raises SizingError for impossible values.
    """

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
    """Share for the KV cache of the memory that weights, activations and buffers leave."""
    max_batch_size: int = 256
    max_input_len: int | None = None
    max_output_len: int | None = None
    max_beam_width: int = 1
    attention_windows: tuple[int, ...] | None = None
    """option.max_attention_window, repeated over the layers. Without it every layer keeps the whole sequence."""
    draft: CheckpointSizes | None = None
    """A draft model, which runs beside the model with the same division."""
    lora: LoraSlots | None = None
    backend: Literal["tensorrt", "pytorch", "vllm"] = "tensorrt"
    utilization: float = 0.9
    """vLLM's share of the GPU for weights, activations and KV cache together."""

    def __post_init__(self) -> None:
        for name in ("gpu_memory", "tensor_parallel", "pipeline_parallel", "max_batch_size", "max_beam_width"):
            if getattr(self, name) < 1:
                raise SizingError(f"{name}={getattr(self, name)}: expected a number of at least 1")
        if not 0 < self.fraction <= 1:
            raise SizingError(f"fraction={self.fraction}: expected a part of the free memory, above 0 and at most 1")

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel


# Memory beside weights and KV cache: activations, logits, communication, and what the runtime itself takes.
# Two engines differ much. TensorRT reserves activations for max_num_tokens when the engine is built; its constants are
# fitted to half of LMI's measured tables (`tools.sizing.check_tables`). PyTorch reuses them; its constants are
# AIConfigurator's for TensorRT-LLM (0.12.0, ai-dynamo/aiconfigurator@095f58a51, sdk/backends and systems/*.yaml), which
# were measured.


MIB = 1 << 20
GIB = 1 << 30

_LEAST_ACTIVATIONS = 70 * MIB
_NCCL = MappingProxyType({1: 0, 2: 342 * MIB, 4: 392 * MIB, 8: 392 * MIB})

# Per token and hidden element, by tensor parallel degree.
_DENSE = MappingProxyType({1: 11.0, 2: 6.5, 4: 5.0, 8: 5.0})
_EXPERTS = MappingProxyType({1: 22.0, 2: 13.0, 4: 10.0, 8: 10.0})
_MOE_BLOCK = 128
_PYTORCH_OVERHEAD = 3 * GIB + 150 * MIB
"""PyTorch's own memory: AIConfigurator's 3.5 GiB of 80 GiB are this much of NVML's 79.65 GiB."""
_ENGINE_PROCESS = 548 * MIB
"""The CUDA context of TensorRT-LLM's proxy, which is in the engine process, on the first GPU beside its rank's: a third
of the 1,644 MiB that two ranks' contexts and it took on an H200 (docs/verification.md, "On a GPU"). With one rank the
overhead has it already: so the estimate is within 0.1 % of the capacities measured on H100, and 0.5 % on GB300."""
_PYTORCH_RESERVED = 0.015
"""The part of the KV cache's memory that its allocator does not hand out (AIConfigurator)."""

_LOGITS_COPIES = 5
"""Copies of batch x vocabulary x 4 bytes: the engine's output, its copy for penalties, workspaces of top-k and top-p
(TensorRT-LLM 0.8, cpp/tensorrt_llm/layers/dynamicDecodeLayer.cpp and topPSamplingLayer.cu, `allocateBuffer`)."""


_OF_CUDA = 0.995
"""The share of NVML's memory that CUDA sees: 139.80 of 140.40 GiB of an H200, 79.18 of 79.65 of an H100."""
_LARGE_GPU = 70 * GIB
_VLLM_TOKENS = MappingProxyType({True: 8192, False: 2048})
"""vLLM's default of max_num_batched_tokens (`get_batch_defaults`): True for a large GPU, False for others such as an
A100."""


def usual_vllm_tokens(gpu_memory: int) -> int:
    """The tokens of an iteration of vLLM where no option says them."""
    return _VLLM_TOKENS[gpu_memory >= _LARGE_GPU]


def _vllm_activations(sizes: CheckpointSizes, tensor_parallel: int, tokens: int) -> int:
    """The peak of an iteration in 16 bits: two hidden states, and of each rank's part the MLP's three and attention's.

    With the logits it is within 2 % of what the profile of vLLM 0.26 kept back on H200 (docs/sizing.md, "On a GPU").
    """
    shape = sizes.shape
    inner = 3 * (shape.intermediate or 4 * (shape.hidden or 0)) * max(1, sizes.experts_per_token)
    heads = ((shape.num_heads or 0) + 2 * (shape.num_kv_heads or 0)) * (shape.head_dim or 0)
    return int(2 * tokens * (2 * (shape.hidden or 0) + (inner + heads) / tensor_parallel))


@dataclass(frozen=True)
class EngineConstants:
    """Constants fitted for TensorRT engines. `scale` multiplies the size of a token's live tensors."""

    scale: float
    overhead: int
    eight_ranks: int
    """Communication of eight ranks and more."""


FITTED = EngineConstants(scale=2.4, overhead=int(2.5 * GIB), eight_ranks=int(2.75 * GIB))
"""The constants that `python -m tools.sizing.check_tables --fit` has fitted."""


def _engine_activations_per_token(sizes: CheckpointSizes, tensor_parallel: int, scale: float) -> float:
    """Bytes per token of max_num_tokens: residuals on every rank, and the split parts of MLP and attention.

    A model with experts has the MLP once for each expert that a token goes to, and twice the sum (AIConfigurator has
    the same factor).
    """
    shape = sizes.shape
    hidden, head_dim = shape.hidden or 0, shape.head_dim or 0
    inner = (shape.intermediate or 4 * hidden) / tensor_parallel * max(1, sizes.experts_per_token)
    keys = max(1.0, (shape.num_kv_heads or 0) / tensor_parallel)
    heads = (shape.num_heads or 0) / tensor_parallel + 2 * keys
    return scale * 2 * (2 * inner + 4 * hidden + heads * head_dim) * (2 if sizes.experts else 1)


def _pytorch_activations(sizes: CheckpointSizes, tensor_parallel: int, tokens: int) -> int:
    shape = sizes.shape
    width = (shape.num_heads or 0) * (shape.head_dim or 0) or shape.hidden or 0
    table = _EXPERTS if sizes.experts else _DENSE
    size = 2 * tokens * width * table[_degree(tensor_parallel)]
    if sizes.experts:
        size += 4 * tokens * width * sizes.experts * sizes.experts_per_token / _MOE_BLOCK
    return max(int(size), _LEAST_ACTIVATIONS)


def _degree(tensor_parallel: int) -> int:
    """The measured degree at or below this one."""
    return max(degree for degree in _NCCL if degree <= tensor_parallel)


@dataclass(frozen=True)
class StageCache:
    """The cache of one rank of a pipeline stage.

    `windows` are pairs: bytes per token of the layers with a window, and the window. `state` are the bytes of each
    sequence whatever its length.
    """

    per_token: int
    windows: tuple[tuple[int, int | None], ...]
    state: int

    def sequence(self, length: int) -> int:
        """Bytes of a sequence of `length` tokens."""
        kept = sum(size * (length if window is None else min(length, window)) for size, window in self.windows)
        return kept + self.state


def stage_caches(sizes: CheckpointSizes, conditions: Conditions) -> tuple[StageCache, ...]:
    """The caches of all pipeline stages; a draft model's is part of the last one's."""
    stages = conditions.pipeline_parallel
    split: list[list[tuple[int, LayerCache]]] = [[] for _ in range(stages)]
    for index, layer in enumerate(sizes.layers):
        split[stage_of(index, len(sizes.layers), stages)].append((index, layer))
    caches = [
        _cache_of(layers, kv_bits(sizes, conditions), conditions.attention_windows or (), conditions)
        for layers in split
    ]
    if conditions.draft is not None:
        draft = list(enumerate(conditions.draft.layers))
        more = _cache_of(draft, kv_bits(conditions.draft, conditions), (), conditions)
        last = caches[-1]
        caches[-1] = StageCache(
            last.per_token + more.per_token, (*last.windows, *more.windows), last.state + more.state
        )
    return tuple(caches)


def model_windows(sizes: CheckpointSizes) -> tuple[int, ...]:
    """The windows of config.json as a value of option.max_attention_window; empty if the model has none.

    Layers without a window get 0 here: the option wants the longest sequence for them.
    """
    attending = [layer.window or 0 for layer in sizes.layers if layer.kind in ("attention", "latent")]
    return tuple(attending) if any(attending) else ()


def kv_bits(sizes: CheckpointSizes, conditions: Conditions) -> float:
    """Bits of an element of the KV cache."""
    given = conditions.kv_dtype if conditions.kv_dtype not in (None, "auto") else sizes.kv_quantization
    if given is not None:
        return cache_bits(given)
    return 32.0 if (conditions.dtype or sizes.shape.dtype) in ("float32", "float") else 16.0


def _cache_of(
    layers: Sequence[tuple[int, LayerCache]], bits: float, windows: tuple[int, ...], conditions: Conditions
) -> StageCache:
    by_window: dict[int | None, float] = {}
    state = 0
    for index, layer in layers:
        window = windows[index % len(windows)] or None if windows else None
        size = layer.per_token(conditions.tensor_parallel) * bits / 8
        if size:
            by_window[window] = by_window.get(window, 0) + size
        state += layer.per_sequence(conditions.tensor_parallel)
    pairs = tuple((-int(-size // 1), window) for window, size in by_window.items())
    return StageCache(sum(size for size, _ in pairs), pairs, state)


def weights_by_stage(sizes: CheckpointSizes, conditions: Conditions) -> tuple[int, ...]:
    """Bytes of one rank of each pipeline stage.

    The embedding belongs to the first stage, the head to the last. TensorRT engines hold the embedding whole on each
    rank (`use_parallel_embedding` is off by default) and a second copy of it where the head is the embedding.
    """
    shape, stages = sizes.shape, conditions.pipeline_parallel
    engine = conditions.backend == "tensorrt"
    division = Division(conditions.tensor_parallel, shape.num_heads, shape.num_kv_heads, engine)
    bytes_ = [0.0] * stages
    for part in sizes.parts:
        size = part_bytes(part, sizes, conditions)
        stage = 0 if part.layer is None else stage_of(part.layer, shape.num_layers or 1, stages)
        if part.group == "head":
            stage = stages - 1
        bytes_[stage] += size * division.share(part.group)
        if part.group == "embedding" and sizes.tied and (engine or stages > 1):
            bytes_[-1] += size * division.share("head")
    return tuple(-int(-size // 1) for size in bytes_)


def part_bytes(part: Part, sizes: CheckpointSizes, conditions: Conditions) -> float:
    """Bytes of tensors on all ranks together, as they are loaded under these conditions."""
    # Counted tensors are those of the model before it was quantised.
    applied = conditions.quantization if sizes.quantization is None else None if sizes.exact else sizes.quantization
    if part.quantisable and applied:
        bits = WEIGHT_FORMATS.get(applied.lower(), 16.0) if applied == sizes.quantization else weight_bits(applied)
        if bits < 16:
            return part.elements * bits / 8
    if part.dtype in FLOATS and (sizes.quantization is None or not sizes.exact):
        wanted = OF_TORCH.get(conditions.dtype or sizes.shape.dtype or "", part.dtype)
        return part.elements * BITS[wanted] / 8
    return part.bytes


def lora_bytes(shape: ModelShape, slots: LoraSlots | None, tensor_parallel: int, pipeline_parallel: int = 1) -> int:
    """Bytes of the adapters' matrices on one rank, in 16 bits: `rank` x (inputs + outputs) for each module."""
    if slots is None:
        return 0
    hidden, width = shape.hidden or 0, (shape.num_heads or 0) * (shape.head_dim or 0)
    keys, inner = (shape.num_kv_heads or 0) * (shape.head_dim or 0), shape.intermediate or 0
    # One of the two matrices is split like the module's weights, the other is whole.
    whole_and_split = {
        "attn_q": (hidden, width),
        "attn_k": (hidden, keys),
        "attn_v": (hidden, keys),
        "attn_qkv": (hidden, width + 2 * keys),
        "attn_dense": (hidden, width),
        "mlp_h_to_4h": (hidden, inner),
        "mlp_gate": (hidden, inner),
        "mlp_4h_to_h": (hidden, inner),
        "mlp_gate_up": (hidden, 2 * inner),
    }
    sums = [whole_and_split.get(module, (hidden, max(inner, width))) for module in slots.modules]
    per_layer = sum(whole + -(-split // tensor_parallel) for whole, split in sums)
    layers = -(-(shape.num_layers or 0) // pipeline_parallel)
    return 2 * slots.adapters * slots.rank * per_layer * layers


MOST = 16_384
"""The recommended max_num_tokens is at most this: more hardly makes an engine faster (docs/sizing.md)."""

_WIDENED = 4096
_BOUND = 1 << 26


@dataclass(frozen=True)
class Estimate:
    """The memory of one GPU in bytes; with pipeline stages, of the GPU with most weights unless said otherwise."""

    sizes: CheckpointSizes
    conditions: Conditions
    constants: EngineConstants = FITTED

    @cached_property
    def weights(self) -> int:
        return max(self._weights)

    @cached_property
    def _weights(self) -> tuple[int, ...]:
        """Weights by pipeline stage, with the draft model's and the adapters'."""
        conditions = self.conditions
        own = list(weights_by_stage(self.sizes, conditions))
        if conditions.draft is not None:
            own[-1] += sum(weights_by_stage(conditions.draft, conditions))
        adapters = self.lora
        return tuple(stage + adapters for stage in own)

    @cached_property
    def lora(self) -> int:
        """The part of `weights` that is for LoRA adapters."""
        conditions = self.conditions
        return lora_bytes(self.sizes.shape, conditions.lora, conditions.tensor_parallel, conditions.pipeline_parallel)

    @cached_property
    def logits(self) -> int:
        """Bytes of the buffers for the logits of a whole batch; PyTorch's are part of its measured overhead."""
        if self.conditions.backend == "pytorch":
            return 0
        rows = self.conditions.max_batch_size * self.conditions.max_beam_width
        ranks = self.conditions.tensor_parallel if self.conditions.backend == "vllm" else 1
        return _LOGITS_COPIES * 4 * rows * (self.sizes.shape.vocab_size or 0) // ranks

    @cached_property
    def communication(self) -> int:
        conditions = self.conditions
        if conditions.backend == "tensorrt" and conditions.tensor_parallel >= 8:
            return self.constants.eight_ranks
        return _NCCL[_degree(max(conditions.tensor_parallel, min(2, conditions.ranks)))]

    @cached_property
    def overhead(self) -> int:
        """Bytes that driver, CUDA, libraries and runtime take on the first GPU, which has the others' KV cache too."""
        if self.conditions.backend == "tensorrt":
            return self.constants.overhead
        several = self.conditions.ranks > 1 and self.conditions.backend == "pytorch"
        return _PYTORCH_OVERHEAD + (_ENGINE_PROCESS if several else 0)

    def activations(self, max_num_tokens: int) -> int:
        conditions = self.conditions
        if conditions.backend == "pytorch":
            return _pytorch_activations(self.sizes, conditions.tensor_parallel, max_num_tokens)
        if conditions.backend == "vllm":
            return _vllm_activations(self.sizes, conditions.tensor_parallel, max_num_tokens)
        per_token = _engine_activations_per_token(self.sizes, conditions.tensor_parallel, self.constants.scale)
        return int(per_token * max_num_tokens)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes per token on the pipeline stage whose layers keep most."""
        return max(cache.per_token for cache in self._caches)

    @cached_property
    def _caches(self) -> tuple[StageCache, ...]:
        return stage_caches(self.sizes, self.conditions)

    def _kv_bytes(self, stage: int, max_num_tokens: int) -> int:
        """Bytes of the cache on one GPU of a stage; 0 if nothing is left."""
        used = self._weights[stage] + self.logits + self.communication + self.overhead
        left = self.conditions.gpu_memory - used - self.activations(max_num_tokens)
        if self.conditions.backend == "vllm":
            # CUDA's context, its graphs and the communicator's buffers are beside the share.
            share = int(self.conditions.gpu_memory * _OF_CUDA * self.conditions.utilization)
            own = self._weights[stage] + self.logits + self.activations(max_num_tokens)
            return max(0, min(left, share - own))
        reserved = _PYTORCH_RESERVED if self.conditions.backend == "pytorch" else 0
        adapters = 0.0 if self.conditions.lora is None else self.conditions.lora.free_share
        return max(0, int(left * (1 - adapters) * self.conditions.fraction * (1 - reserved)))

    def kv_bytes(self, max_num_tokens: int) -> int:
        """Bytes of the KV cache beside an engine of `max_num_tokens`, on the GPU with least left."""
        return min(self._kv_bytes(stage, max_num_tokens) for stage in range(len(self._weights)))

    def kv_tokens(self, max_num_tokens: int) -> int:
        """Tokens that the KV cache holds beside an engine of `max_num_tokens`: of one long sequence, without windows.

        0 if nothing is left, or if no layer keeps anything per token.
        """
        return min(
            (
                max(0, self._kv_bytes(stage, max_num_tokens) - cache.state) // cache.per_token
                for stage, cache in enumerate(self._caches)
                if cache.per_token
            ),
            default=0,
        )

    def sequences_of(self, length: int, max_num_tokens: int | None = None) -> int:
        """Sequences of `length` tokens that the KV cache holds at a time, beside the recommended engine by default."""
        tokens = self.recommended if max_num_tokens is None else max_num_tokens
        return min(
            self._kv_bytes(stage, tokens) // max(1, cache.sequence(length)) for stage, cache in enumerate(self._caches)
        )

    @cached_property
    def max_num_tokens(self) -> int:
        """The largest max_num_tokens beside which the longest sequence fits; 0: out of memory."""
        low, high = 0, _BOUND
        while low < high:
            middle = (low + high + 1) // 2
            if self.sequences_of(self.longest(middle), middle) >= 1:
                low = middle
            else:
                high = middle - 1
        return low

    def longest(self, max_num_tokens: int) -> int:
        """Tokens of the longest sequence, with the widened limits where none are given."""
        limit = min(_WIDENED, max_num_tokens)
        return (self.conditions.max_input_len or limit) + (self.conditions.max_output_len or limit)

    @property
    def recommended(self) -> int:
        """Half of the maximum, at most 16,384: the other half is for the KV cache."""
        return min(self.max_num_tokens // 2, MOST)


_FEW_SEQUENCES = 32
_FEW_BYTES = 10 * GIB
_USUAL = 2048


def warnings_of(estimate: Estimate, max_num_tokens: int | None = None) -> tuple[str, ...]:
    """Sentences with numbers and what to do, the gravest first; `max_num_tokens` is the recommended one by default."""
    tokens = estimate.recommended if max_num_tokens is None else max_num_tokens
    sizes, conditions = estimate.sizes, estimate.conditions
    found = []
    if not estimate.max_num_tokens:
        found.append(_out_of_memory(estimate))
    elif tokens < (conditions.max_input_len or 0):
        found.append(
            f"max_num_tokens={tokens} is below the longest prompt of {conditions.max_input_len} tokens: "
            "set option.enable_chunked_prefill=true"
        )
    if problem := indivisible_heads(sizes.shape.num_heads, sizes.shape.num_kv_heads, conditions.tensor_parallel):
        found.append(problem)
    stages, layers = conditions.pipeline_parallel, sizes.shape.num_layers
    if layers and layers < stages:
        found.append(
            f"{layers} layers cannot be divided among {stages} groups of GPUs: set an option.pipeline_parallel_degree "
            f"of at most {layers}"
        )
    if sizes.quantization is not None and conditions.quantization is not None:
        found.append(
            f"the weights are stored as {sizes.quantization} already: option.quantize={conditions.quantization} is not "
            "counted"
        )
    if not sizes.exact:
        found.append("the weights were counted from config.json: their files are not known, or are not safetensors")
    if not sizes.parts:
        found.append("config.json does not give layers, heads and hidden size: no weights are counted")
    if estimate.max_num_tokens:
        found += _narrow(estimate, tokens)
    return tuple(found)


def _out_of_memory(estimate: Estimate) -> str:
    conditions = estimate.conditions
    parts = {
        "weights": estimate.weights,
        "logits": estimate.logits,
        "communication": estimate.communication,
        "runtime": estimate.overhead,
    }
    listed = ", ".join(f"{size / GIB:.1f} GiB of {name}" for name, size in parts.items() if size >= GIB / 20)
    return (
        f"{estimate.sizes.source} does not fit: {listed} on each of {conditions.ranks} GPUs with "
        f"{conditions.gpu_memory / GIB:.1f} GiB, and a KV cache for one sequence; raise option.tensor_parallel_degree, "
        "or quantise the weights (option.quantize)"
    )


def _narrow(estimate: Estimate, max_num_tokens: int) -> list[str]:
    found = []
    length = (estimate.conditions.max_input_len or _USUAL) + (estimate.conditions.max_output_len or _USUAL)
    cache, sequences = estimate.kv_bytes(max_num_tokens), estimate.sequences_of(length, max_num_tokens)
    if not sequences:
        found.append(
            f"the KV cache has {cache / GIB:.1f} GiB on each GPU, which does not hold one sequence of {length} tokens: "
            "lower option.max_num_tokens or the lengths, or use more GPUs"
        )
    elif cache < _FEW_BYTES and sequences < _FEW_SEQUENCES:
        found.append(
            f"the KV cache has {cache / GIB:.1f} GiB on each GPU, which is {sequences} sequences of {length} tokens: "
            "requests will wait; use more GPUs, or option.kv_cache_dtype=fp8 where the GPU has it"
        )
    windows = model_windows(estimate.sizes)
    if windows and estimate.conditions.attention_windows is None and length > max(windows):
        found.append(
            "some layers look back at a window only, and TensorRT-LLM keeps whole sequences for them unless "
            "option.max_attention_window says otherwise"
        )
    return found
