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


def qwen3_32b_fp8(**changes: Any) -> dict[str, Any]:
    """https://huggingface.co/Qwen/Qwen3-32B-FP8/blob/main/config.json"""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    } | changes


def nemotron_h(**changes: Any) -> dict[str, Any]:
    """https://huggingface.co/nvidia/Nemotron-H-8B-Base-8K/blob/main/config.json"""
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "num_hidden_layers": 52,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attention_head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "vocab_size": 131072,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    } | changes


def gemma3(**changes: Any) -> dict[str, Any]:
    """Gemma 3 12B's text part: five layers of six look back 1,024 tokens."""
    text = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 48,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 1024,
        "vocab_size": 262208,
    }
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text | changes,
        "torch_dtype": "bfloat16",
    }


def gpt_oss(**changes: Any) -> dict[str, Any]:
    """gpt-oss-20b: every other layer looks back 128 tokens."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "mxfp4"},
    } | changes
