"""The table of rules between options; nothing else checks one option against another.

Rules that need only options run in `resolve.resolve`; rules about the model's files run in `check_model`,
when the files are there. A rule that today's engines no longer have gives a note and never an error.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from djl_trtllm.config.configuration import Config
from djl_trtllm.config.options.documents import LMI, RUNTIME, TRTLLM
from djl_trtllm.config.rules import conditions
from djl_trtllm.config.rules.context import RuleContext, context_of
from djl_trtllm.errors import ConfigError


class Severity(enum.Enum):
    """The result of a broken rule: an error refuses the configuration, a note is only shown."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Rule:
    """One rule.

    `options` are names of fields, `condition` describes the rule, and `broken` returns a message, or None if the rule
    holds. `lifted` describes whether today's engines still have the rule; `document` is its source. If `broken` is
    None, the type of the option checks the rule. `needs_model` rules wait until the model's files are known.
    """

    name: str
    options: tuple[str, ...]
    condition: str
    severity: Severity
    lifted: str
    document: str
    broken: Callable[[RuleContext], str | None] | None = None
    needs_model: bool = False


RULES: tuple[Rule, ...] = (
    Rule(
        "rotary_scaling_pair",
        ("rotary_scaling_type", "rotary_scaling_factor"),
        "both or neither",
        Severity.WARNING,
        "yes: rope_scaling in config.json holds both",
        LMI,
        conditions.rotary_scaling_pair,
    ),
    Rule("rotary_scaling_words", ("rotary_scaling_type",), "linear or dynamic", Severity.ERROR, "no", LMI),
    Rule("rotary_scaling_range", ("rotary_scaling_factor",), "greater than 1", Severity.ERROR, "no", LMI),
    Rule(
        "rotary_dim_family",
        ("rotary_dim",),
        "only for GPT-J",
        Severity.NOTE,
        "yes: config.json holds it for every model",
        LMI,
        conditions.rotary_dim_family,
        needs_model=True,
    ),
    Rule(
        "rotary_base_family",
        ("rotary_base",),
        "only for Llama, InternLM and Qwen",
        Severity.NOTE,
        "yes: config.json holds it for every model",
        LMI,
        conditions.rotary_base_family,
        needs_model=True,
    ),
    Rule(
        "use_fused_mlp_family",
        ("use_fused_mlp",),
        "only for Llama",
        Severity.NOTE,
        "yes: every model with a gated MLP",
        LMI,
        conditions.use_fused_mlp_family,
        needs_model=True,
    ),
    Rule(
        "multi_block_mode_family",
        ("multi_block_mode",),
        "not for Qwen",
        Severity.NOTE,
        "yes: every model, and on by default",
        LMI,
        conditions.multi_block_mode_family,
        needs_model=True,
    ),
    Rule(
        "smoothquant_family",
        ("quantize",),
        "smoothquant only for Llama, Mistral, InternLM and Baichuan",
        Severity.WARNING,
        "in part: the quantiser of TensorRT-LLM takes further decoders",
        LMI,
        conditions.smoothquant_family,
        needs_model=True,
    ),
    Rule(
        "smoothquant_parts",
        ("smoothquant_alpha", "smoothquant_per_token", "smoothquant_per_channel", "multi_query_mode"),
        "only with option.quantize=smoothquant",
        Severity.WARNING,
        "no",
        LMI,
        conditions.smoothquant_parts,
    ),
    Rule(
        "awq_family",
        ("quantize",),
        "awq only for Llama and Mistral",
        Severity.NOTE,
        "yes: most decoders, on TensorRT-LLM and on OpenVINO",
        LMI,
        conditions.awq_family,
        needs_model=True,
    ),
    Rule(
        "awq_parts",
        ("awq_format", "awq_block_size", "calib_size"),
        "only with option.quantize=awq (calib_size also with smoothquant and fp8)",
        Severity.WARNING,
        "no",
        LMI,
        conditions.awq_parts,
    ),
    Rule(
        "quantize_compiled",
        ("quantize", "quant_algo"),
        "only when compiling",
        Severity.ERROR,
        "no",
        LMI,
        conditions.quantize_compiled,
        needs_model=True,
    ),
    Rule(
        "chatglm_version",
        ("chatglm_model_version",),
        "required for ChatGLM",
        Severity.NOTE,
        "yes: the path or config.json has the version",
        LMI,
        conditions.chatglm_version,
        needs_model=True,
    ),
    Rule(
        "max_num_tokens_holds_a_prompt",
        ("max_num_tokens", "max_input_len", "enable_chunked_prefill"),
        "max_num_tokens at least max_input_len, without chunked prefill",
        Severity.WARNING,
        "no; OpenVINO always splits prompts",
        TRTLLM,
        conditions.max_num_tokens_holds_a_prompt,
    ),
    Rule(
        "memory_fraction_range",
        ("kv_cache_free_gpu_mem_fraction",),
        "strictly between 0 and 1",
        Severity.ERROR,
        "no: inputs and outputs need memory too",
        RUNTIME,
    ),
    Rule(
        "cap_and_fraction",
        ("max_tokens_in_paged_kv_cache", "kv_cache_free_gpu_mem_fraction"),
        "the smaller of the two is used",
        Severity.NOTE,
        "no",
        RUNTIME,
        conditions.cap_and_fraction,
    ),
    Rule(
        "static_batch",
        ("batch_scheduler_policy",),
        "static_batch is not for production",
        Severity.WARNING,
        "no",
        RUNTIME,
        conditions.static_batch,
    ),
    Rule(
        "attention_window",
        ("max_attention_window",),
        "not below the longest sequence",
        Severity.WARNING,
        "no",
        RUNTIME,
        conditions.attention_window,
    ),
)
"""Every rule between options."""


@dataclass
class Findings:
    """Messages of broken rules, by severity."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(context: RuleContext, rules: Iterable[Rule]) -> Findings:
    """Run rules on a context."""
    found = Findings()
    into: Mapping[Severity, list[Any]] = {
        Severity.ERROR: found.problems,
        Severity.WARNING: found.warnings,
        Severity.NOTE: found.notes,
    }
    for rule in rules:
        message = rule.broken(context) if rule.broken is not None else None
        if message is not None:
            into[rule.severity].append(message)
    return found


OPTION_RULES = tuple(rule for rule in RULES if rule.broken is not None and not rule.needs_model)
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
