"""config.json of well-known models, by their public values."""

from __future__ import annotations

from typing import Any


def llama(**changes: Any) -> dict[str, Any]:
    """LLaMA 3 8B: https://huggingface.co/NousResearch/Meta-Llama-3-8B/blob/main/config.json"""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    } | changes


def deepseek(**changes: Any) -> dict[str, Any]:
    """DeepSeek-V3, with its latent attention, reduced to what sizes need."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    } | changes
