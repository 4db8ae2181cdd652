from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from djl_trtllm.sizing.advice import warnings_of
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.estimate import GIB, MOST, Conditions, Estimate, LoraSlots, estimate
from djl_trtllm.sizing.gpus import gpu_named
from djl_trtllm.sizing.weights import weights_by_stage
from tests.sizing.configs import deepseek, gpt_oss, llama, nemotron_h, qwen3_32b_fp8

LLAMA = CheckpointSizes.from_config(llama())


def test_the_maximum_is_the_last_that_fits() -> None:
    found = estimate(LLAMA, Conditions(24 * GIB))
    most = found.max_num_tokens
    assert found.kv_tokens(most) >= found.longest(most)
    assert found.kv_tokens(most + 1) < found.longest(most + 1)
    assert found.recommended == most // 2


def test_what_is_left_is_the_caches() -> None:
    found = estimate(LLAMA, Conditions(80 * GIB, fraction=0.5))
    used = found.weights + found.logits + found.communication + found.overhead + found.activations(1000)
    assert found.kv_bytes(1000) == (80 * GIB - used) // 2
    assert found.kv_tokens(1000) == found.kv_bytes(1000) // (128 * 1024)
    assert found.sequences_of(4096, 1000) == found.kv_tokens(1000) // 4096


def test_the_recommended_number_is_at_most_16384() -> None:
    found = estimate(LLAMA, Conditions(80 * GIB))
    assert found.max_num_tokens > 2 * MOST
    assert found.recommended == MOST
    assert found.sequences_of(4096) == found.sequences_of(4096, MOST)


def test_limits_are_widened_as_the_document_says() -> None:
    wide = estimate(LLAMA, Conditions(80 * GIB, max_batch_size=512, max_input_len=32_000))
    assert wide.limits == {
        "max_num_tokens": MOST,
        "max_input_len": 32_000,
        "max_output_len": 4096,
        "max_rolling_batch_size": 512,
    }
    narrow = estimate(LLAMA, Conditions(int(20 * GIB), max_batch_size=16))
    assert narrow.limits["max_input_len"] == narrow.limits["max_output_len"] == narrow.recommended < 4096
    assert narrow.limits["max_rolling_batch_size"] == 256


def test_the_batch_is_what_fits_and_what_buffers_are_for() -> None:
    found = estimate(LLAMA, Conditions(80 * GIB, max_batch_size=32))
    assert found.sequences_of(1024) > 32
    assert found.batch_size(1024) == 32
    assert found.batch_size(100_000) == found.sequences_of(100_000) < 32


def test_a_draft_model_and_adapters_take_memory_of_their_own() -> None:
    alone = estimate(LLAMA, Conditions(80 * GIB))
    draft = CheckpointSizes.from_config(llama(num_hidden_layers=2))
    assert estimate(LLAMA, Conditions(80 * GIB, draft=draft)).weights == alone.weights + draft.bytes
    adapted = estimate(LLAMA, Conditions(80 * GIB, lora=LoraSlots()))
    assert adapted.weights == alone.weights + adapted.lora
    assert adapted.lora > 0
    shared = estimate(LLAMA, Conditions(80 * GIB, lora=LoraSlots(adapters=0, free_share=0.25)))
    assert shared.lora == 0
    assert shared.kv_bytes(1000) == pytest.approx(alone.kv_bytes(1000) * 0.75, abs=2)


def test_a_state_leaves_less_for_the_keys_of_each_sequence() -> None:
    found = estimate(CheckpointSizes.from_config(nemotron_h()), Conditions(80 * GIB))
    assert found.state_bytes_per_sequence == 2 * 25_903_104
    each = 1000 * found.kv_bytes_per_token + found.state_bytes_per_sequence
    assert found.sequences_of(1000) == found.kv_bytes(found.recommended) // each


def test_a_pure_mamba_model_has_no_tokens_but_sequences() -> None:
    mamba = CheckpointSizes.from_config(llama(model_type="mamba2", mamba_d_state=128))
    found = estimate(mamba, Conditions(80 * GIB))
    assert found.kv_tokens(1024) == 0
    assert found.sequences_of(10**6) == found.sequences_of(1) > 0


def test_the_stage_with_least_left_decides() -> None:
    # Mistral Large: 88 layers on 3 stages, of which the first has 30 and the embedding.
    sizes = CheckpointSizes.from_config(llama(num_hidden_layers=88))
    one = estimate(sizes, Conditions(48 * GIB, pipeline_parallel=3))
    assert one.kv_bytes_per_token == 30 * 4096
    assert one.kv_tokens(1024) <= one.kv_bytes(1024) // one.kv_bytes_per_token


DATA: dict[str, Any] = json.loads((Path(__file__).parent / "kv_capacity.json").read_text(encoding="utf-8"))
MODELS = {
    "Llama-3.1-8B": CheckpointSizes.from_config(llama()),
    "Qwen3-32B-FP8": CheckpointSizes.from_config(qwen3_32b_fp8()),
}


