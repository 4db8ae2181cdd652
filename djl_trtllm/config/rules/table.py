"""The table of rules between options; nothing else checks one option against another.

Rules that need only options run in `resolve.resolve`; rules about the model's files run in `check_model`,
when the files are there; rules about what an engine does are in `running`, for when the engine is chosen. A rule that
today's engines no longer have gives a note and never an error.
"""

from __future__ import annotations

from dataclasses import replace

from djl_trtllm.config.configuration import Config
from djl_trtllm.config.options.choices import ChatGlmVersion, QuantAlgorithm, Quantization
from djl_trtllm.config.options.documents import DJL, LMI, RUNTIME
from djl_trtllm.config.rules.context import RuleContext, context_of
from djl_trtllm.config.rules.rule import Rule, Severity, adder, check
from djl_trtllm.config.rules.running import RUNNING_RULES
from djl_trtllm.errors import ConfigError

_TABLE: list[Rule] = []
_rule = adder(_TABLE)


@_rule(("engine",), "Python or MPI", Severity.WARNING, "yes: option.backend chooses the engine", DJL)
def engine_of_djl_serving(context: RuleContext) -> str | None:
    engine = context.value("engine")
    if engine is None or engine.lower() in ("python", "mpi"):
        return None
    return (
        f"{context.formatted('engine')} is another engine of DJL Serving and has no effect: option.backend chooses "
        "the engine; under DJL Serving write engine=Python"
    )


@_rule(
    ("rotary_scaling_type", "rotary_scaling_factor"),
    "both or neither",
    Severity.WARNING,
    "no: neither has an effect alone",
    LMI,
)
def rotary_scaling_pair(context: RuleContext) -> str | None:
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


_TABLE.append(Rule("rotary_scaling_words", ("rotary_scaling_type",), "linear or dynamic", Severity.ERROR, "no", LMI))
_TABLE.append(Rule("rotary_scaling_range", ("rotary_scaling_factor",), "greater than 1", Severity.ERROR, "no", LMI))


@_rule(
    ("rotary_dim",), "only for GPT-J", Severity.NOTE, "yes: any model whose config.json has it", LMI, needs_model=True
)
def rotary_dim_family(context: RuleContext) -> str | None:
    return _outside(context, "rotary_dim", ("gptj",), "GPT-J")


@_rule(
    ("rotary_base",),
    "only for Llama, InternLM and Qwen",
    Severity.NOTE,
    "yes: any model whose config.json has it",
    LMI,
    needs_model=True,
)
def rotary_base_family(context: RuleContext) -> str | None:
    return _outside(context, "rotary_base", ("llama", "internlm", "qwen"), "Llama, InternLM and Qwen")


@_rule(("use_fused_mlp",), "only for Llama", Severity.NOTE, "yes: every model with a gated MLP", LMI, needs_model=True)
def use_fused_mlp_family(context: RuleContext) -> str | None:
    if not context.value("use_fused_mlp"):
        return None
    return _outside(context, "use_fused_mlp", ("llama",), "Llama")


@_rule(
    ("multi_block_mode",), "not for Qwen", Severity.NOTE, "yes: every model, and on by default", LMI, needs_model=True
)
def multi_block_mode_family(context: RuleContext) -> str | None:
    if not context.value("multi_block_mode") or not _is_of(context, ("qwen",)):
        return None
    return (
        f"{context.formatted('multi_block_mode')}: early engines did not have it for Qwen (this model is "
        f"{context.model_type}); today's kernels do"
    )


@_rule(
    ("quantize",),
    "smoothquant only for Llama, Mistral, InternLM and Baichuan",
    Severity.WARNING,
    "in part: the quantiser of TensorRT-LLM takes further decoders",
    LMI,
    needs_model=True,
)
def smoothquant_family(context: RuleContext) -> str | None:
    families = ("llama", "mistral", "internlm", "baichuan")
    if _quantization(context) != "smoothquant" or context.model_type is None or _is_of(context, families):
        return None
    return (
        f"{_quantized(context)} is documented for Llama, Mistral, InternLM and Baichuan, and this model is "
        f"{context.model_type}: where compiling fails, use option.quantize=fp8 or int8"
    )


@_rule(
    ("smoothquant_alpha", "smoothquant_per_token", "smoothquant_per_channel", "multi_query_mode"),
    "only with option.quantize=smoothquant",
    Severity.WARNING,
    "no",
    LMI,
)
def smoothquant_parts(context: RuleContext) -> str | None:
    if _quantization(context) == "smoothquant":
        return None
    names = ("smoothquant_alpha", "smoothquant_per_token", "smoothquant_per_channel", "multi_query_mode")
    return _without(context, names, "smoothquant")


