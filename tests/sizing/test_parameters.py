from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.sizing.parameters import expected_tensors
from tests.sizing.configs import deepseek, gpt_oss, llama, nemotron_h


def test_the_parameters_of_llama_3_8b_are_counted_exactly() -> None:
    # The total of its index file: https://huggingface.co/NousResearch/Meta-Llama-3-8B
    assert sum(tensor.bytes for tensor in expected_tensors(llama())) == 16_060_522_496


def test_the_parameters_of_deepseek_v3_are_671_billion() -> None:
    assert round(sum(tensor.elements for tensor in expected_tensors(deepseek())) / 1e9) == 671


def test_a_tied_head_is_no_tensor_of_its_own() -> None:
    names = {tensor.name for tensor in expected_tensors(llama(tie_word_embeddings=True))}
    assert "lm_head.weight" not in names


def test_a_config_without_sizes_has_no_tensors() -> None:
    assert expected_tensors({"model_type": "llama"}) == ()


def billions(config: dict[str, Any]) -> float:
    return round(sum(tensor.elements for tensor in expected_tensors(config)) / 1e9, 1)


def test_known_models_have_the_parameters_that_they_are_named_after() -> None:
    assert billions(nemotron_h()) == 8.1
    assert billions(gpt_oss()) == 20.9
    # Nemotron 3 Super 120B: experts on a latent vector, and one that is shared.
    pattern = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    latent = nemotron_h(
        num_hidden_layers=88,
        hybrid_override_pattern=pattern,
        n_routed_experts=512,
        num_experts_per_tok=22,
        moe_intermediate_size=2688,
        moe_latent_size=1024,
        moe_shared_expert_intermediate_size=5376,
        n_shared_experts=1,
        num_key_value_heads=2,
    )
    assert billions(latent) == 120.7
    # Llama 4 Maverick's text part: experts in every other layer.
    maverick = llama(
        model_type="llama4_text",
        num_hidden_layers=48,
        hidden_size=5120,
        intermediate_size=8192,
        intermediate_size_mlp=16384,
        num_attention_heads=40,
        head_dim=128,
        num_local_experts=128,
        interleave_moe_layer_step=2,
        vocab_size=202048,
    )
    assert billions(maverick) == 400.7


def test_a_list_says_which_layers_have_experts() -> None:
    few = llama(num_local_experts=4, num_hidden_layers=2, moe_layer_freq=[0, 1])
    names = [tensor.name for tensor in expected_tensors(few)]
    assert "model.layers.0.mlp.up_proj.weight" in names
    assert "model.layers.1.mlp.experts.up_proj.weight" in names


def test_the_inner_size_of_a_layer_can_be_searched() -> None:
    blocks = [
        {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 2.625}},
        {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
    ]
    tensors = expected_tensors(
        llama(num_hidden_layers=2, hidden_size=8192, num_attention_heads=64, block_configs=blocks)
    )
    widths = {tensor.name: tensor.shape[0] for tensor in tensors if "up_proj" in tensor.name}
    assert widths == {"model.layers.0.mlp.up_proj.weight": 14336, "model.layers.1.mlp.up_proj.weight": 0}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {tensor.name.removeprefix("model.layers.0."): tensor.shape for tensor in expected_tensors(config)}


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"model_type": "qwen2"}, {"model_type": "qwen2_moe"}])
def test_some_models_have_biases_of_queries_keys_and_values(changes: dict[str, Any]) -> None:
    biased = shapes(llama(**changes))
    biases = {name: shape for name, shape in biased.items() if name.startswith("self_attn") and name.endswith("bias")}
    assert biases == {
        "self_attn.q_proj.bias": (4096,),
        "self_attn.k_proj.bias": (1024,),
        "self_attn.v_proj.bias": (1024,),
    }
    assert "self_attn.q_proj.bias" not in shapes(llama())


def test_values_of_latent_attention_have_their_own_size_or_that_of_keys() -> None:
    sizes = {"qk_nope_head_dim": 128, "kv_lora_rank": 512}
    assert shapes(deepseek(**sizes, v_head_dim=64))["self_attn.o_proj.weight"] == (7168, 128 * 64)
    assert shapes(deepseek(**sizes, v_head_dim=None))["self_attn.o_proj.weight"] == (7168, 128 * 128)
    alone = shapes(deepseek(qk_nope_head_dim=None, q_lora_rank=None))
    assert alone["self_attn.q_proj.weight"] == (128 * 64, 7168)


@pytest.mark.parametrize(("dtype", "expected"), [("float32", "F32"), ("float16", "F16"), (None, "BF16")])
def test_tensors_have_the_type_of_the_config(dtype: str | None, expected: str) -> None:
    assert {tensor.dtype for tensor in expected_tensors(llama(torch_dtype=dtype))} == {expected}


def test_with_a_step_of_two_every_second_layer_has_experts() -> None:
    sparse = llama(num_local_experts=4, num_hidden_layers=3, interleave_moe_layer_step=2)
    gates = [tensor.name for tensor in expected_tensors(sparse) if tensor.name.endswith("mlp.gate.weight")]
    assert gates == ["model.layers.1.mlp.gate.weight"]
