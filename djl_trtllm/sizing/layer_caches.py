"""What each layer of a model keeps of a sequence: keys and values, a latent vector, or a state of constant size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from djl_trtllm.model.shape import ModelShape, text_part
from djl_trtllm.sizing.config_values import first_positive, listed, model_type, part, positive

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
    latent = positive(text, "kv_lora_rank")
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
            caches.append(LayerCache("latent", 1, latent + (positive(text, "qk_rope_head_dim") or 0), window))
        else:
            heads, keys, values = _heads(text, shape, index, window)
            kept = (state, sum(elements)) if kind == "both" else (0, 0)
            caches.append(LayerCache("attention", heads, keys, window, *kept, values))
    return tuple(caches)


def _heads(text: Mapping[str, Any], shape: ModelShape, index: int, window: int | None) -> tuple[int, int, int | None]:
    """Heads of keys, and the sizes of a key and of a value. The layers of a few models differ in these."""
    block = _block(text, index)
    if block is not None and shape.num_heads:
        return shape.num_heads // (positive(block, "n_heads_in_group") or 1), shape.head_dim or 0, None
    # MiMo-V2 has other heads in layers with a window, Gemma 4 in those without.
    names = (
        ("swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim")
        if window
        else ("num_global_key_value_heads", "global_head_dim", "")
    )
    heads, keys, values = (positive(text, name) for name in names)
    keys = keys or shape.head_dim or 0
    values = values or positive(text, "v_head_dim")
    return heads or shape.num_kv_heads or 0, keys, None if values == keys else values


def _block(text: Mapping[str, Any], index: int) -> Mapping[str, Any] | None:
    """The attention of one layer of a model that architecture search made (DeciLM, Llama-Nemotron)."""
    blocks = listed(text, "block_configs")
    if index >= len(blocks) or not isinstance(blocks[index], dict):
        return None
    return part(blocks[index], "attention")


_RECURRENT = {"mamba", "linear_attention", "recurrent", "M", "mamba2"}
_NOTHING = {"-", "mlp", "E", "moe"}


def _kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    """`attention`, `state`, `both` or `none` of each layer."""
    family = model_type(text)
    if family in ("mamba", "mamba2", "falcon_mamba"):
        return ["state"] * layers
    if family == "falcon_h1":
        return ["both"] * layers
    named = _named_kinds(text, layers)
    if named:
        return named
    if listed(text, "block_configs"):
        blocks = [_block(text, index) or {} for index in range(layers)]
        return ["none" if block.get("no_op") or block.get("replace_with_linear") else "attention" for block in blocks]
    linear = listed(part(text, "linear_attn_config"), "kda_layers")
    if linear:  # Kimi Linear counts from 1
        return ["state" if index + 1 in linear else "attention" for index in range(layers)]
    if indices := listed(text, "attn_layer_indices"):  # Bamba
        return ["attention" if index in indices else "state" for index in range(layers)]
    if period := positive(text, "attn_layer_period"):  # Jamba
        offset = positive(text, "attn_layer_offset") or 0
        return ["attention" if index % period == offset else "state" for index in range(layers)]
    if interval := positive(text, "full_attention_interval"):  # Qwen3-Next
        return ["attention" if (index + 1) % interval == 0 else "state" for index in range(layers)]
    return ["attention"] * layers


def _named_kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    """The kinds of a list that names each layer's; empty without one."""
    pattern = text.get("hybrid_override_pattern")  # Nemotron-H
    blocks = listed(text, "block_types") or listed(text, "_block_types")  # RecurrentGemma repeats its pattern
    lists = (
        list(pattern) if isinstance(pattern, str) else (),
        listed(text, "layer_types"),
        listed(text, "layers_block_type"),
        [blocks[index % len(blocks)] for index in range(layers)] if blocks else (),
    )
    named = next((names for names in lists if len(names) == layers), ())
    return [_kind(str(name)) for name in named]


def _kind(name: str) -> str:
    return "state" if name in _RECURRENT else "none" if name in _NOTHING else "attention"


def _windows(text: Mapping[str, Any], layers: int) -> list[int | None]:
    window = positive(text, "sliding_window") or positive(text, "attention_window_size")
    chunk = positive(text, "attention_chunk_size")
    if text.get("use_sliding_window") is False:
        window = None
    types = listed(text, "layer_types")
    if len(types) == layers:
        return [_window_of(name, window, chunk) for name in types]
    marks = listed(text, "hybrid_layer_pattern")  # MiMo-V2: 1 for a layer with a window
    if len(marks) == layers:
        return [window if mark == 1 else None for mark in marks]
    if window is None:
        return [None] * layers
    pattern = positive(text, "sliding_window_pattern") or _PATTERNS.get(model_type(text))
    if pattern:  # every nth layer sees everything
        return [None if (index + 1) % pattern == 0 else window for index in range(layers)]
    full = positive(text, "max_window_layers") if text.get("use_sliding_window") else None
    return [window if index >= (full or 0) else None for index in range(layers)]


_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "gpt_oss": 2, "cohere2": 4}


def _window_of(name: object, window: int | None, chunk: int | None) -> int | None:
    return window if name == "sliding_attention" else chunk if name == "chunked_attention" else None


class _State(NamedTuple):
    """Elements of one layer's recurrent state: the last inputs of the convolution, and the state itself."""

    convolution: int
    own: int


def _state(text: Mapping[str, Any]) -> _State:
    if heads := positive(text, "linear_num_value_heads"):  # Qwen3-Next: gated delta net
        size = positive(text, "linear_key_head_dim") or 128
        keys = (positive(text, "linear_num_key_heads") or heads) * size
        values = heads * (positive(text, "linear_value_head_dim") or 128)
        kernel = positive(text, "linear_conv_kernel_dim") or 4
        return _State((2 * keys + values) * (kernel - 1), values * size)
    linear = part(text, "linear_attn_config")
    if linear:  # Kimi Linear
        heads, size = positive(linear, "num_heads") or 0, positive(linear, "head_dim") or 0
        kernel = positive(linear, "short_conv_kernel_size") or 4
        return _State(3 * heads * size * (kernel - 1), heads * size * size)
    hidden = first_positive(text, ("hidden_size", "d_model", "n_embd")) or 0
    size = first_positive(text, ("ssm_state_size", "mamba_d_state", "state_size")) or 0
    kernel = first_positive(text, ("conv_kernel", "mamba_d_conv", "conv1d_width")) or 4
    if width := positive(text, "lru_width"):  # RecurrentGemma
        return _State(width * (kernel - 1), width)
    heads = first_positive(text, ("mamba_num_heads", "mamba_n_heads"))
    head_dim = first_positive(text, ("mamba_head_dim", "mamba_d_head"))
    inner = (heads or 0) * (head_dim or 0) or positive(text, "mamba_d_ssm") or 0
    inner = inner or hidden * (first_positive(text, ("mamba_expand", "expand")) or 2)
    groups = first_positive(text, ("n_groups", "mamba_n_groups")) or 0
    return _State((kernel - 1) * (inner + 2 * groups * size), inner * size)
