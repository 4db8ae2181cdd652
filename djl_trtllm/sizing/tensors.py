"""Sizes of tensors: their types, bits per element when quantised, and which rank holds how much of them."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from djl_trtllm.errors import LayoutError, SizingError
from djl_trtllm.files import read_table
from djl_trtllm.listing import suggestion
from djl_trtllm.model.checkpoint import Header

_TABLE = read_table("formats.toml", __package__)
BITS: Mapping[str, int] = _TABLE["safetensors"]
"""Bits of an element of each type."""

FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
"""Types of weights that are not quantised."""

OF_TORCH: Mapping[str, str] = _TABLE["torch"]
"""Names in config.json and options, as safetensors' names."""

WEIGHT_FORMATS: Mapping[str, float] = {name.lower(): bits for name, bits in _TABLE["weights"].items()}
CACHE_FORMATS: Mapping[str, float] = _TABLE["cache"]


@dataclass(frozen=True)
class WeightTensor:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return -(-self.elements * BITS[self.dtype] // 8)


def tensors_of(header: Header, source: object) -> Iterable[WeightTensor]:
    """The tensors of a safetensors header. Raises LayoutError for a type that the format does not have."""
    for name, stored in header.items():
        if stored.dtype not in BITS:
            raise LayoutError(f"{source}: {name} has the type {stored.dtype!r}, expected one of {', '.join(BITS)}")
        yield WeightTensor(name, stored.dtype, stored.shape)


def weight_bits(quantization: str) -> float:
    """Bits per weight of a matrix, by a value of option.quantize or a name of TensorRT-LLM. Raises SizingError."""
    known = [*_TABLE["quantize"], *_TABLE["weights"]]
    return _of(WEIGHT_FORMATS, _format_name(quantization), quantization, "a quantisation", known)


def _format_name(quantization: str) -> str:
    names: Mapping[str, str] = _TABLE["quantize"]
    return names.get(quantization.lower(), quantization).lower()


def compute_format(quantization: str | None) -> str:
    """The format that matrices of such weights are multiplied in: `bf16`, `fp8` or `fp4`. Raises SizingError."""
    if quantization is None:
        return "bf16"
    computes: Mapping[str, str] = _TABLE["computes"]
    return computes.get(_format_name(quantization).upper(), "bf16")


def cache_bits(dtype: str) -> float:
    """Bits per element of the KV cache. Raises SizingError for an unknown name."""
    return _of(CACHE_FORMATS, dtype.lower(), dtype, "a type of the KV cache", list(CACHE_FORMATS))


def _of(table: Mapping[str, float], name: str, given: str, what: str, known: list[str]) -> float:
    if name in table:
        return table[name]
    raise SizingError(f"{given}: expected {what}; {suggestion(given, known)}")


TensorGroup = Literal["embedding", "head", "key_value", "fused", "replicated", "expert", "matrix"]

_NUMBER = re.compile(r"\d+")
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(?P<index>\d{1,9})\.")
_EMBEDDING = re.compile(
    r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|tok_embeddings|embeddings|embed_in|vocab_embedding)\.weight$"
)
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output_layer|output)\.")
_KEY_VALUE = re.compile(r"\.(?:k_proj|v_proj|wk|wv)\.")
_FUSED = re.compile(r"\.(?:query_key_value|qkv_proj|c_attn|Wqkv|qkv|W_pack|wqkv)\.")
# Routers, the first halves of MLA's projections (each rank needs the whole latent vector), positions.
_REPLICATED = re.compile(
    r"\.(?:gate|router|q_a_proj|kv_a_proj_with_mqa|kv_a_proj|shared_expert_gate)\.|(?:^|\.)(?:wpe|embed_positions)\."
)
# Encoders of pictures and sound are not split.
_ENCODERS = re.compile(
    r"(?:^|\.)(?:vision_tower|vision_model|visual|vision_embed|audio_tower|multi_modal_projector|mm_projector)\."
)
_EXPERT = re.compile(r"\.experts\.")
# Layers that predict further tokens, which only speculative decoding loads; masks and frequencies that old checkpoints
# store, and that engines compute.
_NOT_LOADED = re.compile(r"(?:^|\.)mtp\.|\.(?:attn|attention)\.(?:bias|masked_bias)$|rotary_emb\.inv_freq$")
_QUANTISABLE = frozenset({"matrix", "key_value", "fused", "expert"})


