"""The checks of `table.RULES`: each returns a message if its rule is broken, else None."""

from __future__ import annotations

from djl_trtllm.config.options.choices import Backend, ChatGlmVersion, QuantAlgorithm, Quantization, SchedulerPolicy
from djl_trtllm.config.rules.context import RuleContext


def rotary_scaling_pair(context: RuleContext) -> str | None:
    """Type and factor of the rotary scaling belong together."""
    pair = ("rotary_scaling_type", "rotary_scaling_factor")
    missing = [name for name in pair if context.value(name) is None]
    if len(missing) != 1:
        return None
    (present,) = (name for name in pair if name not in missing)
    example = "linear" if missing == ["rotary_scaling_type"] else "2"
    return (
        f"{context.formatted(present)} needs option.{missing[0]} beside it: write option.{missing[0]}={example}, "
        "or neither"
    )


def rotary_dim_family(context: RuleContext) -> str | None:
    """`rotary_dim` is GPT-J's."""
    return _outside(context, "rotary_dim", ("gptj",), "GPT-J")


def rotary_base_family(context: RuleContext) -> str | None:
    """`rotary_base` is for three families."""
    return _outside(context, "rotary_base", ("llama", "internlm", "qwen"), "Llama, InternLM and Qwen")


def use_fused_mlp_family(context: RuleContext) -> str | None:
    """`use_fused_mlp` is Llama's."""
    if not context.value("use_fused_mlp"):
        return None
    return _outside(context, "use_fused_mlp", ("llama",), "Llama")


def multi_block_mode_family(context: RuleContext) -> str | None:
    """`multi_block_mode` is not for Qwen."""
    if not context.value("multi_block_mode") or not _is_of(context, ("qwen",)):
        return None
    return (
        f"{context.formatted('multi_block_mode')}: early engines did not have it for Qwen (this model is "
        f"{context.model_type}); today's kernels do"
    )


def smoothquant_family(context: RuleContext) -> str | None:
    """`smoothquant` is for four families."""
    families = ("llama", "mistral", "internlm", "baichuan")
    if _quantization(context) != "smoothquant" or context.model_type is None or _is_of(context, families):
        return None
    return (
        f"{_quantized(context)} is documented for Llama, Mistral, InternLM and Baichuan, and this model is "
        f"{context.model_type}: where compiling fails, use option.quantize=fp8 or int8"
    )


def smoothquant_parts(context: RuleContext) -> str | None:
    """The options of smoothquant need smoothquant."""
    if _quantization(context) == "smoothquant":
        return None
    names = ("smoothquant_alpha", "smoothquant_per_token", "smoothquant_per_channel", "multi_query_mode")
    return _without(context, names, "smoothquant")


def awq_family(context: RuleContext) -> str | None:
    """The document has `awq` for two families."""
    if _quantization(context) != "awq" or context.model_type is None or _is_of(context, ("llama", "mistral")):
        return None
    return (
        f"{_quantized(context)}: early containers had it for Llama and Mistral only (this model is "
        f"{context.model_type}); today's compilers take it"
    )


def awq_parts(context: RuleContext) -> str | None:
    """The options of awq need awq; `calib_size` is for every calibrated quantisation."""
    chosen = _quantization(context)
    if chosen == "awq":
        return None
    names = ["awq_format", "awq_block_size"]
    calibrated = chosen in ("smoothquant", "fp8") and "awq" not in context.wrote("calib_size").lower()
    if not calibrated:
        names.append("calib_size")
    return _without(context, tuple(names), "awq")


def quantize_compiled(context: RuleContext) -> str | None:
    """A compiled engine cannot be quantised."""
    if not context.is_engine:
        return None
    wanted = context.value("quantize")
    algorithm = context.value("quant_algo") not in (None, QuantAlgorithm.NO_QUANT)
    if algorithm and context.compiled_as is None:
        name = "quant_algo"
    elif wanted is not None and wanted != context.compiled_as:
        name = "quantize"
    else:
        return None
    return (
        f"{context.formatted(name)}: the model is a compiled engine, and its weights have the format that it was "
        f"compiled with; remove option.{name}, or serve the checkpoint it was compiled from"
    )


