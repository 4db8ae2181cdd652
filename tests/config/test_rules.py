"""Rules between options: a table of what breaks and what keeps each, then what holds of all."""

from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.config import Config
from djl_trtllm.config.options import OPTIONS
from djl_trtllm.config.options.choices import Backend, SchedulerPolicy
from djl_trtllm.config.rules import RULES, RuleContext, Severity, When, check_model, check_running
from djl_trtllm.config.sources import MASK, Origin
from djl_trtllm.errors import ConfigError
from tests.config.helpers import from_text
from tests.support.tables import table

PLACE = "(serving.properties:1)"
CASES: list[tuple[str, str, str, list[str] | None]] = table(__file__, "rules")
"""Rule, options (";" ends a line), model ("!" for a compiled engine), parts of the message (None: the rule holds)."""


def lines_of(text: str) -> str:
    return text.replace(";", "\n")


def running(config: Config, **values: Any) -> Config:
    """Check a configuration for an engine that does what the options say, except for `values`."""
    return check_running(config, lambda name: values[name] if name in values else getattr(config.options, name))


def found(text: str, model: str) -> dict[Severity, list[str]]:
    """The messages about these options with this model on an engine that runs with them."""
    kind, engine, compiled_as = model.partition("!")
    try:
        config = from_text(lines_of(text))
        config = running(check_model(config, kind or None, bool(engine), compiled_as=compiled_as or None))
    except ConfigError as error:
        return {Severity.ERROR: list(error.problems), Severity.WARNING: list(error.warnings), Severity.NOTE: []}
    return {Severity.ERROR: [], Severity.WARNING: list(config.warnings), Severity.NOTE: list(config.notes)}


@pytest.mark.parametrize(("name", "text", "model", "parts"), CASES)
def test_a_rule_is_broken_or_holds(name: str, text: str, model: str, parts: list[str] | None) -> None:
    (rule,) = (rule for rule in RULES if rule.name == name)
    messages = found(text, model)
    if parts is None:
        everywhere = [line for lines in messages.values() for line in lines]
        others = [own for own in CASES if own[0] == name and own[3] is not None]
        assert not any(
            all(part.format(place=PLACE) in line for part in own[3] or ()) for own in others for line in everywhere
        )
        return
    told = [line for line in messages[rule.severity] if all(part.format(place=PLACE) in line for part in parts)]
    assert len(told) == 1, messages


def test_every_rule_is_broken_and_kept_by_a_case() -> None:
    assert {name for name, _, _, parts in CASES if parts} == {rule.name for rule in RULES}
    assert {name for name, _, _, parts in CASES if parts is None} >= {rule.name for rule in RULES if rule.broken}


def test_every_rule_names_options_whether_it_is_lifted_and_where_it_stands() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES) > 15
    assert [rule.name for rule in RULES for name in rule.options if name not in OPTIONS] == []
    assert [rule.name for rule in RULES if not (rule.options and rule.document and rule.condition)] == []
    lifted = {rule.name: rule.lifted.split(":")[0].split(";")[0] for rule in RULES}
    assert set(lifted.values()) == {"yes", "no", "in part"}
    # A rule that is lifted refuses nothing.
    assert [rule.name for rule in RULES if lifted[rule.name] == "yes" and rule.severity is Severity.ERROR] == []


def test_options_alone_break_no_rule_about_a_model_or_an_engine() -> None:
    for name, text, _, parts in CASES:
        (when,) = (rule.when for rule in RULES if rule.name == name)
        if when is not When.OPTIONS and parts:
            assert (from_text(lines_of(text)).warnings, from_text(lines_of(text)).notes) == ((), ())


def test_what_a_model_breaks_is_added_to_what_was_reported_before() -> None:
    text = "option.smoothquant_alpha=0.5;option.max_tokens=9;option.free_gpu_memory_fraction=0.5;"
    config = from_text(lines_of(f"{text}option.rotary_dim=3;option.quant_algo=W4A16_AWQ"))
    assert (len(config.warnings), len(config.notes)) == (1, 1)
    checked = check_model(config, "falcon", False)
    assert checked.warnings == config.warnings and checked.notes[:1] == config.notes and len(checked.notes) == 3
    assert (checked.options, checked.origins) == (config.options, config.origins)
    assert check_model(config, None, False) is config and running(config) is config


def test_a_refusal_has_the_warnings_of_options_and_of_the_model_with_it() -> None:
    config = from_text("option.awq_format=int4_awq\noption.quantize=smoothquant")
    with pytest.raises(ConfigError) as caught:
        check_model(config, "falcon", True)
    (problem,), (of_options, of_model) = caught.value.problems, caught.value.warnings
    assert problem.startswith("option.quantize=smoothquant (serving.properties:2)")
    assert (of_options.split()[0], of_model.split()[0]) == ("option.awq_format=int4_awq", "option.quantize=smoothquant")


def test_what_the_engine_makes_of_an_option_counts_and_not_what_is_written() -> None:
    text = "option.batch_scheduler_policy=static_batch;option.max_attention_window=8;option.max_num_tokens=512;"
    config = from_text(lines_of(f"{text}option.max_input_len=2048;option.rolling_batch=trtllm"))
    assert len(running(config).warnings) == sum(rule.when is When.RUNNING for rule in RULES)
    policy = SchedulerPolicy.GUARANTEED_NO_EVICT
    other = {"batch_scheduler_policy": policy, "max_attention_window": None, "enable_chunked_prefill": True}
    assert running(config, **other, backend=Backend.PYTORCH) is config


def test_the_context_of_a_configuration_names_values_by_key_and_masks_secrets() -> None:
    text = "option.free_gpu_memory_fraction=0.50\noption.env=A=hunter2\noption.model_id=https://me:hunter2@host/m"
    config = from_text(text).replace(Origin.override("HF_TOKEN=hunter2"), port=1)
    context = RuleContext.of(config, model_type="llama", is_engine=True, compiled_as="awq")
    name = "kv_cache_free_gpu_mem_fraction"
    assert (context.value(name), context.is_set(name), context.is_set("max_input_len")) == (0.5, True, False)
    assert context.format_setting(name) == f"option.{name}=0.5 {PLACE}"
    assert context.written_name(name) == f"option.{name}"
    assert context.format_setting("env") == f"option.env=A={MASK} (serving.properties:2)"
    assert context.format_setting("quantize") == "option.quantize=none (default)"
    assert "hunter2" not in "".join(map(context.format_setting, ("model_id", "port")))
    assert (context.model_type, context.is_engine, context.compiled_as) == ("llama", True, "awq")
