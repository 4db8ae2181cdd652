from __future__ import annotations

import pytest

from djl_trtllm.sizing.sharding import Division, Part, group_of, indivisible_heads, layer_of, parts_of, stage_of
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
        ("model.projection.weight", "matrix"),
        ("encoder.layer.3.output.dense.weight", "matrix"),
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


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "divisible"),
    [
        (32, 8, 8, True),
        (32, 8, 16, True),
        (32, 8, 12, False),
        (32, 12, 8, False),
        (24, 4, 6, False),
        (None, None, 3, True),
        (71, 1, 71, True),
    ],
)
def test_heads_are_divided_and_those_of_keys_divided_or_repeated(
    heads: int | None, kv_heads: int | None, ranks: int, divisible: bool
) -> None:
    assert (indivisible_heads(heads, kv_heads, ranks) is None) is divisible


def test_tensors_are_summed_by_what_decides_their_division() -> None:
    tensors = [
        Tensor("model.layers.0.mlp.up_proj.weight", "BF16", (8, 4)),
        Tensor("model.layers.0.mlp.down_proj.weight", "BF16", (4, 8)),
        Tensor("model.layers.0.mlp.down_proj.weight_scale_inv", "F32", (1, 1)),
        Tensor("model.layers.1.mlp.down_proj.qweight", "I32", (4, 1)),
        Tensor("model.layers.1.input_layernorm.weight", "BF16", (4,)),
        Tensor("lm_head.weight", "BF16", (10, 4)),
        Tensor("model.projection.weight", "BF16", (3, 4)),
        Tensor("model.layers.1.mlp.experts.0.bias", "BF16", (6,)),
        Tensor("model.layers.1.attn.qkv_proj.weight", "BF16", (5, 4)),
    ]
    assert set(parts_of(tensors, 2)) == {
        Part("matrix", 0, "BF16", True, 64, 128),
        Part("matrix", 0, "F32", False, 1, 4),
        Part("matrix", 1, "I32", False, 4, 16),
        Part("replicated", 1, "BF16", False, 4, 8),
        Part("head", None, "BF16", False, 40, 80),
        Part("matrix", None, "BF16", False, 12, 24),
        Part("expert", 1, "BF16", False, 6, 12),
        Part("fused", 1, "BF16", True, 20, 40),
    }


@pytest.mark.parametrize(
    "name",
    [
        "h.0.attn.bias",
        "gpt_neox.layers.0.attention.masked_bias",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.2.mlp.up_proj.weight",
        "mtp.layers.0.mlp.up_proj.weight",
    ],
)
def test_what_an_engine_computes_or_does_not_load_is_left_out(name: str) -> None:
    assert parts_of([Tensor(name, "F16", (4, 4))], 2) == ()


def test_the_first_pipeline_stages_have_the_layers_that_are_left_over() -> None:
    assert [stage_of(layer, 5, 3) for layer in range(5)] == [0, 0, 1, 1, 2]
    assert [stage_of(layer, 4, 2) for layer in range(4)] == [0, 0, 1, 1]
    assert [stage_of(layer, 2, 4) for layer in range(2)] == [0, 1]


def test_layers_that_are_left_over_go_to_the_first_stages_even_if_the_others_have_one() -> None:
    assert [stage_of(layer, 6, 4) for layer in range(6)] == [0, 0, 1, 1, 2, 3]
