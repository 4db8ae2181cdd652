"""Where documents disagree about an option: what each says, what is used here, and why.

The rule: for `option.*` the LMI document is followed; where it is silent, TensorRT-LLM's own default; where a document
and the code that it describes differ, what users of the running code saw.
"""

from __future__ import annotations

from dataclasses import dataclass

from djl_trtllm.config.options import OPTIONS
from djl_trtllm.config.options.option import as_text

LMI = "lmi-trt-llm.md"
FINDING = "finding-max-num-tokens.md"
RUNTIME = "useful-runtime-options.md"
TRITON = "Triton's TensorRT-LLM backend"
TRUSS = "truss-trt-llm.md"
DJL = "DJL Serving"
TRTLLM = "TensorRT-LLM"

HANDLER = "DJL Serving's handler of 0.33"
GUIDE = "the LMI guide of 0.27 to 0.33"
WORKFLOW = "triton-llama-workflow.md"

_FOLLOWED = "the LMI document is followed for `option.*`"


@dataclass(frozen=True)
class Disagreement:
    """One option (by its field), what is said of it (who, what), and why the value of its field is as it is."""

    option: str
    said: tuple[tuple[str, str], ...]
    why: str

    @property
    def choice(self) -> str:
        """The default here, as it is shown."""
        declared = OPTIONS[self.option]
        return as_text(declared.default) or declared.option.default_note


DISAGREEMENTS: tuple[Disagreement, ...] = (
    Disagreement(
        "max_input_len",
        ((f"{LMI}, its example", "1024"), (f"{LMI}, its table", "512 for Llama, 1024 for Falcon"), (HANDLER, "1024")),
        "one value for every model, the one that users of every released container saw",
    ),
    Disagreement(
        "max_output_len",
        (
            (f"{LMI}, its example", "512"),
            (f"{LMI}, its table", "512 for Llama, 1024 for Falcon"),
            (f"{WORKFLOW}, its example", "1024"),
        ),
        "one value for every model, and the LMI document's own",
    ),
    Disagreement(
        "max_num_tokens",
        ((GUIDE, "16384"), (TRTLLM, "8192"), (WORKFLOW, "the output length"), (FINDING, "half of what fits")),
        "the LMI document gives none; what fits depends on model and memory, so it is estimated",
    ),
    Disagreement(
        "max_rolling_batch_size",
        ((LMI, "32"), (f"{DJL}'s start, with rolling_batch=trtllm", "256"), (HANDLER, "32"), (TRTLLM, "2048")),
        f"{_FOLLOWED}, and the last container did the same; `option.max_num_tokens` raises it to 256",
    ),
    Disagreement(
        "max_num_sequences",
        ((LMI, "max_rolling_batch_size"), (TRUSS, "64"), (TRTLLM, "2048")),
        f"{_FOLLOWED}; 64 is Truss's preset and is used where a Truss configuration is the source",
    ),
    Disagreement(
        "kv_cache_free_gpu_mem_fraction",
        ((LMI, "0.95"), (RUNTIME, "0.9"), (WORKFLOW, "0.9"), (TRUSS, "0.1")),
        f"{_FOLLOWED}; 0.1 is Truss's preset and is used where a Truss configuration is the source",
    ),
    Disagreement(
        "max_tokens_in_paged_kv_cache",
        ((RUNTIME, "unset"), (TRUSS, "10000")),
        "the LMI document is silent and TensorRT-LLM sets none; 10000 is Truss's preset",
    ),
    Disagreement(
        "batch_scheduler_policy",
        ((LMI, "max_utilization"), (WORKFLOW, "max_utilization"), (RUNTIME, "guaranteed_no_evict")),
        _FOLLOWED,
    ),
    Disagreement("tokens_per_block", ((LMI, "64"), (GUIDE, "128"), (TRTLLM, "32")), _FOLLOWED),
    Disagreement("enable_kv_cache_reuse", ((LMI, "false"), (TRITON, "false"), (TRTLLM, "true")), _FOLLOWED),
    Disagreement(
        "enable_trt_overlap",
        ((LMI, "false"), (TRUSS, "true")),
        f"{_FOLLOWED}; no engine of today has the option",
    ),
    Disagreement(
        "enable_overlap_scheduler",
        ((HANDLER, "false"), (TRTLLM, "true")),
        "the LMI document is silent, so TensorRT-LLM's default is used",
    ),
    Disagreement(
        "enable_chunked_prefill",
        ((HANDLER, "false"), (TRITON, "false"), (TRTLLM, "false"), (WORKFLOW, "prepares engines for it")),
        "the LMI document is silent, so TensorRT-LLM's default is used",
    ),
    Disagreement(
        "calib_size",
        ((f"{LMI}, for awq", "32"), (GUIDE, "512"), (TRTLLM, "512")),
        _FOLLOWED,
    ),
    Disagreement(
        "calib_batch_size",
        ((GUIDE, "32"), (TRTLLM, "1")),
        "the LMI document is silent, so TensorRT-LLM's default is used",
    ),
    Disagreement("smoothquant_alpha", ((LMI, "0.8"), (TRTLLM, "0.5")), _FOLLOWED),
    Disagreement("multi_block_mode", ((LMI, "false"), (TRITON, "true"), (TRTLLM, "true")), f"{_FOLLOWED} when set"),
    Disagreement(
        "context_fmha_fp32_acc",
        ((f"{WORKFLOW}, its example", "enable"), (TRTLLM, "false")),
        "the example turns it on for one model; TensorRT-LLM's default is used",
    ),
    Disagreement(
        "normalize_log_probs",
        ((TRITON, "true"), (HANDLER, "false"), (TRTLLM, "false")),
        "the LMI document is silent, so TensorRT-LLM's default is used",
    ),
    Disagreement(
        "enable_build_cache",
        ((HANDLER, "true"), (TRTLLM, "false")),
        "engines are kept in this server's own cache, as users of the handler saw",
    ),
    Disagreement(
        "cross_kv_cache_fraction",
        ((TRITON, "0.5"), (TRTLLM, "unset")),
        "the LMI document is silent, so TensorRT-LLM's default is used",
    ),
    Disagreement(
        "predict_timeout",
        ((f"{DJL}, its code", "120"), (f"{DJL}, its container", "240")),
        "users ran the container",
    ),
    Disagreement(
        "model_loading_timeout",
        ((f"{DJL}, its code", "240"), (f"{DJL}, its container", "1200"), (GUIDE, "1800")),
        "users ran the container",
    ),
)
"""Every option about which documents disagree."""
