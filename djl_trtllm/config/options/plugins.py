"""Plugins and attention kernels of a compiled engine."""

from __future__ import annotations

from djl_trtllm.config.options.choices import PluginDType
from djl_trtllm.config.options.documents import DJL, LMI, TRITON, TRTLLM
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import option


class PluginOptions(OptionGroup):
    """The flags of trtllm-build that choose kernels; its `enable` and `disable` are true and false here too."""

    gpt_attention_plugin: PluginDType | None = option(
        None,
        "Number format of the attention plugin; `auto` is that of the model.",
        value_aliases={
            "enable": "auto",
            "fp16": "float16",
            "half": "float16",
            "bf16": "bfloat16",
            "fp32": "float32",
        },
        example="auto",
        default_note="the engine's own",
        source=TRITON,
    )
    gemm_plugin: PluginDType | None = option(
        None,
        "Number format of the matrix multiplication plugin.",
        value_aliases={
            "enable": "auto",
            "fp16": "float16",
            "half": "float16",
            "bf16": "bfloat16",
            "fp32": "float32",
        },
        example="auto",
        default_note="the engine's own",
        source=TRITON,
    )
    lora_plugin: PluginDType | None = option(
        None,
        "Number format of the LoRA plugin.",
        value_aliases={
            "enable": "auto",
            "fp16": "float16",
            "half": "float16",
            "bf16": "bfloat16",
            "fp32": "float32",
        },
        example="auto",
        default_note="the engine's own",
        source=TRTLLM,
    )
    moe_plugin: PluginDType | None = option(
        None,
        "Number format of the mixture-of-experts plugin.",
        value_aliases={
            "enable": "auto",
            "fp16": "float16",
            "half": "float16",
            "bf16": "bfloat16",
            "fp32": "float32",
        },
        example="auto",
        default_note="the engine's own",
        source=TRTLLM,
    )
    nccl_plugin: PluginDType | None = option(
        None,
        "Number format of the communication plugin.",
        value_aliases={
            "enable": "auto",
            "fp16": "float16",
            "half": "float16",
            "bf16": "bfloat16",
            "fp32": "float32",
        },
        example="auto",
        default_note="the engine's own",
        source=TRTLLM,
    )
    gemm_swiglu_plugin: PluginDType | None = option(
        None,
        "Number format of the fused matrix multiplication and SwiGLU (fp8 only).",
        value_aliases={
            "enable": "auto",
            "fp16": "float16",
            "half": "float16",
            "bf16": "bfloat16",
            "fp32": "float32",
        },
        example="fp8",
        default_note="the engine's own",
        source=TRTLLM,
    )
    remove_input_padding: bool = option(
        True, "Pack prompts of different lengths without padding; in-flight batching needs it.", source=TRITON
    )
    context_fmha: bool = option(True, "Use fused attention for prompts.", source=TRITON)
    context_fmha_fp32_acc: bool = option(
        False,
        "Add up in 32 bits in the fused attention for prompts: more accurate, slower.",
        aliases=("option.enable_context_fmha_fp32_acc",),
        source=TRITON,
    )
    use_paged_context_fmha: bool = option(
        True,
        "Let fused attention read prompts from the paged cache; chunked prefill and cache reuse need it.",
        aliases=("option.paged_context_fmha",),
        source=TRITON,
    )
    use_fp8_context_fmha: bool | None = option(
        None,
        "Use fused attention in 8-bit floating point, for models quantised with fp8.",
        example="false",
        default_note="the engine's own: on",
        source=DJL,
    )
    multi_block_mode: bool = option(
        False,
        "Split long sequences over several blocks while decoding. Helps where batch times heads is too small to "
        "fill the GPU. In the document not for Qwen.",
        source=LMI,
    )
    use_fused_mlp: bool = option(
        False,
        "Join the two input multiplications of a gated MLP into one: less traffic, faster for large Llama models. "
        "In the document for Llama only.",
        source=LMI,
    )
    multiple_profiles: bool = option(
        False, "Compile several optimisation profiles: faster at small batches, slower to compile.", source=TRTLLM
    )
    reduce_fusion: bool = option(False, "Join all-reduce with what follows it.", source=TRTLLM)
    user_buffer: bool = option(False, "Save a copy in the all-reduce.", source=TRTLLM)
    streamingllm: bool = option(False, "Compile for attention sinks (StreamingLLM).", source=TRTLLM)
    extended_runtime_perf_knob_config: str | None = option(
        None,
        "TensorRT-LLM's runtime performance switches, as one JSON object.",
        example='{"cuda_graph_mode": true}',
        default_note="none",
        source=DJL,
    )
    cuda_graph_mode: bool = option(False, "Run a compiled engine's decoding steps as CUDA graphs.", source=TRITON)
    cuda_graph_cache_size: int = option(
        0, "CUDA graphs a compiled engine keeps.", unit="graphs", at_least=0, source=TRITON
    )
