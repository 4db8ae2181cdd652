from __future__ import annotations

from djl_trtllm.sizing.layer_caches import LayerCache, layer_caches
from tests.sizing.configs import deepseek, llama


def test_grouped_heads_keep_a_key_and_a_value_each() -> None:
    layers = layer_caches(llama())
    assert layers == (LayerCache("attention", 8, 128),) * 32
    assert sum(layer.per_token(1) for layer in layers) * 2 == 128 * 1024


def test_a_rank_has_at_least_one_head() -> None:
    assert [LayerCache("attention", 8, 128).per_token(ranks) for ranks in (1, 4, 8, 16)] == [2048, 512, 256, 256]


def test_latent_attention_keeps_one_vector_of_576_on_every_rank() -> None:
    layers = layer_caches(deepseek())
    assert [layers[0].per_token(ranks) for ranks in (1, 8)] == [576, 576]
