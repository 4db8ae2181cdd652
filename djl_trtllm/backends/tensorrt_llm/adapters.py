"""The LoRA adapters that an engine of TensorRT-LLM takes."""

from __future__ import annotations

from djl_trtllm.config import Backend, Config
from djl_trtllm.config.format_setting import format_setting
from djl_trtllm.model import ModelShape
from djl_trtllm.model.adapter import AdapterLimits

_MODULES = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_qkv": "qkv_proj",
    "attn_dense": "o_proj",
    "mlp_h_to_4h": "gate_proj",
    "mlp_4h_to_h": "down_proj",
    "mlp_gate": "up_proj",
    "mlp_gate_up": "gate_up_proj",
    "moe_h_to_4h": "w1",
    "moe_4h_to_h": "w2",
    "moe_gate": "w3",
    "moe_router": "gate",
    "shared_expert_h_to_4h": "shared_expert.gate_proj",
    "shared_expert_4h_to_h": "shared_expert.down_proj",
    "shared_expert_gate": "shared_expert.up_proj",
    "mamba_in_proj": "in_proj",
    "mamba_out_proj": "out_proj",
    "moe_latent_fc1": "fc1_latent_proj",
    "moe_latent_fc2": "fc2_latent_proj",
}
"""TensorRT-LLM's modules and Hugging Face's: `lora_helper.py` of about 1.2, with what 1.3 added."""


def adapter_limits(config: Config, shape: ModelShape, backend: Backend) -> AdapterLimits | None:
    """None where LoRA is off.

    Which modules a compiled engine calls by which names depends on its family, so that theirs are not compared.
    """
    options = config.options
    if not options.enable_lora:
        return None
    modules, setting = None, ""
    if backend is not Backend.TENSORRT:
        chosen = options.lora_target_modules
        modules = frozenset(_MODULES.values() if not chosen else (_MODULES.get(name, name) for name in chosen))
        setting = format_setting(config, "lora_target_modules") if chosen else "all that it knows"
    return AdapterLimits(
        max_rank=options.max_lora_rank,
        rank_setting=format_setting(config, "max_lora_rank"),
        modules=modules,
        modules_setting=setting,
        hidden=shape.hidden,
        layers=shape.num_layers,
    )
