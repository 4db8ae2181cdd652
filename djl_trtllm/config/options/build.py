"""How an engine is compiled, and with which kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from djl_trtllm.config.options.choices import PluginDType
from djl_trtllm.config.options.option import DJL, LMI, TRITON, TRTLLM, OptionGroup, count, option, unset


class BuildOptions(OptionGroup, name="build", heading="Compiling", source=TRTLLM):
    """Sizes the compiler tunes for, what it adds, where it works."""

    opt_num_tokens: int | None = unset(
        "Tokens of an iteration for which the compiler tunes its kernels, up to `option.max_num_tokens`.",
        **count("tokens"),
        example="1024",
        default_note="the batch size",
        source=TRITON,
    )
    opt_batch_size: int = option(8, "Batch for which the compiler tunes its kernels.", **count("sequences"))
    max_encoder_input_len: int = option(
        1024, "Longest input of the encoder, for encoder-decoder models.", **count("tokens")
    )
    max_prompt_embedding_table_size: int = option(
        0,
        "Rows of the table for prompt embeddings (images, prompt tuning).",
        aliases=("option.max_multimodal_len",),
        unit="rows",
        at_least=0,
    )
    gather_context_logits: bool = option(
        False, "Keep the logits of the prompt; log probabilities of prompt tokens need it."
    )
    gather_generation_logits: bool | None = unset(
        "Keep the logits of generated tokens, which a compiled engine makes log probabilities from; without it they "
        "are null. It takes batch times vocabulary times 4 bytes of GPU memory, on one GPU the engine then runs "
        "inside the process that serves it, and requests with log probabilities that are cancelled run to their end.",
        example="true",
        default_note="off; PyTorch has log probabilities without",
        source=DJL,
    )
    gather_all_token_logits: bool = option(False, "Keep the logits of prompt and generated tokens.")
    strongly_typed: bool = option(
        True, "Take the number formats of the network as they are, instead of letting TensorRT choose."
    )
    force_num_profiles: int | None = unset(
        "Number of optimisation profiles.", **count("profiles"), example="1", default_note="chosen by the compiler"
    )
    profiling_verbosity: Literal["layer_names_only", "detailed", "none"] = option(
        "layer_names_only", "How much a compiled engine reports to profilers."
    )
    enable_debug_output: bool = option(False, "Let a compiled engine give out intermediate tensors.")
    use_refit: bool = option(False, "Compile an engine whose weights can be replaced.")
    input_timing_cache: Path | None = unset(
        "File with kernel timings of an earlier compilation; it makes the next one faster.",
        example="/var/cache/djl-trtllm/model.cache",
        default_note="none",
    )
    output_timing_cache: Path = option(
        Path("model.cache"), "File for the kernel timings of this compilation, in the engine directory."
    )
    weight_sparsity: bool = option(False, "Use kernels for weights of which two in four are zero.")
    weight_streaming: bool = option(False, "Keep weights in host memory and bring them to the GPU as they are needed.")
    use_strip_plan: bool = option(False, "Leave the weights out of the engine file.", aliases=("option.strip_plan",))
    visualize_network: str | None = unset(
        "Folder for drawings of the network.", example="/opt/network", default_note="none"
    )
    monitor_memory: bool = option(False, "Log the memory that compiling takes.")
    fast_build: bool = option(False, "Compile faster, for a somewhat slower engine.", source=DJL)
    workspace: Path | None = unset(
        "Folder for files of the compilation.",
        example="/opt/workspace",
        default_note="beside the engine that is compiled",
    )
    enable_tqdm: bool = option(False, "Show progress bars while compiling.")


def _plugin(description: str, example: str = "auto", **declared: Any) -> Any:
    words = {"enable": "auto", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"}
    return unset(description, value_aliases=words, example=example, default_note="the engine's own", **declared)


class PluginOptions(OptionGroup, name="plugins", heading="Kernels of a compiled engine", source=TRTLLM):
    """The flags of trtllm-build that choose kernels; its `enable` and `disable` are true and false here too."""

    gpt_attention_plugin: PluginDType | None = _plugin(
        "Number format of the attention plugin; `auto` is that of the model.", source=TRITON
    )
    gemm_plugin: PluginDType | None = _plugin("Number format of the matrix multiplication plugin.", source=TRITON)
    lora_plugin: PluginDType | None = _plugin("Number format of the LoRA plugin.")
    moe_plugin: PluginDType | None = _plugin("Number format of the mixture-of-experts plugin.")
    nccl_plugin: PluginDType | None = _plugin("Number format of the communication plugin.")
    gemm_swiglu_plugin: PluginDType | None = _plugin(
        "Number format of the fused matrix multiplication and SwiGLU (fp8 only).", example="fp8"
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
    use_fp8_context_fmha: bool | None = unset(
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
        False, "Compile several optimisation profiles: faster at small batches, slower to compile."
    )
    reduce_fusion: bool = option(False, "Join all-reduce with what follows it.")
    user_buffer: bool = option(False, "Save a copy in the all-reduce.")
    streamingllm: bool = option(False, "Compile for attention sinks (StreamingLLM).")
    extended_runtime_perf_knob_config: str | None = unset(
        "TensorRT-LLM's runtime performance switches, as one JSON object.",
        example='{"cuda_graph_mode": true}',
        default_note="none",
        source=DJL,
    )
    cuda_graph_mode: bool = option(False, "Run a compiled engine's decoding steps as CUDA graphs.", source=TRITON)
    cuda_graph_cache_size: int = option(
        0, "CUDA graphs a compiled engine keeps.", unit="graphs", at_least=0, source=TRITON
    )
