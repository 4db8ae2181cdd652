from __future__ import annotations

from djl_trtllm.config import Config, parse_properties, resolve
from djl_trtllm.config.derive import Draft
from djl_trtllm.config.masking import MASK
from djl_trtllm.config.rules.context import context_of, context_of_draft
from djl_trtllm.config.sources.origin import Origin
from djl_trtllm.config.sources.properties import Setting


def a_draft() -> Draft:
    """`free_gpu_memory_fraction=0.5` by the user, and a limit that a rule raised."""
    draft = Draft()
    name = "option.free_gpu_memory_fraction"
    draft.chosen["kv_cache_free_gpu_mem_fraction"] = Setting(name, "0.50", Origin.file("f", 3), name)
    draft.values["kv_cache_free_gpu_mem_fraction"] = 0.5
    draft.chosen["max_input_len"] = Setting("option.max_input_len", "7", Origin.file("f", 4), "option.max_input_len")
    draft.derive("max_input_len", 4096, "a rule")
    return draft


def test_of_a_draft_what_the_user_wrote_is_cited() -> None:
    context = context_of_draft(a_draft())
    name = "kv_cache_free_gpu_mem_fraction"
    assert (context.value(name), context.is_set(name)) == (0.5, True)
    assert context.formatted(name) == "option.free_gpu_memory_fraction=0.50 (f:3)"
    assert context.wrote(name) == "option.free_gpu_memory_fraction"


def test_of_a_draft_what_a_rule_changed_is_cited_with_the_rule() -> None:
    context = context_of_draft(a_draft())
    assert context.value("max_input_len") == 4096
    assert context.formatted("max_input_len") == "option.max_input_len=4096 (derived from a rule)"


def test_of_a_draft_what_is_not_set_is_the_default() -> None:
    context = context_of_draft(a_draft())
    assert (context.value("max_output_len"), context.is_set("max_output_len")) == (512, False)
    assert context.formatted("max_output_len") == "option.max_output_len=512 (default)"
    assert context.formatted("max_num_tokens") == "option.max_num_tokens=none (default)"
    assert context.wrote("max_output_len") == "option.max_output_len"
    assert (context.model_type, context.is_engine, context.compiled_as) == (None, None, None)


def a_config() -> Config:
    text = "option.free_gpu_memory_fraction=0.5\noption.env=A=hunter2\noption.model_id=https://me:hunter2@host/m"
    return resolve([parse_properties(text, "f")])


def test_of_a_configuration_the_key_and_the_value_are_cited() -> None:
    context = context_of(a_config(), "llama", True, "awq")
    name = "kv_cache_free_gpu_mem_fraction"
    assert (context.value(name), context.is_set(name), context.is_set("max_input_len")) == (0.5, True, False)
    assert context.formatted(name) == "option.kv_cache_free_gpu_mem_fraction=0.5 (f:1)"
    assert context.wrote(name) == "option.kv_cache_free_gpu_mem_fraction"
    assert (context.model_type, context.is_engine, context.compiled_as) == ("llama", True, "awq")


def test_secrets_are_cited_masked() -> None:
    context = context_of(a_config(), None, None)
    assert context.formatted("env") == f"option.env=A={MASK} (f:2)"
    assert context.formatted("model_id") == f"option.model_id=https://{MASK}@host/m (f:3)"
    replaced = a_config().replace(Origin.override("HF_TOKEN=hunter2"), port=1)
    assert "hunter2" not in context_of(replaced, None, None).formatted("port")
