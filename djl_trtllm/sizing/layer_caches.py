"""What each layer of a model keeps of a sequence: keys and values, a latent vector, or a state of constant size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from djl_trtllm.model.shape import ModelShape, text_part

Kind = Literal["attention", "latent", "state", "none"]


@dataclass(frozen=True)
class LayerCache:
    """`attention` keeps a key and a value of `kv_heads` x `head_dim` per token. `latent` (MLA) keeps one vector of
    `head_dim` for all heads, the same on every rank. `state` (Mamba, linear attention) keeps `state` bytes of a
    sequence, whatever its length. The layer attends to `window` tokens if it has a window.
    """

    kind: Kind
    kv_heads: int = 0
    head_dim: int = 0
    window: int | None = None
    state: int = 0
    """Bytes per sequence of a recurrent state, in place of keys or beside them."""
    state_elements: int = 0
    value_dim: int | None = None
    """Where values are not as long as keys."""

    def per_token(self, tensor_parallel: int) -> int:
        """Elements per token on one rank: a rank has at least one head, so few heads are replicated."""
        if self.kind == "latent":
            return self.head_dim
        if self.kind == "attention":
            both = self.head_dim + (self.head_dim if self.value_dim is None else self.value_dim)
            return both * max(1, -(-self.kv_heads // tensor_parallel))
        return 0

    def per_sequence(self, tensor_parallel: int) -> int:
        """Bytes of the state on one rank."""
        return -(-self.state // tensor_parallel)


def layer_caches(config: Mapping[str, Any]) -> tuple[LayerCache, ...]:
    """One entry per layer, from a config.json. Empty if it does not give layers, heads and their size."""
    shape = ModelShape.from_config(config)
    text = text_part(config)
    if not shape.num_layers:
        return ()
    kinds = _kinds(text, shape.num_layers)
    windows = _windows(text, shape.num_layers)
    latent = _positive(text, "kv_lora_rank")
    elements = _state(text)
    # The convolution's are in 16 bits, the state's own in what the model asks for.
    wide = text.get("mamba_ssm_dtype", text.get("mamba_ssm_cache_dtype")) == "float32"
    state = 2 * elements.convolution + (4 if wide else 2) * elements.own
    caches = []
    for index, (kind, window) in enumerate(zip(kinds, windows, strict=True)):
        if kind == "none":
            caches.append(LayerCache("none"))
        elif kind == "state":
            caches.append(LayerCache("state", state=state, state_elements=sum(elements)))
        elif latent:
            caches.append(LayerCache("latent", 1, latent + (_positive(text, "qk_rope_head_dim") or 0), window))
        else:
            heads, keys, values = _heads(text, shape, index, window)
            kept = (state, sum(elements)) if kind == "both" else (0, 0)
            caches.append(LayerCache("attention", heads, keys, window, *kept, values))
    return tuple(caches)


def _heads(text: Mapping[str, Any], shape: ModelShape, index: int, window: int | None) -> tuple[int, int, int | None]:
    """Heads of keys, and the sizes of a key and of a value. The layers of a few models differ in these."""
    block = _block(text, index)
    if block is not None and shape.num_heads:
        return shape.num_heads // (_positive(block, "n_heads_in_group") or 1), shape.head_dim or 0, None
    # MiMo-V2 has other heads in layers with a window, Gemma 4 in those without.
    names = (
        ("swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim")
        if window
        else ("num_global_key_value_heads", "global_head_dim", "")
    )
    heads, keys, values = (_positive(text, name) for name in names)
    keys = keys or shape.head_dim or 0
    values = values or _positive(text, "v_head_dim")
    return heads or shape.num_kv_heads or 0, keys, None if values == keys else values


def _block(text: Mapping[str, Any], index: int) -> Mapping[str, Any] | None:
    """The attention of one layer of a model that architecture search made (DeciLM, Llama-Nemotron)."""
    blocks = text.get("block_configs")
    if not isinstance(blocks, list) or index >= len(blocks) or not isinstance(blocks[index], dict):
        return None
    block = blocks[index].get("attention")
    return block if isinstance(block, dict) else None


_RECURRENT = {"mamba", "linear_attention", "recurrent", "M", "mamba2"}
_NOTHING = {"-", "mlp", "E", "moe"}


def _kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    """`attention`, `state`, `both` or `none` of each layer."""
    model_type = text.get("model_type")
    if model_type in ("mamba", "mamba2", "falcon_mamba"):
        return ["state"] * layers
    if model_type == "falcon_h1":
        return ["both"] * layers
    pattern = text.get("hybrid_override_pattern")  # Nemotron-H
    named = list(pattern) if isinstance(pattern, str) else text.get("layer_types") or text.get("layers_block_type")
    blocks = text.get("block_types", text.get("_block_types"))  # RecurrentGemma repeats its pattern
    if not named and isinstance(blocks, list) and blocks:
        named = [blocks[index % len(blocks)] for index in range(layers)]
    if isinstance(named, list) and len(named) == layers:
        return [_kind(name) for name in named]
    if isinstance(text.get("block_configs"), list):
        blocks = [_block(text, index) or {} for index in range(layers)]
        return ["none" if block.get("no_op") or block.get("replace_with_linear") else "attention" for block in blocks]
    linear = text.get("linear_attn_config")
    if isinstance(linear, dict) and isinstance(linear.get("kda_layers"), list):  # Kimi Linear counts from 1
        return ["state" if index + 1 in linear["kda_layers"] else "attention" for index in range(layers)]
    if indices := text.get("attn_layer_indices"):  # Bamba
        return ["attention" if index in indices else "state" for index in range(layers)]
    if period := _positive(text, "attn_layer_period"):  # Jamba
        offset = text.get("attn_layer_offset") or 0
        return ["attention" if index % period == offset else "state" for index in range(layers)]
    if interval := _positive(text, "full_attention_interval"):  # Qwen3-Next
        return ["attention" if (index + 1) % interval == 0 else "state" for index in range(layers)]
    return ["attention"] * layers


def _kind(name: object) -> str:
    return "state" if name in _RECURRENT else "none" if name in _NOTHING else "attention"


def _windows(text: Mapping[str, Any], layers: int) -> list[int | None]:
    window = _positive(text, "sliding_window") or _positive(text, "attention_window_size")
    chunk = _positive(text, "attention_chunk_size")
    if text.get("use_sliding_window") is False:
        window = None
    types = text.get("layer_types")
    if isinstance(types, list) and len(types) == layers:
        return [_window_of(name, window, chunk) for name in types]
    marks = text.get("hybrid_layer_pattern")  # MiMo-V2: 1 for a layer with a window
    if isinstance(marks, list) and len(marks) == layers:
        return [window if mark == 1 else None for mark in marks]
    if window is None:
        return [None] * layers
    pattern = _positive(text, "sliding_window_pattern") or _PATTERNS.get(str(text.get("model_type")))
    if pattern:  # every nth layer sees everything
        return [None if (index + 1) % pattern == 0 else window for index in range(layers)]
    full = _positive(text, "max_window_layers") if text.get("use_sliding_window") else None
    return [window if index >= (full or 0) else None for index in range(layers)]


_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "gpt_oss": 2, "cohere2": 4}


def _window_of(name: object, window: int | None, chunk: int | None) -> int | None:
    return window if name == "sliding_attention" else chunk if name == "chunked_attention" else None


class _State(NamedTuple):
    """Elements of one layer's recurrent state: the last inputs of the convolution, and the state itself."""

    convolution: int
    own: int


