"""LoRA and prompt adapters."""

from __future__ import annotations

from typing import Annotated

from djl_trtllm.config.options.documents import DJL, TRITON, TRTLLM
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import Option


class LoraOptions(OptionGroup):
    """Adapters that requests name; TensorRT-LLM has them."""

    enable_lora: Annotated[
        bool,
        Option(
            "option.enable_lora",
            "Serve LoRA adapters beside the model, those in its `adapters` folder and those registered at `/adapters`; "
            "a request names one by `adapters`.",
            source=DJL,
        ),
    ] = False
    max_lora_rank: Annotated[
        int,
        Option(
            "option.max_lora_rank",
            "Largest rank of an adapter.",
            unit="dimensions",
            at_least=1,
            source=TRTLLM,
        ),
    ] = 64
    lora_dir: Annotated[
        str | None,
        Option(
            "option.lora_dir",
            "Folders of adapters.",
            example="/opt/ml/model/adapters",
            source=TRTLLM,
        ),
    ] = None
    lora_ckpt_source: Annotated[
        str,
        Option(
            "option.lora_ckpt_source",
            "Format of the adapters, `hf` or `nemo`.",
            source=TRTLLM,
        ),
    ] = "hf"
    lora_target_modules: Annotated[
        tuple[str, ...] | None,
        Option(
            "option.lora_target_modules",
            "Modules that adapters change.",
            example="attn_q,attn_v",
            source=TRTLLM,
        ),
    ] = None
    lora_cache_optimal_adapter_size: Annotated[
        int,
        Option(
            "option.lora_cache_optimal_adapter_size",
            "Rank for which the adapter cache is sized.",
            aliases=("option.optimal_adapter_size",),
            unit="dimensions",
            at_least=1,
            source=TRITON,
        ),
    ] = 8
    lora_cache_max_adapter_size: Annotated[
        int,
        Option(
            "option.lora_cache_max_adapter_size",
            "Largest rank the adapter cache takes.",
            aliases=("option.max_adapter_size",),
            unit="dimensions",
            at_least=1,
            source=TRITON,
        ),
    ] = 64
    lora_cache_gpu_memory_fraction: Annotated[
        float,
        Option(
            "option.lora_cache_gpu_memory_fraction",
            "Share of GPU memory for adapters.",
            aliases=("option.device_cache_percent",),
            at_least=0,
            at_most=1,
            source=TRITON,
        ),
    ] = 0.05
    lora_cache_host_memory_bytes: Annotated[
        int,
        Option(
            "option.lora_cache_host_memory_bytes",
            "Host memory for adapters.",
            unit="bytes",
            at_least=0,
            source=TRITON,
        ),
    ] = 1073741824
