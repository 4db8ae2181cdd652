"""LoRA and prompt adapters."""

from __future__ import annotations

from djl_trtllm.config.options.documents import DJL, TRITON, TRTLLM
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import option


class LoraOptions(OptionGroup):
    """Adapters that requests name; TensorRT-LLM has them."""

    enable_lora: bool = option(
        False,
        "Serve LoRA adapters beside the model, those in its `adapters` folder and those registered at `/adapters`; "
        "a request names one by `adapters`.",
        source=DJL,
    )
    max_lora_rank: int = option(64, "Largest rank of an adapter.", unit="dimensions", at_least=1, source=TRTLLM)
    lora_dir: str | None = option(None, "Folders of adapters.", example="/opt/ml/model/adapters", source=TRTLLM)
    lora_ckpt_source: str = option("hf", "Format of the adapters, `hf` or `nemo`.", source=TRTLLM)
    lora_target_modules: tuple[str, ...] | None = option(
        None, "Modules that adapters change.", example="attn_q,attn_v", source=TRTLLM
    )
    lora_cache_optimal_adapter_size: int = option(
        8,
        "Rank for which the adapter cache is sized.",
        aliases=("option.optimal_adapter_size",),
        unit="dimensions",
        at_least=1,
        source=TRITON,
    )
    lora_cache_max_adapter_size: int = option(
        64,
        "Largest rank the adapter cache takes.",
        aliases=("option.max_adapter_size",),
        unit="dimensions",
        at_least=1,
        source=TRITON,
    )
    lora_cache_gpu_memory_fraction: float = option(
        0.05,
        "Share of GPU memory for adapters.",
        aliases=("option.device_cache_percent",),
        at_least=0,
        at_most=1,
        source=TRITON,
    )
    lora_cache_host_memory_bytes: int = option(
        1073741824, "Host memory for adapters.", unit="bytes", at_least=0, source=TRITON
    )