def chatglm_version(context: RuleContext) -> str | None:
    """The document requires the version of ChatGLM models."""
    if not _is_of(context, ("chatglm",)) or context.value("chatglm_model_version") is not ChatGlmVersion.UNSPECIFIED:
        return None
    return (
        f"option.chatglm_model_version is not set and this model is {context.model_type}: LMI containers "
        "require it (such as chatglm3_6b), here the checkpoint's path or its config.json has the version"
    )


def max_num_tokens_holds_a_prompt(context: RuleContext) -> str | None:
    """A prompt that is not split has to fit into one iteration."""
    tokens, longest = context.value("max_num_tokens"), context.value("max_input_len")
    if tokens is None or tokens >= longest or context.value("enable_chunked_prefill"):
        return None
    if context.value("backend") is Backend.OPENVINO:
        return None
    return (
        f"{context.formatted('max_num_tokens')} is below {context.formatted('max_input_len')}: TensorRT-LLM refuses "
        f"prompts of more than {tokens} tokens although up to {longest} are allowed; set "
        f"option.enable_chunked_prefill=true, or option.max_num_tokens={longest}"
    )


def cap_and_fraction(context: RuleContext) -> str | None:
    """Of a token cap and a memory fraction the smaller cache is used."""
    cap, fraction = "max_tokens_in_paged_kv_cache", "kv_cache_free_gpu_mem_fraction"
    if context.value(cap) is None or context.value(fraction) is None:
        return None
    return (
        f"{context.formatted(cap)} and {context.formatted(fraction)}: the KV cache holds the smaller of "
        f"{context.value(cap)} tokens and what fits into {100 * context.value(fraction):g} % of the memory "
        "that is free once the model is loaded"
    )


def static_batch(context: RuleContext) -> str | None:
    """Static batches are a legacy mode."""
    if context.value("batch_scheduler_policy") is not SchedulerPolicy.STATIC_BATCH:
        return None
    return (
        f"{context.formatted('batch_scheduler_policy')} finishes a whole batch before the next one begins, a legacy "
        "mode that is not for production; write max_utilization or guaranteed_no_evict"
    )


def attention_window(context: RuleContext) -> str | None:
    """A window below the longest sequence drops its beginning."""
    windows = context.value("max_attention_window")
    if windows is None:
        return None
    name = "max_seq_len"
    longest = context.value(name)
    given = context.formatted(name)
    if longest is None:
        longest = context.value("max_input_len") + context.value("max_output_len")
        given = f"{context.formatted('max_input_len')} plus {context.formatted('max_output_len')}"
    if min(windows) >= longest:
        return None
    return (
        f"{context.formatted('max_attention_window')} is below the longest sequence of {longest} tokens ({given}): of "
        f"longer sequences only the last {min(windows)} tokens are attended to, which is faster and less accurate; "
        "leave it out for full attention"
    )


def _is_of(context: RuleContext, families: tuple[str, ...]) -> bool:
    kind = (context.model_type or "").lower().replace("-", "").replace("_", "")
    return kind.startswith(families)


def _outside(context: RuleContext, name: str, families: tuple[str, ...], names: str) -> str | None:
    if not context.is_set(name) or context.model_type is None or _is_of(context, families):
        return None
    return f"{context.formatted(name)} is documented for {names} only, and this model is {context.model_type}"


def _quantization(context: RuleContext) -> str | None:
    """The method, by its name in `option.quantize`, also if `option.quant_algo` names it."""
    algorithm = context.value("quant_algo")
    if algorithm is not None:
        words = {"AWQ": "awq", "_SQ_": "smoothquant", "FP8": "fp8"}
        return next((method for word, method in words.items() if word in algorithm.value), str(algorithm))
    method: Quantization | None = context.value("quantize")
    return None if method is None else method.value


def _quantized(context: RuleContext) -> str:
    return context.formatted("quant_algo" if context.value("quant_algo") is not None else "quantize")


def _without(context: RuleContext, names: tuple[str, ...], method: str) -> str | None:
    given = [context.formatted(name) for name in names if context.is_set(name)]
    if not given:
        return None
    verb = "has" if len(given) == 1 else "have"
    return f"{' and '.join(given)} {verb} no effect without option.quantize={method}: add that, or leave it out"
