"""Plugins and attention kernels of a compiled engine."""

from __future__ import annotations

from typing import Annotated

from djl_trtllm.config.options.choices import PluginDType
from djl_trtllm.config.options.documents import DJL, LMI, TRITON, TRTLLM
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import Option


class PluginOptions(OptionGroup):
    """The flags of trtllm-build that choose kernels; its `enable` and `disable` are true and false here too."""

    gpt_attention_plugin: Annotated[
        PluginDType | None,
        Option(
            "option.gpt_attention_plugin",
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
        ),
    ] = None
    gemm_plugin: Annotated[
        PluginDType | None,
        Option(
            "option.gemm_plugin",
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
        ),
    ] = None
    lora_plugin: Annotated[
        PluginDType | None,
        Option(
            "option.lora_plugin",
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
        ),
    ] = None
    moe_plugin: Annotated[
        PluginDType | None,
        Option(
            "option.moe_plugin",
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
        ),
    ] = None
    nccl_plugin: Annotated[
        PluginDType | None,
        Option(
            "option.nccl_plugin",
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
        ),
    ] = None
    gemm_swiglu_plugin: Annotated[
        PluginDType | None,
        Option(
            "option.gemm_swiglu_plugin",
            "Number format of the fused matrix multiplication and SwiGLU (fp8 only).",
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
        ),
    ] = None
    remove_input_padding: Annotated[
        bool,
        Option(
            "option.remove_input_padding",
            "Pack prompts of different lengths without padding; in-flight batching needs it.",
            source=TRITON,
        ),
    ] = True
    context_fmha: Annotated[
        bool,
        Option(
            "option.context_fmha",
            "Use fused attention for prompts.",
            source=TRITON,
        ),
    ] = True
    context_fmha_fp32_acc: Annotated[
        bool,
        Option(
            "option.context_fmha_fp32_acc",
            "Add up in 32 bits in the fused attention for prompts: more accurate, slower.",
            aliases=("option.enable_context_fmha_fp32_acc",),
            source=TRITON,
        ),
    ] = False
    use_paged_context_fmha: Annotated[
        bool,
        Option(
            "option.use_paged_context_fmha",
            "Let fused attention read prompts from the paged cache; chunked prefill and cache reuse need it.",
            aliases=("option.paged_context_fmha",),
            source=TRITON,
        ),
    ] = True
    use_fp8_context_fmha: Annotated[
        bool | None,
        Option(
            "option.use_fp8_context_fmha",
            "Use fused attention in 8-bit floating point, for models quantised with fp8.",
            example="false",
            default_note="the engine's own: on",
            source=DJL,
        ),
    ] = None
    multi_block_mode: Annotated[
        bool,
        Option(
            "option.multi_block_mode",
            "Split long sequences over several blocks while decoding. Helps where batch times heads is too small to "
            "fill the GPU. In the document not for Qwen.",
            source=LMI,
        ),
    ] = False
    use_fused_mlp: Annotated[
        bool,
        Option(
            "option.use_fused_mlp",
            "Join the two input multiplications of a gated MLP into one: less traffic, faster for large Llama models. "
            "In the document for Llama only.",
            source=LMI,
        ),
    ] = False
    multiple_profiles: Annotated[
        bool,
        Option(
            "option.multiple_profiles",
            "Compile several optimisation profiles: faster at small batches, slower to compile.",
            source=TRTLLM,
        ),
    ] = False
    reduce_fusion: Annotated[
        bool,
        Option(
            "option.reduce_fusion",
            "Join all-reduce with what follows it.",
            source=TRTLLM,
        ),
    ] = False
    user_buffer: Annotated[
        bool,
        Option(
            "option.user_buffer",
            "Save a copy in the all-reduce.",
            source=TRTLLM,
        ),
    ] = False
    streamingllm: Annotated[
        bool,
        Option(
            "option.streamingllm",
            "Compile for attention sinks (StreamingLLM).",
            source=TRTLLM,
        ),
    ] = False
    extended_runtime_perf_knob_config: Annotated[
        str | None,
        Option(
            "option.extended_runtime_perf_knob_config",
            "TensorRT-LLM's runtime performance switches, as one JSON object.",
            example='{"cuda_graph_mode": true}',
            default_note="none",
            source=DJL,
        ),
    ] = None
    cuda_graph_mode: Annotated[
        bool,
        Option(
            "option.cuda_graph_mode",
            "Run a compiled engine's decoding steps as CUDA graphs.",
            source=TRITON,
        ),
    ] = False
    cuda_graph_cache_size: Annotated[
        int,
        Option(
            "option.cuda_graph_cache_size",
            "CUDA graphs a compiled engine keeps.",
            unit="graphs",
            at_least=0,
            source=TRITON,
        ),
    ] = 0
