"""How an engine is compiled."""

from __future__ import annotations

from pathlib import Path

from djl_trtllm.config.options.choices import ProfilingVerbosity
from djl_trtllm.config.options.documents import DJL, TRITON, TRTLLM
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import option


class BuildOptions(OptionGroup):
    """Sizes the compiler tunes for, what it adds, where it works."""

    opt_num_tokens: int | None = option(
        None,
        "Tokens of an iteration for which the compiler tunes its kernels, up to `option.max_num_tokens`.",
        unit="tokens",
        at_least=1,
        example="1024",
        default_note="the batch size",
        source=TRITON,
    )
    opt_batch_size: int = option(
        8, "Batch for which the compiler tunes its kernels.", unit="sequences", at_least=1, source=TRTLLM
    )
    max_encoder_input_len: int = option(
        1024, "Longest input of the encoder, for encoder-decoder models.", unit="tokens", at_least=1, source=TRTLLM
    )
    max_prompt_embedding_table_size: int = option(
        0,
        "Rows of the table for prompt embeddings (images, prompt tuning).",
        aliases=("option.max_multimodal_len",),
        unit="rows",
        at_least=0,
        source=TRTLLM,
    )
    gather_context_logits: bool = option(
        False, "Keep the logits of the prompt; log probabilities of prompt tokens need it.", source=TRTLLM
    )
    gather_generation_logits: bool | None = option(
        None,
        "Keep the logits of generated tokens, which a compiled engine makes log probabilities from; without it they "
        "are null. It takes batch times vocabulary times 4 bytes of GPU memory, on one GPU the engine then runs "
        "inside the process that serves it, and requests with log probabilities that are cancelled run to their end.",
        example="true",
        default_note="off; PyTorch has log probabilities without",
        source=DJL,
    )
    gather_all_token_logits: bool = option(False, "Keep the logits of prompt and generated tokens.", source=TRTLLM)
    strongly_typed: bool = option(
        True, "Take the number formats of the network as they are, instead of letting TensorRT choose.", source=TRTLLM
    )
    force_num_profiles: int | None = option(
        None,
        "Number of optimisation profiles.",
        unit="profiles",
        at_least=1,
        example="1",
        default_note="chosen by the compiler",
        source=TRTLLM,
    )
    profiling_verbosity: ProfilingVerbosity = option(
        ProfilingVerbosity.LAYER_NAMES_ONLY, "How much a compiled engine reports to profilers.", source=TRTLLM
    )
    enable_debug_output: bool = option(False, "Let a compiled engine give out intermediate tensors.", source=TRTLLM)
    use_refit: bool = option(False, "Compile an engine whose weights can be replaced.", source=TRTLLM)
    input_timing_cache: Path | None = option(
        None,
        "File with kernel timings of an earlier compilation; it makes the next one faster.",
        example="/var/cache/djl-trtllm/model.cache",
        default_note="none",
        source=TRTLLM,
    )
    output_timing_cache: Path = option(
        Path("model.cache"), "File for the kernel timings of this compilation, in the engine directory.", source=TRTLLM
    )
    weight_sparsity: bool = option(False, "Use kernels for weights of which two in four are zero.", source=TRTLLM)
    weight_streaming: bool = option(
        False, "Keep weights in host memory and bring them to the GPU as they are needed.", source=TRTLLM
    )
    use_strip_plan: bool = option(
        False, "Leave the weights out of the engine file.", aliases=("option.strip_plan",), source=TRTLLM
    )
    visualize_network: str | None = option(
        None, "Folder for drawings of the network.", example="/opt/network", default_note="none", source=TRTLLM
    )
    monitor_memory: bool = option(False, "Log the memory that compiling takes.", source=TRTLLM)
    fast_build: bool = option(False, "Compile faster, for a somewhat slower engine.", source=DJL)
    workspace: Path | None = option(
        None,
        "Folder for files of the compilation.",
        example="/opt/workspace",
        default_note="beside the engine that is compiled",
        source=TRTLLM,
    )
    enable_tqdm: bool = option(False, "Show progress bars while compiling.", source=TRTLLM)
