"""How an engine is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from djl_trtllm.config.options.choices import ProfilingVerbosity
from djl_trtllm.config.options.documents import DJL, TRITON, TRTLLM
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import Option


class BuildOptions(OptionGroup):
    """Sizes the compiler tunes for, what it adds, where it works."""

    opt_num_tokens: Annotated[
        int | None,
        Option(
            "option.opt_num_tokens",
            "Tokens of an iteration for which the compiler tunes its kernels, up to `option.max_num_tokens`.",
            unit="tokens",
            at_least=1,
            example="1024",
            default_note="the batch size",
            source=TRITON,
        ),
    ] = None
    opt_batch_size: Annotated[
        int,
        Option(
            "option.opt_batch_size",
            "Batch for which the compiler tunes its kernels.",
            unit="sequences",
            at_least=1,
            source=TRTLLM,
        ),
    ] = 8
    max_encoder_input_len: Annotated[
        int,
        Option(
            "option.max_encoder_input_len",
            "Longest input of the encoder, for encoder-decoder models.",
            unit="tokens",
            at_least=1,
            source=TRTLLM,
        ),
    ] = 1024
    max_prompt_embedding_table_size: Annotated[
        int,
        Option(
            "option.max_prompt_embedding_table_size",
            "Rows of the table for prompt embeddings (images, prompt tuning).",
            aliases=("option.max_multimodal_len",),
            unit="rows",
            at_least=0,
            source=TRTLLM,
        ),
    ] = 0
    gather_context_logits: Annotated[
        bool,
        Option(
            "option.gather_context_logits",
            "Keep the logits of the prompt; log probabilities of prompt tokens need it.",
            source=TRTLLM,
        ),
    ] = False
    gather_generation_logits: Annotated[
        bool | None,
        Option(
            "option.gather_generation_logits",
            "Keep the logits of generated tokens, which a compiled engine makes log probabilities from; without it "
            "they are null. It takes batch times vocabulary times 4 bytes of GPU memory, on one GPU the engine then "
            "runs inside the process that serves it, and requests with log probabilities that are cancelled run to "
            "their end.",
            example="true",
            default_note="off; PyTorch has log probabilities without",
            source=DJL,
        ),
    ] = None
    gather_all_token_logits: Annotated[
        bool,
        Option(
            "option.gather_all_token_logits",
            "Keep the logits of prompt and generated tokens.",
            source=TRTLLM,
        ),
    ] = False
    strongly_typed: Annotated[
        bool,
        Option(
            "option.strongly_typed",
            "Take the number formats of the network as they are, instead of letting TensorRT choose.",
            source=TRTLLM,
        ),
    ] = True
    force_num_profiles: Annotated[
        int | None,
        Option(
            "option.force_num_profiles",
            "Number of optimisation profiles.",
            unit="profiles",
            at_least=1,
            example="1",
            default_note="chosen by the compiler",
            source=TRTLLM,
        ),
    ] = None
    profiling_verbosity: Annotated[
        ProfilingVerbosity,
        Option(
            "option.profiling_verbosity",
            "How much a compiled engine reports to profilers.",
            source=TRTLLM,
        ),
    ] = ProfilingVerbosity.LAYER_NAMES_ONLY
    enable_debug_output: Annotated[
        bool,
        Option(
            "option.enable_debug_output",
            "Let a compiled engine give out intermediate tensors.",
            source=TRTLLM,
        ),
    ] = False
    use_refit: Annotated[
        bool,
        Option(
            "option.use_refit",
            "Compile an engine whose weights can be replaced.",
            source=TRTLLM,
        ),
    ] = False
    input_timing_cache: Annotated[
        Path | None,
        Option(
            "option.input_timing_cache",
            "File with kernel timings of an earlier compilation; it makes the next one faster.",
            example="/var/cache/djl-trtllm/model.cache",
            default_note="none",
            source=TRTLLM,
        ),
    ] = None
    output_timing_cache: Annotated[
        Path,
        Option(
            "option.output_timing_cache",
            "File for the kernel timings of this compilation, in the engine directory.",
            source=TRTLLM,
        ),
    ] = Path("model.cache")
    weight_sparsity: Annotated[
        bool,
        Option(
            "option.weight_sparsity",
            "Use kernels for weights of which two in four are zero.",
            source=TRTLLM,
        ),
    ] = False
    weight_streaming: Annotated[
        bool,
        Option(
            "option.weight_streaming",
            "Keep weights in host memory and bring them to the GPU as they are needed.",
            source=TRTLLM,
        ),
    ] = False
    use_strip_plan: Annotated[
        bool,
        Option(
            "option.use_strip_plan",
            "Leave the weights out of the engine file.",
            aliases=("option.strip_plan",),
            source=TRTLLM,
        ),
    ] = False
    visualize_network: Annotated[
        str | None,
        Option(
            "option.visualize_network",
            "Folder for drawings of the network.",
            example="/opt/network",
            default_note="none",
            source=TRTLLM,
        ),
    ] = None
    monitor_memory: Annotated[
        bool,
        Option(
            "option.monitor_memory",
            "Log the memory that compiling takes.",
            source=TRTLLM,
        ),
    ] = False
    fast_build: Annotated[
        bool,
        Option(
            "option.fast_build",
            "Compile faster, for a somewhat slower engine.",
            source=DJL,
        ),
    ] = False
    workspace: Annotated[
        Path | None,
        Option(
            "option.workspace",
            "Folder for files of the compilation.",
            example="/opt/workspace",
            default_note="beside the engine that is compiled",
            source=TRTLLM,
        ),
    ] = None
    enable_tqdm: Annotated[
        bool,
        Option(
            "option.enable_tqdm",
            "Show progress bars while compiling.",
            source=TRTLLM,
        ),
    ] = False
