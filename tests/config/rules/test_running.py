"""Rules about what an engine does with options, by the name of the rule."""

from __future__ import annotations

from functools import partial
from typing import Any

from djl_trtllm.config import Config
from djl_trtllm.config.options.choices import SchedulerPolicy
from djl_trtllm.config.rules.running import RUNNING_RULES, check_running
from tests.config.helpers import from_text

PLACE = "(serving.properties:1)"


def running(text: str, **values: Any) -> Config:
    """Checked for an engine that does what the options say, except for `values`."""
    config = from_text(text)
    configured = partial(getattr, config.options)
    return check_running(config, lambda name: values[name] if name in values else configured(name))


def test_max_num_tokens_holds_a_prompt() -> None:
    text = "option.max_num_tokens=512\noption.max_input_len=2048"
    (warning,) = running(text).warnings
    assert warning.startswith(
        f"option.max_num_tokens=512 {PLACE} is below option.max_input_len=2048 (serving.properties:2): TensorRT-LLM "
        "refuses prompts of more than 512 tokens"
    )
    assert "option.enable_chunked_prefill=true, or option.max_num_tokens=2048" in warning
    assert running(f"{text}\noption.enable_chunked_prefill=true").warnings == ()
    assert running("option.max_num_tokens=512").warnings == ()


def test_static_batch() -> None:
    (warning,) = running("option.batch_scheduler_policy=STATIC_BATCH").warnings
    assert "a legacy mode that is not for production; write max_utilization or guaranteed_no_evict" in warning
    assert running("option.batch_scheduler_policy=guaranteed_no_evict").warnings == ()


def test_attention_window() -> None:
    (warning,) = running("option.max_attention_window=2048,512\noption.max_seq_len=2048").warnings
    assert warning.startswith(
        f"option.max_attention_window=2048,512 {PLACE} is below the longest sequence of 2048 tokens "
        "(option.max_seq_len=2048 (serving.properties:2)): of longer sequences only the last 512 tokens"
    )
    (warning,) = running("option.max_attention_window_size=1000").warnings
    assert "of 1536 tokens (option.max_input_len=1024 (default) plus option.max_output_len=512 (default))" in warning
    assert running("option.max_attention_window=2048\noption.max_seq_len=2048").warnings == ()


def test_what_the_backend_makes_of_an_option_counts_and_not_what_is_written() -> None:
    text = (
        "option.batch_scheduler_policy=static_batch\noption.max_attention_window=8\n"
        "option.max_num_tokens=512\noption.max_input_len=2048"
    )
    assert len(running(text).warnings) == len(RUNNING_RULES)
    policy = SchedulerPolicy.GUARANTEED_NO_EVICT
    other = running(text, batch_scheduler_policy=policy, max_attention_window=None, enable_chunked_prefill=True)
    assert other.warnings == ()


def test_every_rule_has_its_test() -> None:
    assert len(RUNNING_RULES) > 2
    assert [rule.name for rule in RUNNING_RULES if f"test_{rule.name}" not in globals()] == []


def test_a_configuration_that_breaks_nothing_stays_as_it_is() -> None:
    config = from_text("option.max_num_tokens=8192")
    assert check_running(config, partial(getattr, config.options)) is config
