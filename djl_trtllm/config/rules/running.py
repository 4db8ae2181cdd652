"""Rules about what an engine does with options: checked with the values that the chosen backend runs with.

An option that has no effect there, or always the same one, breaks none of these rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from djl_trtllm.config.configuration import Config
from djl_trtllm.config.options.choices import SchedulerPolicy
from djl_trtllm.config.options.documents import RUNTIME, TRTLLM
from djl_trtllm.config.rules.context import RuleContext, context_of
from djl_trtllm.config.rules.rule import Rule, Severity, adder, check

RUNNING_RULES: list[Rule] = []

_rule = adder(RUNNING_RULES)


@_rule(
    ("max_num_tokens", "max_input_len", "enable_chunked_prefill"),
    "max_num_tokens at least max_input_len, without chunked prefill",
    Severity.WARNING,
    "no; OpenVINO always splits prompts",
    TRTLLM,
)
def max_num_tokens_holds_a_prompt(context: RuleContext) -> str | None:
    tokens, longest = context.value("max_num_tokens"), context.value("max_input_len")
    if tokens is None or tokens >= longest or context.value("enable_chunked_prefill"):
        return None
    return (
        f"{context.formatted('max_num_tokens')} is below {context.formatted('max_input_len')}: TensorRT-LLM refuses "
        f"prompts of more than {tokens} tokens although up to {longest} are allowed; set "
        f"option.enable_chunked_prefill=true, or option.max_num_tokens={longest}"
    )


@_rule(("batch_scheduler_policy",), "static_batch is not for production", Severity.WARNING, "no", RUNTIME)
def static_batch(context: RuleContext) -> str | None:
    if context.value("batch_scheduler_policy") is not SchedulerPolicy.STATIC_BATCH:
        return None
    return (
        f"{context.formatted('batch_scheduler_policy')} finishes a whole batch before the next one begins, a legacy "
        "mode that is not for production; write max_utilization or guaranteed_no_evict"
    )


@_rule(("max_attention_window",), "not below the longest sequence", Severity.WARNING, "no", RUNTIME)
def attention_window(context: RuleContext) -> str | None:
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


def check_running(config: Config, value: Callable[[str], Any]) -> Config:
    """Run the rules, and return the configuration with their warnings and notes.

    `value` is what the backend makes of an option, by its field.
    """
    found = check(replace(context_of(config, None, None), value=value), RUNNING_RULES)
    if not found.warnings and not found.notes:
        return config
    return replace(config, warnings=(*config.warnings, *found.warnings), notes=(*config.notes, *found.notes))
