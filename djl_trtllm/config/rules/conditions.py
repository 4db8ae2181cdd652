"""When each rule of `rules.RULES` is broken: the message for the reader, or None where the rule holds."""

from __future__ import annotations

from djl_trtllm.config.options.choices import Backend, ChatGlmVersion, QuantAlgorithm, Quantization, SchedulerPolicy
from djl_trtllm.config.rules.context import RuleContext


def rotary_scaling_pair(subject: RuleContext) -> str | None:
    """Type and factor of the rotary scaling belong together."""
    pair = ("rotary_scaling_type", "rotary_scaling_factor")
    missing = [name for name in pair if subject.value(name) is None]
    if len(missing) != 1:
        return None
    (present,) = (name for name in pair if name not in missing)
    example = "linear" if missing == ["rotary_scaling_type"] else "2"
    return (
        f"{subject.cited(present)} needs option.{missing[0]} beside it: write option.{missing[0]}={example}, or neither"
    )


def rotary_dim_family(subject: RuleContext) -> str | None:
    """`rotary_dim` is GPT-J's."""
    return _outside(subject, "rotary_dim", ("gptj",), "GPT-J")


def rotary_base_family(subject: RuleContext) -> str | None:
    """`rotary_base` is for three families."""
    return _outside(subject, "rotary_base", ("llama", "internlm", "qwen"), "Llama, InternLM and Qwen")


def use_fused_mlp_family(subject: RuleContext) -> str | None:
    """`use_fused_mlp` is Llama's."""
    if not subject.value("use_fused_mlp"):
        return None
    return _outside(subject, "use_fused_mlp", ("llama",), "Llama")


def multi_block_mode_family(subject: RuleContext) -> str | None:
    """`multi_block_mode` is not for Qwen."""
    if not subject.value("multi_block_mode") or not _is_of(subject, ("qwen",)):
        return None
    return (
        f"{subject.cited('multi_block_mode')}: early engines did not have it for Qwen (this model is "
        f"{subject.model_type}); today's kernels do"
    )


def smoothquant_family(subject: RuleContext) -> str | None:
    """`smoothquant` is for four families."""
    families = ("llama", "mistral", "internlm", "baichuan")
    if _quantization(subject) != "smoothquant" or subject.model_type is None or _is_of(subject, families):
        return None
    return (
        f"{_quantized(subject)} is documented for Llama, Mistral, InternLM and Baichuan, and this model is "
        f"{subject.model_type}: where compiling fails, use option.quantize=fp8 or int8"
    )


def smoothquant_parts(subject: RuleContext) -> str | None:
    """The parts of smoothquant mean nothing without it."""
    if _quantization(subject) == "smoothquant":
        return None
    names = ("smoothquant_alpha", "smoothquant_per_token", "smoothquant_per_channel", "multi_query_mode")
    return _without(subject, names, "smoothquant")


def awq_family(subject: RuleContext) -> str | None:
    """The document has `awq` for two families."""
    if _quantization(subject) != "awq" or subject.model_type is None or _is_of(subject, ("llama", "mistral")):
        return None
    return (
        f"{_quantized(subject)}: early containers had it for Llama and Mistral only (this model is "
        f"{subject.model_type}); today's compilers take it"
    )


def awq_parts(subject: RuleContext) -> str | None:
    """The parts of awq mean nothing without it; samples are for every quantisation that is calibrated."""
    chosen = _quantization(subject)
    if chosen == "awq":
        return None
    names = ["awq_format", "awq_block_size"]
    calibrated = chosen in ("smoothquant", "fp8") and "awq" not in subject.wrote("calib_size").lower()
    if not calibrated:
        names.append("calib_size")
    return _without(subject, tuple(names), "awq")


def quantize_compiled(subject: RuleContext) -> str | None:
    """An engine that is compiled cannot be quantised any more."""
    if not subject.is_engine:
        return None
    wanted = subject.value("quantize")
    algorithm = subject.value("quant_algo") not in (None, QuantAlgorithm.NO_QUANT)
    if algorithm and subject.compiled_as is None:
        name = "quant_algo"
    elif wanted is not None and wanted != subject.compiled_as:
        name = "quantize"
    else:
        return None
    return (
        f"{subject.cited(name)}: the model is a compiled engine, and its weights are what they were compiled to; "
        f"remove option.{name}, or serve the checkpoint it was compiled from"
    )


