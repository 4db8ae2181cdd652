from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.config.options.registry import OPTIONS
from djl_trtllm.config.rules.rule import Severity
from djl_trtllm.config.rules.running import RUNNING_RULES
from djl_trtllm.config.rules.table import MODEL_RULES, OPTION_RULES, RULES, check_model
from djl_trtllm.errors import ConfigError
from tests.config.helpers import from_text

# Options alone break a rule that warns and one that notes.
NOTE = "option.max_tokens_in_paged_kv_cache=9 (serving.properties:2) and option.free_gpu_memory_fraction=0.5"
TEXT = "option.smoothquant_alpha=0.5\noption.max_tokens_in_paged_kv_cache=9\noption.free_gpu_memory_fraction=0.5\n"


def begins(lines: tuple[str, ...], *beginnings: str) -> bool:
    return len(lines) == len(beginnings) and all(map(str.startswith, lines, beginnings))


def test_every_rule_names_options_says_whether_it_is_lifted_and_where_it_stands() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES) > 15
    assert [rule.name for rule in RULES for name in rule.options if name not in OPTIONS] == []
    assert [rule.name for rule in RULES if not (rule.options and rule.document and rule.condition)] == []
    lifted = {rule.name: rule.lifted.split(":")[0].split(";")[0] for rule in RULES}
    assert {name: text for name, text in lifted.items() if text not in ("yes", "no", "in part")} == {}


def test_the_page_shows_the_rules_as_they_are() -> None:
    page = (Path(__file__).parents[3] / "docs" / "options" / "rules.md").read_text(encoding="utf-8")
    cells = [(f"`{OPTIONS[rule.options[-1]].key}`", rule.condition, rule.severity.value, rule.lifted) for rule in RULES]
    lines = page.splitlines()
    lacking = [
        (key, *rest)
        for key, *rest in cells
        if not any(key in line and f" | {' | '.join(rest)} | " in line for line in lines)
    ]
    assert lacking == []


def test_what_is_refused_and_what_waits_for_the_model() -> None:
    assert {rule.name for rule in RULES if rule.severity is Severity.ERROR} == {
        "rotary_scaling_words",
        "rotary_scaling_range",
        "quantize_compiled",
        "memory_fraction_range",
    }
    assert [rule.name for rule in MODEL_RULES] == [
        "rotary_dim_family",
        "rotary_base_family",
        "use_fused_mlp_family",
        "multi_block_mode_family",
        "smoothquant_family",
        "awq_family",
        "quantize_compiled",
        "chatglm_version",
        "model_version_family",
    ]
    assert [rule.name for rule in OPTION_RULES] == [
        "engine_of_djl_serving",
        "rotary_scaling_pair",
        "smoothquant_parts",
        "awq_parts",
        "cap_and_fraction",
    ]


def test_a_rule_that_is_lifted_refuses_nothing() -> None:
    lifted = [rule for rule in RULES if rule.lifted.startswith("yes")]
    assert len(lifted) > 5
    assert [rule.name for rule in lifted if rule.severity is Severity.ERROR] == []


def test_a_rule_runs_once_with_the_options_the_model_or_the_engine() -> None:
    with_a_condition = [rule for rule in RULES if rule.broken is not None]
    assert sorted(with_a_condition, key=id) == sorted((*OPTION_RULES, *MODEL_RULES, *RUNNING_RULES), key=id)
    assert [rule.name for rule in OPTION_RULES if rule.needs_model] == []
    assert [rule.name for rule in MODEL_RULES if not rule.needs_model] == []
    assert len(OPTION_RULES) > 3 and len(MODEL_RULES) > 5


def test_what_the_model_breaks_is_added_to_what_was_reported_before() -> None:
    config = from_text(TEXT + "option.quantize=smoothquant\noption.rotary_dim=3\noption.multi_query_mode=true")
    assert len(config.warnings) == 1 and begins(config.notes, NOTE)
    checked = check_model(config, "falcon", False)
    assert checked.warnings[:1] == config.warnings and checked.notes[:1] == config.notes
    assert begins(checked.warnings[1:], "option.quantize=smoothquant (serving.properties:4) is documented for")
    assert begins(checked.notes[1:], "option.rotary_dim=3 (serving.properties:5) is documented for GPT-J only")
    assert checked.options == config.options and checked.origins == config.origins


def test_a_warning_or_a_note_of_the_model_alone_is_added_too() -> None:
    assert len(check_model(from_text("option.quantize=smoothquant"), "falcon", False).warnings) == 1
    assert len(check_model(from_text("option.quantize=awq"), "falcon", False).notes) == 1


def test_a_model_that_breaks_nothing_leaves_the_configuration_as_it_is() -> None:
    config = from_text(TEXT)
    assert check_model(config, "llama", False) is config


def test_a_refusal_tells_the_warnings_of_options_and_of_the_model_with_it() -> None:
    config = from_text("option.awq_format=int4_awq\noption.quantize=smoothquant")
    with pytest.raises(ConfigError) as caught:
        check_model(config, "falcon", True)
    quantize = "option.quantize=smoothquant (serving.properties:2)"
    assert begins(caught.value.problems, f"{quantize}: the model is a compiled engine")
    assert begins(
        caught.value.warnings,
        "option.awq_format=int4_awq (serving.properties:1) has no effect without option.quantize=awq",
        f"{quantize} is documented for Llama, Mistral",
    )