class Part(NamedTuple):
    """Tensors that are treated alike. `layer` is None for those outside of layers."""

    group: TensorGroup
    layer: int | None
    dtype: str
    quantisable: bool
    """Return whether these are matrices of layers in a type that is not quantised yet."""
    elements: int
    bytes: int


def parts_of(tensors: Iterable[WeightTensor], layers: int | None) -> tuple[Part, ...]:
    """The tensors by group, layer and type; without those of layers from `layers` on, which predict further tokens."""
    groups: dict[tuple[str, int], TensorGroup] = {}
    sums: dict[tuple[TensorGroup, int | None, str, bool], tuple[int, int]] = {}
    for tensor in tensors:
        layer = layer_of(tensor)
        if (layers and layer is not None and layer >= layers) or _NOT_LOADED.search(tensor.name):
            continue
        # Of the tensors of all layers and experts, the first decides.
        pattern = (_NUMBER.sub("0", tensor.name), len(tensor.shape))
        group = groups.get(pattern) or groups.setdefault(pattern, group_of(tensor))
        matrix = group in _QUANTISABLE and layer is not None and len(tensor.shape) > 1 and tensor.dtype in FLOATS
        # Beside matrices that are quantised already lie their scales, which are no matrices to quantise.
        key = (group, layer, tensor.dtype, matrix and "scale" not in tensor.name)
        elements, size = sums.get(key, (0, 0))
        sums[key] = (elements + tensor.elements, size + tensor.bytes)
    return tuple(Part(*key, *total) for key, total in sums.items())


def group_of(tensor: WeightTensor) -> TensorGroup:
    name = tensor.name
    if _ENCODERS.search(name):
        return "replicated"
    if _EMBEDDING.search(name) and not _LAYER.search(name):
        return "embedding"
    if _HEAD.search(name) and not _LAYER.search(name):
        return "head"
    if _EXPERT.search(name):
        return "expert"
    if len(tensor.shape) < 2 or _REPLICATED.search(name):
        return "replicated"
    if _KEY_VALUE.search(name):
        return "key_value"
    return "fused" if _FUSED.search(name) else "matrix"


def layer_of(tensor: WeightTensor) -> int | None:
    """The index of the layer that a tensor belongs to."""
    found = _LAYER.search(tensor.name)
    return None if found is None or _ENCODERS.search(tensor.name) else int(found["index"])


@dataclass(frozen=True)
class Division:
    """How ranks share tensors: the tensor parallel degree, and the numbers of query and key heads if they are known."""

    tensor_parallel: int
    heads: int | None
    kv_heads: int | None
    replicated_embedding: bool = False

    def share(self, group: TensorGroup) -> float:
        """The part of a tensor of `group` that one rank holds."""
        ranks = self.tensor_parallel
        if group == "replicated" or (group == "embedding" and self.replicated_embedding):
            return 1.0
        # Each rank has at least one head of the keys, so with fewer heads than ranks they are replicated.
        keys = 1 / min(ranks, self.kv_heads or ranks)
        if group == "key_value":
            return keys
        if group == "fused" and self.heads and self.kv_heads:
            return (self.heads / ranks + 2 * self.kv_heads * keys) / (self.heads + 2 * self.kv_heads)
        return 1 / ranks


def indivisible_heads(heads: int | None, kv_heads: int | None, ranks: int) -> str | None:
    """Why attention cannot be divided among this number of GPUs, with what to do; None if it can, or is not known.

    TensorRT-LLM asserts it in `layers/attention.py`, `_torch/modules/attention.py` and `duplicate_kv_weight`, once the
    weights are being loaded; vLLM in `verify_with_parallel_config` and its models.
    """
    if heads and heads % ranks:
        return (
            f"{heads} attention heads cannot be divided among {ranks} GPUs: set an option.tensor_parallel_degree that "
            "divides them"
        )
    if kv_heads and kv_heads % ranks and ranks % kv_heads:
        return (
            f"{kv_heads} heads of keys and values can neither be divided among {ranks} GPUs nor repeated evenly on "
            "them: set an option.tensor_parallel_degree that divides their number, or is a multiple of it"
        )
    return None


def stage_of(layer: int, layers: int, stages: int) -> int:
    """The pipeline stage of a layer: the first stages have one more if the layers do not divide evenly."""
    size, longer = divmod(layers, stages)
    if layer < longer * (size + 1):
        return layer // (size + 1)
    return longer + (layer - longer * (size + 1)) // max(1, size)
