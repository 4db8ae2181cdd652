from __future__ import annotations

import pytest

from djl_trtllm.config.options.registry import OPTIONS, find, suggest


def test_every_spelling_finds_its_option_only() -> None:
    assert sum(len(declared.option.aliases) for declared in OPTIONS.values()) > 50
    assert [
        spelling for declared in OPTIONS.values() for spelling in declared.spellings if find(spelling) is not declared
    ] == []


def test_names_of_other_releases_find_the_option() -> None:
    reuse = OPTIONS["enable_kv_cache_reuse"]
    assert reuse.spellings[0] == reuse.key == "option.enable_kv_cache_reuse"
    for spelling in ("option.enable_prefix_caching", "option.enable_block_reuse", "option.enable_kv_cache_reuse"):
        assert spelling in reuse.spellings and find(spelling) is reuse
    assert find("option.nonsense") is None and find("enable_kv_cache_reuse") is None


def test_an_option_has_a_key_its_spellings_an_example_an_expectation_and_a_group() -> None:
    declared = OPTIONS["max_rolling_batch_size"]
    assert declared.spellings == (declared.key,) == ("option.max_rolling_batch_size",)
    assert (declared.default, declared.example) == (32, "32")
    assert declared.expectation == "a whole number (sequences), at least 1"
    assert declared.group
    assert OPTIONS["max_num_tokens"].default is None
    assert OPTIONS["max_num_tokens"].example == OPTIONS["max_num_tokens"].option.example != ""


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("option.max_rolling_batch_sise", "option.max_rolling_batch_size"),
        ("tensor_parallel_degree", "option.tensor_parallel_degree"),
        ("option.job_queue_size", "job_queue_size"),
        ("option.MODELNAME", "option.modelName"),
        ("option.max-input-len", "option.max_input_len"),
        ("JOB-QUEUE-SIZE", "job_queue_size"),
        ("max-input-len", "option.max_input_len"),
        ("option.max_num_tokenz", "option.max_num_tokens"),
        ("zzz", None),
        ("", None),
        ("option.frobnicate", None),
    ],
)
def test_suggestions(key: str, suggestion: str | None) -> None:
    assert suggest(key) == suggestion
