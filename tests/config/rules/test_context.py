from __future__ import annotations

from djl_trtllm.config import Config, parse_properties, resolve
from djl_trtllm.config.derive import Draft
from djl_trtllm.config.masking import MASK
from djl_trtllm.config.rules.context import subject_of, subject_of_draft
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
    subject = subject_of_draft(a_draft())
    name = "kv_cache_free_gpu_mem_fraction"
    assert (subject.value(name), subject.is_set(name)) == (0.5, True)
    assert subject.cited(name) == "option.free_gpu_memory_fraction=0.50 (f:3)"
    assert subject.wrote(name) == "option.free_gpu_memory_fraction"


def test_of_a_draft_what_a_rule_changed_is_cited_with_the_rule() -> None:
    subject = subject_of_draft(a_draft())
    assert subject.value("max_input_len") == 4096
    assert subject.cited("max_input_len") == "option.max_input_len=4096 (derived from a rule)"


def test_of_a_draft_what_is_not_set_is_the_default() -> None:
    subject = subject_of_draft(a_draft())
    assert (subject.value("max_output_len"), subject.is_set("max_output_len")) == (512, False)
    assert subject.cited("max_output_len") == "option.max_output_len=512 (default)"
    assert subject.cited("max_num_tokens") == "option.max_num_tokens=none (default)"
    assert subject.wrote("max_output_len") == "option.max_output_len"
    assert (subject.model_type, subject.is_engine, subject.compiled_as) == (None, None, None)


def a_config() -> Config:
    text = "option.free_gpu_memory_fraction=0.5\noption.env=A=hunter2\noption.model_id=https://me:hunter2@host/m"
    return resolve([parse_properties(text, "f")])


def test_of_a_configuration_the_key_and_the_value_are_cited() -> None:
    subject = subject_of(a_config(), "llama", True, "awq")
    name = "kv_cache_free_gpu_mem_fraction"
    assert (subject.value(name), subject.is_set(name), subject.is_set("max_input_len")) == (0.5, True, False)
    assert subject.cited(name) == "option.kv_cache_free_gpu_mem_fraction=0.5 (f:1)"
    assert subject.wrote(name) == "option.kv_cache_free_gpu_mem_fraction"
    assert (subject.model_type, subject.is_engine, subject.compiled_as) == ("llama", True, "awq")


def test_secrets_are_cited_masked() -> None:
    subject = subject_of(a_config(), None, None)
    assert subject.cited("env") == f"option.env=A={MASK} (f:2)"
    assert subject.cited("model_id") == f"option.model_id=https://{MASK}@host/m (f:3)"
    replaced = a_config().replace(Origin.override("HF_TOKEN=hunter2"), port=1)
    assert "hunter2" not in subject_of(replaced, None, None).cited("port")