@_rule(
    ("quantize",),
    "awq only for Llama and Mistral",
    Severity.NOTE,
    "yes: most decoders, on TensorRT-LLM and on OpenVINO",
    LMI,
    needs_model=True,
)
def awq_family(context: RuleContext) -> str | None:
    if _quantization(context) != "awq" or context.model_type is None or _is_of(context, ("llama", "mistral")):
        return None
    return (
        f"{_quantized(context)}: early containers had it for Llama and Mistral only (this model is "
        f"{context.model_type}); today's compilers take it"
    )


@_rule(
    ("awq_format", "awq_block_size", "calib_size"),
    "only with option.quantize=awq (calib_size also with smoothquant and fp8)",
    Severity.WARNING,
    "no",
    LMI,
)
def awq_parts(context: RuleContext) -> str | None:
    chosen = _quantization(context)
    if chosen == "awq":
        return None
    names = ["awq_format", "awq_block_size"]
    calibrated = chosen in ("smoothquant", "fp8") and "awq" not in context.wrote("calib_size").lower()
    if not calibrated:
        names.append("calib_size")
    return _without(context, tuple(names), "awq")


@_rule(("quantize", "quant_algo"), "only when compiling", Severity.ERROR, "no", LMI, needs_model=True)
def quantize_compiled(context: RuleContext) -> str | None:
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


@_rule(
    ("chatglm_model_version",),
    "required for ChatGLM",
    Severity.NOTE,
    "yes: the path or config.json has the version",
    LMI,
    needs_model=True,
)
def chatglm_version(context: RuleContext) -> str | None:
    if not _is_of(context, ("chatglm",)) or context.value("chatglm_model_version") is not ChatGlmVersion.UNSPECIFIED:
        return None
    return (
        f"option.chatglm_model_version is not set and this model is {context.model_type}: LMI containers "
        "require it (such as chatglm3_6b), here the checkpoint's path or its config.json has the version"
    )


@_rule(
    ("chatglm_model_version", "gpt_model_version"),
    "only for ChatGLM, and for GPT-2 and its variants",
    Severity.NOTE,
    "no: other models have no versions that a path must name",
    LMI,
    needs_model=True,
)
def model_version_family(context: RuleContext) -> str | None:
    return _outside(context, "chatglm_model_version", ("chatglm",), "ChatGLM") or _outside(
        context, "gpt_model_version", ("gpt2", "gptbigcode"), "GPT-2, SantaCoder and StarCoder"
    )


_TABLE.append(
    Rule(
        "memory_fraction_range",
        ("kv_cache_free_gpu_mem_fraction",),
        "strictly between 0 and 1",
        Severity.ERROR,
        "no: inputs and outputs need memory too",
        RUNTIME,
    )
)


@_rule(
    ("max_tokens_in_paged_kv_cache", "kv_cache_free_gpu_mem_fraction"),
    "the smaller of the two is used",
    Severity.NOTE,
    "no",
    RUNTIME,
)
def cap_and_fraction(context: RuleContext) -> str | None:
    cap, fraction = "max_tokens_in_paged_kv_cache", "kv_cache_free_gpu_mem_fraction"
    if context.value(cap) is None or context.value(fraction) is None:
        return None
    return (
        f"{context.formatted(cap)} and {context.formatted(fraction)}: the KV cache holds the smaller of "
        f"{context.value(cap)} tokens and what fits into {100 * context.value(fraction):g} % of the memory "
        "that is free once the model is loaded"
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


RULES = (*_TABLE, *RUNNING_RULES)
"""Every rule between options."""
OPTION_RULES = tuple(rule for rule in _TABLE if rule.broken is not None and not rule.needs_model)
MODEL_RULES = tuple(rule for rule in RULES if rule.needs_model)


def check_model(config: Config, model_type: str | None, is_engine: bool, *, compiled_as: str | None = None) -> Config:
    """Run the rules that need the model's files, and return the configuration with their warnings and notes.

    `model_type` is that of config.json, `is_engine` whether the files are a compiled engine, and `compiled_as` the
    quantisation it was compiled with, where that is known. Raises ConfigError with every problem.
    """
    found = check(context_of(config, model_type, is_engine, compiled_as), MODEL_RULES)
    if found.problems:
        raise ConfigError(found.problems, [*config.warnings, *found.warnings])
    if not found.warnings and not found.notes:
        return config
    return replace(config, warnings=(*config.warnings, *found.warnings), notes=(*config.notes, *found.notes))
