from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.conditions import Conditions
from djl_trtllm.sizing.kv_cache import model_windows, stage_caches
from djl_trtllm.sizing.layer_caches import LayerCache
from tests.sizing.configs import deepseek, gemma3, gpt_oss, llama, nemotron_h

KIB = 1024


def per_token(config: dict[str, Any], **conditions: Any) -> int:
    return max(
        cache.per_token for cache in stage_caches(CheckpointSizes.from_config(config), Conditions(1, **conditions))
    )


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        # TensorRT-LLM in bf16 on one GPU: Llama 3 8B, Llama 2 7B, 2 13B, 3 70B, Qwen2.5 7B
        ({}, 128),
        ({"num_key_value_heads": 32}, 512),
        ({"num_hidden_layers": 40, "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 40}, 800),
        ({"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64}, 320),
        ({"num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}, 56),
    ],
)
def test_bytes_per_token_are_those_of_tensorrt_llm(changes: dict[str, Any], size: int) -> None:
    assert per_token(llama(**changes)) == size * KIB


@pytest.mark.parametrize(
    ("conditions", "size"),
    [
        ({"tensor_parallel": 4}, 32),
        ({"tensor_parallel": 16}, 16),
        ({"pipeline_parallel": 4}, 32),
        ({"kv_dtype": "fp8"}, 64),
        ({"kv_dtype": "int8"}, 64),
        ({"kv_dtype": "nvfp4"}, 36),
        ({"kv_dtype": "auto"}, 128),
        ({"dtype": "float32"}, 256),
    ],
)
def test_division_and_type_change_the_bytes_per_token(conditions: dict[str, Any], size: int) -> None:
    assert per_token(llama(), **conditions) == size * KIB


def test_a_checkpoint_can_ask_for_a_type() -> None:
    sizes = replace(CheckpointSizes.from_config(llama()), kv_quantization="FP8")
    assert stage_caches(sizes, Conditions(1))[0].per_token == 64 * KIB
    assert stage_caches(sizes, Conditions(1, kv_dtype="bfloat16"))[0].per_token == 128 * KIB


def test_latent_attention_takes_576_elements_per_layer_on_any_number_of_ranks() -> None:
    assert per_token(deepseek()) == per_token(deepseek(), tensor_parallel=8) == 61 * 576 * 2


def test_a_draft_model_has_a_cache_beside_the_model() -> None:
    draft = CheckpointSizes.from_config(llama(num_hidden_layers=4))
    assert per_token(llama(), draft=draft) == 144 * KIB


def test_layers_with_a_window_keep_whole_sequences_unless_the_option_says_otherwise() -> None:
    sizes = CheckpointSizes.from_config(gpt_oss())
    layer = 2 * 8 * 64 * 2
    whole = stage_caches(sizes, Conditions(1))[0]
    assert whole.sequence(1000) == 24 * 1000 * layer
    kept = stage_caches(sizes, Conditions(1, attention_windows=(128, 4096)))[0]
    assert kept.sequence(1000) == 12 * (128 + 1000) * layer
    assert kept.sequence(100) == 24 * 100 * layer
    assert kept.per_token == whole.per_token


def test_the_windows_of_a_model_are_a_value_for_the_option() -> None:
    sizes = CheckpointSizes.from_config(gemma3())
    windows = model_windows(sizes)
    assert windows[:6] == (1024, 1024, 1024, 1024, 1024, 0)
    cache = stage_caches(sizes, Conditions(1, attention_windows=windows))[0]
    assert cache.sequence(10_000) == (40 * 1024 + 8 * 10_000) * 2 * 8 * 256 * 2
    assert model_windows(CheckpointSizes.from_config(llama())) == ()


def test_mamba_layers_keep_a_state_per_sequence() -> None:
    cache = stage_caches(CheckpointSizes.from_config(nemotron_h()), Conditions(1))[0]
    assert cache.per_token == 4 * 2 * 8 * 128 * 2
    assert cache.state == 2 * 25_903_104
    assert cache.sequence(100) == 100 * cache.per_token + cache.state


def test_the_state_of_a_draft_model_is_beside_the_models_own() -> None:
    hybrid = CheckpointSizes.from_config(nemotron_h())
    (both,) = stage_caches(hybrid, Conditions(1, draft=hybrid))
    (one,) = stage_caches(hybrid, Conditions(1))
    assert (both.state, both.per_token) == (2 * one.state, 2 * one.per_token)


def test_only_layers_that_attend_have_windows() -> None:
    layers = (LayerCache("attention", 8, 64, 128), LayerCache("state", state=8), LayerCache("latent", 1, 576, 64))
    sizes = replace(CheckpointSizes.from_config(llama()), layers=layers)
    assert model_windows(sizes) == (128, 64)