def capacity_errors(gpu: str) -> list[float]:
    errors = []
    for where, model, ranks, inputs, outputs, fraction, sequences in DATA["rows"]:
        if where == gpu:
            conditions = Conditions(
                gpu_named(gpu).memory, ranks, kv_dtype="bfloat16", fraction=fraction, backend="pytorch"
            )
            # The measurements reserved 1,000 tokens more per sequence (see the file's `source`).
            found = estimate(MODELS[model], conditions).sequences_of(inputs + outputs + 1000, 2 * inputs)
            errors.append(abs(found / sequences - 1))
    return errors


def test_capacities_are_those_that_were_measured() -> None:
    h100, gb300 = capacity_errors("H100"), capacity_errors("GB300")
    assert (len(h100), len(gb300)) == (24, 48)
    assert sum(error <= 0.05 for error in h100) >= 20
    assert sum(error <= 0.05 for error in h100 + gb300) >= 66
    assert max(h100 + gb300) <= 0.08


CONFIGS = st.builds(
    llama,
    num_hidden_layers=st.integers(1, 120),
    hidden_size=st.sampled_from([512, 2048, 4096, 8192]),
    intermediate_size=st.integers(512, 60_000),
    num_attention_heads=st.sampled_from([8, 32, 64]),
    num_key_value_heads=st.sampled_from([1, 2, 8, 32]),
    vocab_size=st.integers(256, 300_000),
    tie_word_embeddings=st.booleans(),
    num_local_experts=st.sampled_from([0, 8]),
)
OTHERS = st.sampled_from([deepseek(num_hidden_layers=8, n_routed_experts=16), gpt_oss(), nemotron_h()])
CONDITIONS = st.builds(
    Conditions,
    gpu_memory=st.integers(1, 300 * GIB),
    tensor_parallel=st.sampled_from([1, 2, 4, 8, 16]),
    pipeline_parallel=st.integers(1, 4),
    quantization=st.sampled_from([None, "fp8", "awq", "nvfp4"]),
    kv_dtype=st.sampled_from([None, "fp8", "nvfp4", "int8"]),
    fraction=st.floats(0.05, 1),
    max_batch_size=st.integers(1, 1024),
    max_input_len=st.none() | st.integers(1, 100_000),
    attention_windows=st.sampled_from([None, (128, 4096)]),
    backend=st.sampled_from(["tensorrt", "pytorch"]),
)


def figures(found: Estimate, tokens: int, length: int) -> tuple[int, ...]:
    return found.kv_tokens(tokens), found.sequences_of(length, tokens), found.kv_bytes(tokens)


@settings(max_examples=80, deadline=None)
@given(CONFIGS | OTHERS, CONDITIONS, st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 10**5))
def test_more_max_num_tokens_never_gives_more_cache(
    config: dict[str, Any], conditions: Conditions, tokens: int, more: int, length: int
) -> None:
    found = estimate(CheckpointSizes.from_config(config), conditions)
    fewer = figures(found, tokens + more, length)
    assert all(few <= many for few, many in zip(fewer, figures(found, tokens, length), strict=True))
    most = found.max_num_tokens
    assert most == 0 or found.sequences_of(found.longest(most), most) >= 1


@settings(max_examples=80, deadline=None)
@given(CONFIGS | OTHERS, CONDITIONS, st.integers(0, 300 * GIB), st.integers(0, 10**6), st.integers(1, 10**5))
def test_more_memory_never_gives_less(
    config: dict[str, Any], conditions: Conditions, more: int, tokens: int, length: int
) -> None:
    sizes = CheckpointSizes.from_config(config)
    small = estimate(sizes, conditions)
    large = estimate(sizes, replace(conditions, gpu_memory=conditions.gpu_memory + more))
    pairs = zip(figures(small, tokens, length), figures(large, tokens, length), strict=True)
    assert all(few <= many for few, many in pairs)
    assert small.max_num_tokens <= large.max_num_tokens
    assert small.recommended <= large.recommended
    assert small.weights == large.weights


@pytest.mark.parametrize("backend", ["tensorrt", "pytorch"])
def test_more_ranks_never_hold_more_weights_each(backend: Any) -> None:
    held = [estimate(LLAMA, Conditions(GIB, ranks, backend=backend)).weights for ranks in (1, 2, 4, 8, 16)]
    assert held == sorted(held, reverse=True)


def test_the_weights_are_those_of_the_stage_with_most() -> None:
    stages = weights_by_stage(LLAMA, Conditions(GIB, pipeline_parallel=3))
    assert estimate(LLAMA, Conditions(GIB, pipeline_parallel=3)).weights == max(stages) > min(stages)


def test_the_longest_sequence_has_twice_the_number_up_to_what_limits_are_widened_to() -> None:
    found = estimate(LLAMA, Conditions(80 * GIB))
    assert (found.longest(100), found.longest(10_000)) == (200, 8192)


def test_pytorchs_allocator_keeps_a_part_of_the_cache() -> None:
    found = estimate(LLAMA, Conditions(80 * GIB, fraction=0.5, backend="pytorch"))
    left = 80 * GIB - found.weights - found.communication - found.overhead - found.activations(512)
    assert found.kv_bytes(512) == int(left * 0.5 * (1 - 0.015))


def test_an_estimate_has_its_warnings() -> None:
    found = estimate(LLAMA, Conditions(8 * GIB))
    assert found.warnings == warnings_of(found) != ()
