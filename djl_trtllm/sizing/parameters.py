"""The tensors that a config.json leads to expect, where there are no weight files to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from djl_trtllm.model.shape import ModelShape, text_part
from djl_trtllm.sizing.config_values import first_positive, listed, model_type, part, positive
from djl_trtllm.sizing.layer_caches import LayerCache, layer_caches
from djl_trtllm.sizing.tensors import OF_TORCH, Tensor

_TWO_MATRICES = {
    "falcon",
    "RefinedWeb",
    "RefinedWebModel",
    "gpt2",
    "gptj",
    "gpt_neox",
    "gpt_bigcode",
    "opt",
    "phi",
    "starcoder2",
    "bloom",
    "mpt",
    "nemotron",
    "nemotron_h",
}
"""Families whose MLP has no gate."""
_TIED = {
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gpt2",
    "falcon",
    "RefinedWeb",
    "RefinedWebModel",
    "bloom",
    "mpt",
    "gpt_bigcode",
    "opt",
}
"""Families whose config.json need not say that the head is the embedding: it is transformers' default for them."""


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the embedding's matrix is the head's too."""
    text = text_part(config)
    said = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    return said is True or (said is None and model_type(text) in _TIED)


def num_experts(text: Mapping[str, Any]) -> int:
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    found = first_positive(text, names) or 0
    return found if found > 1 else 0


def experts_per_token(text: Mapping[str, Any]) -> int:
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "experts_per_token", "moe_k")
    return (first_positive(text, names) or 1) if num_experts(text) else 0


def expected_tensors(config: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Tensors with the shapes of a decoder of this config.json; empty if it lacks layers, hidden size or heads."""
    shape = ModelShape.from_config(config)
    if not (shape.num_layers and shape.hidden and shape.num_heads and shape.head_dim):
        return ()
    dtype = OF_TORCH.get(shape.dtype or "", "BF16")
    return tuple(Tensor(name, dtype, sizes) for name, sizes in _named(config, shape))


