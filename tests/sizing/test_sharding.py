from __future__ import annotations

import pytest

from djl_trtllm.sizing.sharding import Division, group_of, layer_of
from djl_trtllm.sizing.tensors import Tensor


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("model.layers.3.self_attn.k_proj.weight", "key_value"),
        ("transformer.h.3.self_attention.query_key_value.weight", "fused"),
        ("model.layers.3.mlp.gate.weight", "replicated"),
        ("model.layers.3.mlp.gate_proj.weight", "matrix"),
        ("model.layers.3.mlp.experts.7.up_proj.weight", "expert"),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", "replicated"),
        ("vision_tower.encoder.layers.3.self_attn.k_proj.weight", "replicated"),
    ],
)
def test_the_name_says_how_a_tensor_is_divided(name: str, group: str) -> None:
    assert group_of(Tensor(name, "BF16", (8, 8))) == group


def test_vectors_are_on_every_rank() -> None:
    assert group_of(Tensor("model.layers.3.input_layernorm.weight", "BF16", (8,))) == "replicated"


def test_the_layer_is_the_number_in_the_name() -> None:
    assert layer_of(Tensor("transformer.h.13.ln_1.weight", "F16", (8,))) == 13
    assert layer_of(Tensor("vision_tower.layers.13.ln_1.weight", "F16", (8,))) is None
    assert layer_of(Tensor("lm_head.weight", "F16", (8, 8))) is None


def test_keys_of_few_heads_are_replicated() -> None:
    division = Division(8, 32, 2)
    assert division.share("matrix") == 1 / 8
    assert division.share("key_value") == 1 / 2
    assert division.share("fused") == (32 / 8 + 2 * 1) / (32 + 4)
    assert division.share("embedding") == 1 / 8
    assert Division(8, 32, 2, replicated_embedding=True).share("embedding") == 1
