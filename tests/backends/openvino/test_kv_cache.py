from __future__ import annotations

from dataclasses import replace

import pytest

from djl_trtllm.backends.openvino.kv_cache import KvCachePlan, block_bytes, blocks_of_sequence, plan_kv_cache
from djl_trtllm.config import Config
from djl_trtllm.errors import ConfigError
from djl_trtllm.model import ModelShape
from tests.engines.helpers import configured

SHAPE = ModelShape(num_layers=2, num_kv_heads=2, head_dim=16)
BLOCK = 2 * 2 * 2 * 16 * 2 * 32
ROOMY = 10**9
_FRACTION = "option.kv_cache_free_gpu_mem_fraction=0.5 (environment variable OPTION_KV_CACHE_FREE_GPU_MEM_FRACTION)"


def planned(config: Config, *, memory: int = ROOMY, sequences: int = 4, length: int = 256) -> KvCachePlan:
    return plan_kv_cache(config, SHAPE, max_seq_len=length, max_sequences=sequences, available_memory=memory)


def test_a_block_holds_keys_and_values_of_32_tokens_in_every_layer() -> None:
    assert block_bytes(SHAPE, "f16") == BLOCK
    assert block_bytes(SHAPE, "f32") == 2 * BLOCK
    assert block_bytes(SHAPE, "u8") == 2 * 2 * 2 * (16 + 8) * 32
    for unknown in ("num_layers", "num_kv_heads", "head_dim"):
        assert block_bytes(replace(SHAPE, **{unknown: None}), "f16") is None, unknown


def test_a_sequence_is_charged_one_block_more_than_it_fills() -> None:
    assert [blocks_of_sequence(tokens) for tokens in (1, 32, 33, 256)] == [2, 2, 3, 9]


def test_the_default_is_what_the_batch_needs() -> None:
    plan = planned(configured())
    assert plan == KvCachePlan(4 * 9, BLOCK, "f16", "4 sequences of 256 tokens")
    assert plan.longest_sequence >= 256


def test_the_default_takes_at_most_a_quarter_of_memory() -> None:
    assert planned(configured(), memory=4 * 20 * BLOCK).blocks == 20


def test_the_default_holds_at_least_one_whole_sequence() -> None:
    plan = planned(configured(), memory=20 * BLOCK)
    assert plan.blocks == 9
    assert plan.longest_sequence == 256


def test_each_step_of_the_default_is_taken_to_the_byte() -> None:
    assert planned(configured(), memory=4 * 36 * BLOCK).reason == "4 sequences of 256 tokens"
    assert planned(configured(), memory=4 * 36 * BLOCK - 4).reason == "a quarter of 1.2 MB available memory"
    assert planned(configured(), memory=4 * 9 * BLOCK).reason == "a quarter of 294.9 kB available memory"
    assert planned(configured(), memory=4 * 9 * BLOCK - 4).reason.startswith("one sequence of 256 tokens, more than a")
    assert planned(configured(), memory=9 * BLOCK).blocks == 9
    with pytest.raises(ConfigError, match=r"needs 73\.7 kB of KV cache and 73\.7 kB of memory are available"):
        planned(configured(), memory=9 * BLOCK - 1)


def test_what_is_asked_for_is_taken_to_the_byte() -> None:
    smallest = configured(max_tokens_in_paged_kv_cache=64)
    assert planned(smallest, memory=2 * BLOCK).blocks == 2
    with pytest.raises(ConfigError, match="of memory are available"):
        planned(smallest, memory=2 * BLOCK - 1)
    with pytest.raises(ConfigError, match="gives a KV cache of 1 blocks"):
        planned(configured(max_tokens_in_paged_kv_cache=63))


def test_less_memory_than_one_sequence_says_what_to_lower() -> None:
    with pytest.raises(ConfigError, match=r"needs 73\.7 kB .* lower option\.max_input_len=1024 \(default\) or"):
        planned(configured(), memory=8 * BLOCK)
    with pytest.raises(ConfigError, match=r"lower option\.max_seq_len=256 \(environment variable OPTION_MAX_SEQ_LEN\)"):
        planned(configured(max_seq_len=256), memory=8 * BLOCK)


def test_a_number_of_tokens_is_kept_to() -> None:
    plan = planned(configured(max_tokens_in_paged_kv_cache=1000))
    assert plan.blocks == 31
    assert plan.reason == (
        "option.max_tokens_in_paged_kv_cache=1000 (environment variable OPTION_MAX_TOKENS_IN_PAGED_KV_CACHE)"
    )


def test_a_fraction_is_of_available_memory() -> None:
    plan = planned(configured(kv_cache_free_gpu_mem_fraction=0.5), memory=72 * BLOCK)
    assert (plan.blocks, plan.reason) == (36, _FRACTION)


def test_a_fraction_is_cut_to_what_the_batch_can_use() -> None:
    plan = planned(configured(kv_cache_free_gpu_mem_fraction=0.5), memory=74 * BLOCK)
    assert plan.blocks == 4 * 9
    assert plan.reason == f"4 sequences of 256 tokens use no more, of 37 blocks that {_FRACTION} allows"


def test_a_cache_that_keeps_finished_prompts_can_use_all_of_a_fraction() -> None:
    config = configured(kv_cache_free_gpu_mem_fraction=0.5, enable_kv_cache_reuse="true")
    assert planned(config, memory=100 * BLOCK).blocks == 50


def test_a_number_of_tokens_is_not_cut() -> None:
    assert planned(configured(max_tokens_in_paged_kv_cache=3200)).blocks == 100


@pytest.mark.parametrize(("tokens", "blocks"), [(640, 20), (6400, 36)])
def test_of_tokens_and_fraction_the_smaller_counts(tokens: int, blocks: int) -> None:
    config = configured(kv_cache_free_gpu_mem_fraction=0.5, max_tokens_in_paged_kv_cache=tokens)
    assert planned(config, memory=100 * BLOCK).blocks == blocks


def test_a_cache_in_which_nothing_fits_is_refused_with_key_value_and_origin() -> None:
    with pytest.raises(ConfigError) as caught:
        planned(configured(max_tokens_in_paged_kv_cache=40))
    assert caught.value.problems == (
        "option.max_tokens_in_paged_kv_cache=40 (environment variable OPTION_MAX_TOKENS_IN_PAGED_KV_CACHE) gives a KV "
        "cache of 1 blocks of 32 tokens, and no sequence fits in less than 2: expected at least 64 tokens",
    )


def test_a_cache_larger_than_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"OPTION_MAX_TOKENS_IN_PAGED_KV_CACHE\) needs 2\.6 MB of KV cache"):
        planned(configured(max_tokens_in_paged_kv_cache=10_000), memory=10**6)


@pytest.mark.parametrize(("asked", "precision"), [("auto", "f16"), ("fp16", "f16"), ("fp32", "f32"), ("int8", "u8")])
def test_the_precision_is_pinned_and_u8_only_when_asked(asked: str, precision: str) -> None:
    assert planned(configured(kv_cache_dtype=asked)).precision == precision


def test_a_model_of_unknown_shape_needs_the_number_of_tokens() -> None:
    def plan(config: Config) -> KvCachePlan:
        return plan_kv_cache(config, ModelShape(), max_seq_len=256, max_sequences=4, available_memory=ROOMY)

    with pytest.raises(ConfigError, match=r"option\.max_tokens_in_paged_kv_cache is not set, and .*config\.json"):
        plan(configured())
    assert plan(configured(max_tokens_in_paged_kv_cache=3200)).blocks == 100