def _named(config: Mapping[str, Any], shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    text = text_part(config)
    hidden, vocab = shape.hidden or 0, shape.vocab_size or 0
    yield "model.embed_tokens.weight", (vocab, hidden)
    single = model_type(text) == "nemotron_h"  # a layer is one of the parts
    for index, cache in enumerate(layer_caches(config)):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        if cache.kind == "latent":
            yield from _latent_attention(layer, text, shape)
        elif cache.kind == "attention":
            yield from _attention(layer, text, shape, cache)
        elif cache.kind == "state":
            yield from _mixer(layer, text, hidden)
        if not single or cache.kind == "none":
            yield f"{layer}.post_attention_layernorm.weight", (hidden,)
            yield from _feed_forward(layer, index, text, shape)
    yield "model.norm.weight", (hidden,)
    if not is_tied(config):
        yield "lm_head.weight", (vocab, hidden)


def _attention(
    layer: str, text: Mapping[str, Any], shape: ModelShape, cache: LayerCache
) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width = shape.hidden or 0, (shape.num_heads or 0) * cache.head_dim
    value_dim = cache.head_dim if cache.value_dim is None else cache.value_dim
    keys = cache.kv_heads * cache.head_dim
    yield f"{layer}.self_attn.q_proj.weight", (width, hidden)
    yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
    yield f"{layer}.self_attn.v_proj.weight", (cache.kv_heads * value_dim, hidden)
    yield f"{layer}.self_attn.o_proj.weight", (hidden, (shape.num_heads or 0) * value_dim)
    if text.get("attention_bias") or model_type(text) in ("qwen2", "qwen2_moe", "gpt2"):
        yield f"{layer}.self_attn.q_proj.bias", (width,)
        yield f"{layer}.self_attn.k_proj.bias", (keys,)
        yield f"{layer}.self_attn.v_proj.bias", (keys,)


def _mixer(layer: str, text: Mapping[str, Any], hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Mamba and linear attention: a projection into the mixer and one out of it."""
    heads, head_dim = positive(text, "mamba_num_heads") or 0, positive(text, "mamba_head_dim") or 0
    if values := positive(text, "linear_num_value_heads"):
        inner = values * (positive(text, "linear_value_head_dim") or 128)
        keys = (positive(text, "linear_num_key_heads") or values) * (positive(text, "linear_key_head_dim") or 128)
        width = 2 * keys + 2 * inner + 2 * values
    else:
        inner = heads * head_dim or hidden * (positive(text, "mamba_expand") or positive(text, "expand") or 2)
        width = 2 * inner + 2 * (positive(text, "n_groups") or 0) * (positive(text, "ssm_state_size") or 0) + heads
    yield f"{layer}.mixer.in_proj.weight", (width, hidden)
    yield f"{layer}.mixer.out_proj.weight", (hidden, inner)


def _latent_attention(layer: str, text: Mapping[str, Any], shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = shape.hidden or 0, shape.num_heads or 0
    rope, nope = positive(text, "qk_rope_head_dim") or 0, positive(text, "qk_nope_head_dim") or 0
    value, rank = positive(text, "v_head_dim") or nope, positive(text, "kv_lora_rank") or 0
    if query := positive(text, "q_lora_rank"):
        yield f"{layer}.self_attn.q_a_proj.weight", (query, hidden)
        yield f"{layer}.self_attn.q_b_proj.weight", (heads * (nope + rope), query)
    else:
        yield f"{layer}.self_attn.q_proj.weight", (heads * (nope + rope), hidden)
    yield f"{layer}.self_attn.kv_a_proj_with_mqa.weight", (rank + rope, hidden)
    yield f"{layer}.self_attn.kv_b_proj.weight", (heads * (nope + value), rank)
    yield f"{layer}.self_attn.o_proj.weight", (hidden, heads * value)


def _feed_forward(
    layer: str, index: int, text: Mapping[str, Any], shape: ModelShape
) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = shape.hidden or 0
    width = shape.intermediate or 4 * hidden
    two = model_type(text) in _TWO_MATRICES
    names = ("up_proj", "down_proj") if two else ("gate_proj", "up_proj", "down_proj")
    experts = num_experts(text)
    if not experts or _is_dense(text, index):
        searched = _searched_width(text, index, hidden)
        yield from _mlp(f"{layer}.mlp", names, hidden, positive(text, "intermediate_size_mlp") or width, searched)
        return
    own = positive(text, "moe_intermediate_size") or width
    # The experts of some models work on a shorter vector, with a matrix into and out of it.
    latent = positive(text, "moe_latent_size") or positive(text, "routed_expert_hidden_size")
    yield f"{layer}.mlp.gate.weight", (experts, hidden)
    if latent:
        yield f"{layer}.mlp.into_latent.weight", (latent, hidden)
        yield f"{layer}.mlp.out_of_latent.weight", (hidden, latent)
    for name, sizes in _mlp(f"{layer}.mlp.experts", names, latent or hidden, own):
        yield name, (experts, *sizes)
    shared = positive(text, "shared_expert_intermediate_size") or positive(text, "moe_shared_expert_intermediate_size")
    count = positive(text, "n_shared_experts") or positive(text, "num_shared_experts") or 0
    shared = shared or own * (1 if model_type(text) == "llama4_text" else count)
    if shared:
        yield from _mlp(f"{layer}.mlp.shared_experts", names, hidden, shared)


def _is_dense(text: Mapping[str, Any], index: int) -> bool:
    """Whether a layer of a model with experts has none."""
    every = listed(text, "moe_layer_freq")
    if index < len(every):
        return not every[index]
    step = positive(text, "interleave_moe_layer_step") or 1
    dense = index < (positive(text, "first_k_dense_replace") or 0) or index in listed(text, "mlp_only_layers")
    return dense or (index + 1) % step != 0


def _searched_width(text: Mapping[str, Any], index: int, hidden: int) -> int | None:
    """The inner size of a layer that architecture search chose (DeciLM): 0 for a layer without; None elsewhere."""
    blocks = listed(text, "block_configs")
    ffn = part(blocks[index], "ffn") if index < len(blocks) and isinstance(blocks[index], dict) else {}
    if not ffn:
        return None
    if ffn.get("no_op") or ffn.get("replace_with_linear"):
        return 0
    multiple = ffn.get("ffn_mult")
    if not isinstance(multiple, int | float) or multiple <= 0:
        return None
    # As in its modeling_decilm.py: two thirds of the multiple, rounded up to 256.
    return -(-int(2 * multiple * hidden / 3) // 256) * 256


def _mlp(
    name: str, matrices: tuple[str, ...], hidden: int, width: int, searched: int | None = None
) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = width if searched is None else searched
    for matrix in matrices:
        yield f"{name}.{matrix}.weight", (hidden, width) if matrix == "down_proj" else (width, hidden)