def _state(text: Mapping[str, Any]) -> _State:
    if heads := _positive(text, "linear_num_value_heads"):  # Qwen3-Next: gated delta net
        size = _positive(text, "linear_key_head_dim") or 128
        keys = (_positive(text, "linear_num_key_heads") or heads) * size
        values = heads * (_positive(text, "linear_value_head_dim") or 128)
        kernel = _positive(text, "linear_conv_kernel_dim") or 4
        return _State((2 * keys + values) * (kernel - 1), values * size)
    linear = text.get("linear_attn_config")
    if isinstance(linear, dict):  # Kimi Linear
        heads, size = _positive(linear, "num_heads") or 0, _positive(linear, "head_dim") or 0
        kernel = _positive(linear, "short_conv_kernel_size") or 4
        return _State(3 * heads * size * (kernel - 1), heads * size * size)
    hidden = _first(text, ("hidden_size", "d_model", "n_embd")) or 0
    size = _first(text, ("ssm_state_size", "mamba_d_state", "state_size")) or 0
    kernel = _first(text, ("conv_kernel", "mamba_d_conv", "conv1d_width")) or 4
    if width := _positive(text, "lru_width"):  # RecurrentGemma
        return _State(width * (kernel - 1), width)
    heads = _first(text, ("mamba_num_heads", "mamba_n_heads"))
    head_dim = _first(text, ("mamba_head_dim", "mamba_d_head"))
    inner = (heads or 0) * (head_dim or 0) or _positive(text, "mamba_d_ssm") or 0
    inner = inner or hidden * (_first(text, ("mamba_expand", "expand")) or 2)
    groups = _first(text, ("n_groups", "mamba_n_groups")) or 0
    return _State((kernel - 1) * (inner + 2 * groups * size), inner * size)


def _first(text: Mapping[str, Any], names: Sequence[str]) -> int | None:
    return next((value for name in names if (value := _positive(text, name))), None)


def _positive(text: Mapping[str, Any], name: str) -> int | None:
    value = text.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