def chatglm_version(subject: RuleContext) -> str | None:
    """The document requires the version of ChatGLM models."""
    if not _is_of(subject, ("chatglm",)) or subject.value("chatglm_model_version") is not ChatGlmVersion.UNSPECIFIED:
        return None
    return (
        f"option.chatglm_model_version is not set and this model is {subject.model_type}: LMI containers "
        "require it (such as chatglm3_6b), here the checkpoint's path or its config.json tell the version"
    )


def max_num_tokens_holds_a_prompt(subject: RuleContext) -> str | None:
    """A prompt that is not split has to fit into one iteration."""
    tokens, longest = subject.value("max_num_tokens"), subject.value("max_input_len")
    if tokens is None or tokens >= longest or subject.value("enable_chunked_prefill"):
        return None
    if subject.value("backend") is Backend.OPENVINO:
        return None
    return (
        f"{subject.cited('max_num_tokens')} is below {subject.cited('max_input_len')}: TensorRT-LLM refuses prompts of "
        f"more than {tokens} tokens although up to {longest} are allowed; set option.enable_chunked_prefill=true, or "
        f"option.max_num_tokens={longest}"
    )


def cap_and_fraction(subject: RuleContext) -> str | None:
    """Of a token cap and a memory fraction the smaller cache counts."""
    cap, fraction = "max_tokens_in_paged_kv_cache", "kv_cache_free_gpu_mem_fraction"
    if subject.value(cap) is None or subject.value(fraction) is None:
        return None
    return (
        f"{subject.cited(cap)} and {subject.cited(fraction)}: the KV cache holds the smaller of {subject.value(cap)} "
        f"tokens and what fits into {100 * subject.value(fraction):g} % of the memory that is free once the model is "
        "loaded"
    )


def static_batch(subject: RuleContext) -> str | None:
    """Static batches are a legacy mode."""
    if subject.value("batch_scheduler_policy") is not SchedulerPolicy.STATIC_BATCH:
        return None
    return (
        f"{subject.cited('batch_scheduler_policy')} finishes a whole batch before the next one begins, a legacy mode "
        "that is not for production; write max_utilization or guaranteed_no_evict"
    )


def attention_window(subject: RuleContext) -> str | None:
    """A window below the longest sequence forgets its beginning."""
    windows = subject.value("max_attention_window")
    if windows is None:
        return None
    name = "max_seq_len"
    longest = subject.value(name)
    told = subject.cited(name)
    if longest is None:
        longest = subject.value("max_input_len") + subject.value("max_output_len")
        told = f"{subject.cited('max_input_len')} plus {subject.cited('max_output_len')}"
    if min(windows) >= longest:
        return None
    return (
        f"{subject.cited('max_attention_window')} is below the longest sequence of {longest} tokens ({told}): of "
        f"longer sequences only the last {min(windows)} tokens are attended to, which is faster and less accurate; "
        "leave it out for full attention"
    )


def _is_of(subject: RuleContext, families: tuple[str, ...]) -> bool:
    kind = (subject.model_type or "").lower().replace("-", "").replace("_", "")
    return kind.startswith(families)


def _outside(subject: RuleContext, name: str, families: tuple[str, ...], names: str) -> str | None:
    if not subject.is_set(name) or subject.model_type is None or _is_of(subject, families):
        return None
    return f"{subject.cited(name)} is documented for {names} only, and this model is {subject.model_type}"


def _quantization(subject: RuleContext) -> str | None:
    """The method, by its name in `option.quantize`, also where `option.quant_algo` names it."""
    algorithm = subject.value("quant_algo")
    if algorithm is not None:
        words = {"AWQ": "awq", "_SQ_": "smoothquant", "FP8": "fp8"}
        return next((method for word, method in words.items() if word in algorithm.value), str(algorithm))
    method: Quantization | None = subject.value("quantize")
    return None if method is None else method.value


def _quantized(subject: RuleContext) -> str:
    return subject.cited("quant_algo" if subject.value("quant_algo") is not None else "quantize")


def _without(subject: RuleContext, names: tuple[str, ...], method: str) -> str | None:
    given = [subject.cited(name) for name in names if subject.is_set(name)]
    if not given:
        return None
    verb = "has" if len(given) == 1 else "have"
    return f"{' and '.join(given)} {verb} no effect without option.quantize={method}: add that, or leave it out"
