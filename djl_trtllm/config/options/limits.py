"""How long and how many."""

from __future__ import annotations

from djl_trtllm.config.options.documents import FINDING, LMI, TRTLLM
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import option


class LimitOptions(OptionGroup):
    max_input_len: int = option(
        1024,
        "Longest prompt of a request. A longer one is refused with an error that holds both numbers. Widened when "
        "`option.max_num_tokens` is set. A compiled engine's default is what it was compiled for.",
        unit="tokens",
        at_least=1,
        source=f"{LMI}, {FINDING}",
    )
    max_output_len: int = option(
        512,
        "Most tokens one sequence may generate. A request for more is refused with an error that holds both numbers; "
        "defaults, such as LMI's 30 tokens, are lowered to it. Widened when `option.max_num_tokens` is set. A compiled "
        "engine's default is what it was compiled for.",
        unit="tokens",
        at_least=1,
        source=f"{LMI}, {FINDING}",
    )
    max_seq_len: int | None = option(
        None,
        "Longest sequence, prompt and output together. A compiled engine's default is what it was compiled for.",
        aliases=("option.max_model_len", "option.max_decoder_seq_len"),
        unit="tokens",
        at_least=2,
        example="2048",
        default_note="max_input_len + max_output_len, at most what the model was trained for",
        source=TRTLLM,
    )
    max_num_tokens: int | None = option(
        None,
        "Tokens of all requests together that the engine processes in one iteration. Setting it to N also raises "
        "`option.max_input_len` and `option.max_output_len` to at least min(4096, N) and "
        "`option.max_rolling_batch_size` to at least 256.",
        unit="tokens",
        at_least=1,
        example="16384",
        default_note="on GPUs what fits (measured or estimated), at most 16384; on CPUs 256 or 512; nothing is widened",
        source=FINDING,
    )
    strict_memory: bool = option(
        False,
        "Refuse to start where model and options do not fit the memory of the GPUs, by the measured tables or the "
        "estimate (docs/sizing.md), before anything is compiled. Otherwise that is a warning.",
        effect="refuses checkpoints on GPUs; on CPUs nothing: the KV cache is fitted to the memory that is free",
        source=FINDING,
    )
    max_rolling_batch_size: int = option(
        32,
        "Sequences that are generated at the same time; further requests wait in the queue. A request with `n`, "
        "`best_of` or beams takes as many places as it has sequences. Widened when `option.max_num_tokens` is set. A "
        "compiled engine's default is what it was compiled for.",
        unit="sequences",
        at_least=1,
        source=f"{LMI}, {FINDING}",
    )
    max_num_sequences: int | None = option(
        None,
        "Sequences the engine itself is made for, where that is to differ from `option.max_rolling_batch_size`. As "
        "`option.max_batch_size` it also sets `option.max_rolling_batch_size`, unless that is set.",
        unit="sequences",
        at_least=1,
        example="32",
        default_note="max_rolling_batch_size",
        source=LMI,
        aliases=("option.max_batch_size",),
    )
