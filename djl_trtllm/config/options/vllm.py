"""Options of vLLM, by the names that LMI passes through; its other arguments are those of `extra_engine_args`."""

from __future__ import annotations

from typing import Literal

from djl_trtllm.config.options.option import OURS, OptionGroup, count, option, unset

_ON_VLLM = "LMI (vLLM)"


class VllmOptions(OptionGroup, name="vllm", heading="vLLM", source=_ON_VLLM):
    """Arguments of vLLM's engine that have no counterpart elsewhere. `option.rolling_batch=vllm` takes that engine."""

    gpu_memory_utilization: float | None = unset(
        "Share of the GPU's memory for weights, activations and KV cache together.",
        above=0,
        at_most=1,
        example="0.9",
        default_note="vLLM's own: 0.9 or 0.92",
    )
    max_num_batched_tokens: int | None = unset(
        "Tokens of all requests together that vLLM processes in one iteration: as `option.max_num_tokens`, and no "
        "other limit is raised.",
        aliases=("option.max_rolling_batch_prefill_tokens",),
        **count("tokens"),
        example="8192",
        default_note="option.max_num_tokens, else vLLM's own for the GPU",
    )
    quantization: str | None = unset(
        "vLLM's own name of a quantisation, in place of `option.quantize`. A quantised checkpoint says its own.",
        example="fp8",
        default_note="from option.quantize, else the checkpoint's own",
    )
    max_loras: int = option(4, "Adapters of one batch.", **count("adapters"))
    max_cpu_loras: int | None = unset(
        "Adapters kept in host memory.", **count("adapters"), example="16", default_note="max_loras"
    )
    fully_sharded_loras: bool = option(False, "Split adapters over the GPUs of `option.tensor_parallel_degree` too.")
    max_logprobs: int | None = unset(
        "Most of the likeliest tokens that a request may ask for.",
        at_least=0,
        unit="tokens",
        example="20",
        default_note="vLLM's own: 20",
    )
    cpu_offload_gb: float | None = unset(
        "Host memory for weights, for each GPU.",
        aliases=("option.cpu_offload_gb_per_gpu",),
        unit="GiB",
        at_least=0,
        example="4",
        default_note="0",
    )
    enable_expert_parallel: bool = option(False, "Spread the experts over the GPUs, each whole.")
    disable_custom_all_reduce: bool = option(False, "Add up the parts of a layer by NCCL only.")
    async_scheduling: bool | None = unset(
        "Schedule the next iteration while the GPU runs the current one.", example="true", default_note="vLLM's own"
    )
    attention_backend: str | None = unset(
        "Kernels of the attention.", example="FLASH_ATTN", default_note="chosen by vLLM"
    )
    distributed_executor_backend: Literal["mp", "ray", "uni"] | None = unset(
        "How the processes of several GPUs are started.", example="mp", default_note="chosen by vLLM"
    )
    speculative_config: str | None = unset(
        "Speculative decoding, as a JSON object.",
        example='{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}',
        default_note="none",
    )
    compilation_config: str | None = unset(
        "What is compiled, as a JSON object.", example='{"cudagraph_mode": "FULL"}', default_note="vLLM's own"
    )
    hf_overrides: str | None = unset(
        "Values in place of those in config.json, as a JSON object.",
        example='{"rope_theta": 1000000}',
        default_note="none",
    )
    kv_transfer_config: str | None = unset(
        "Where KV caches go to and come from, as a JSON object.",
        example='{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}',
        default_note="none",
    )
    limit_mm_per_prompt: str | None = unset(
        "Images, videos and sounds of a prompt, as a JSON object. Only text is served, so each of them is 0.",
        example='{"image": 0}',
        default_note="0 of each",
    )
    extra_engine_args: str | None = unset(
        "Arguments of vLLM's `EngineArgs` that have no option: a YAML file (in the model directory, or with its whole "
        "path), or JSON. docs/vllm.md has the rules.",
        example='{"long_prefill_token_threshold": 2048}',
        default_note="none",
        source=OURS,
    )
