from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.model.checkpoint import first_positive, part
from djl_trtllm.sizing.checkpoint import LayerCache, expected_tensors, layer_caches, listed, model_type, positive
from tests.sizing.configs import deepseek, gemma3, gpt_oss, llama, nemotron_h
from tests.support.tables import by_rows, by_table


@by_rows(("value", "expected"), [(3, 3), (1, 1), (0, None), (-1, None), (True, None), (2.5, None), ("3", None)])
def test_only_whole_numbers_above_zero_are_sizes(value: Any, expected: int | None) -> None:
    assert positive({"a": value}, "a") == expected


def test_what_is_of_another_type_is_absent_and_the_first_name_counts() -> None:
    assert (listed({"a": [1]}, "a"), listed({"a": "x"}, "a"), listed({}, "a")) == ([1], (), ())
    assert (part({"a": {"b": 1}}, "a"), part({"a": []}, "a")) == ({"b": 1}, {})
    assert (model_type({"model_type": "llama"}), model_type({"model_type": [1]})) == ("llama", "")
    assert first_positive({"b": 2, "c": 3}, ("a", "b", "c")) == 2
    assert layer_caches({"hidden_size": 8}) == ()
    assert expected_tensors({"model_type": "llama"}) == ()


def test_a_rank_has_at_least_one_head() -> None:
    assert layer_caches(llama()) == (LayerCache("attention", 8, 128),) * 32
    assert [LayerCache("attention", 8, 128).per_token(ranks) for ranks in (1, 4, 8, 16)] == [2048, 512, 256, 256]


def test_latent_attention_keeps_one_vector_of_576_on_every_rank() -> None:
    layers = layer_caches(deepseek())
    assert {layer.kind for layer in layers} == {"latent"}
    assert [layers[0].per_token(ranks) for ranks in (1, 8)] == [576, 576]
    assert layer_caches(deepseek(qk_rope_head_dim=None))[0].per_token(1) == 512


def windows(config: dict[str, Any]) -> list[int | None]:
    return [layer.window for layer in layer_caches(config)]


def test_five_of_six_layers_of_gemma_3_have_a_window() -> None:
    assert windows(gemma3())[:7] == [1024] * 5 + [None, 1024]
    assert windows(gemma3(sliding_window_pattern=2))[:3] == [1024, None, 1024]


def test_layer_types_say_which_layers_have_a_window() -> None:
    assert windows(gpt_oss())[:4] == [128, None, 128, None]
    chunked = llama(layer_types=["chunked_attention", "full_attention"] * 16, attention_chunk_size=8192)
    assert windows(chunked)[:2] == [8192, None]


@by_table("changes", "expected")
def test_a_window_applies_as_the_config_says(changes: dict[str, Any], expected: list[int | None]) -> None:
    assert windows(llama(num_hidden_layers=2, **changes)) == expected


def test_nemotron_h_has_four_kinds_of_layers_in_its_pattern() -> None:
    layers = layer_caches(nemotron_h())
    kinds = [layer.kind for layer in layers]
    assert (kinds.count("state"), kinds.count("attention"), kinds.count("none")) == (24, 4, 24)
    state = layers[0]
    # Three inputs of the convolution, and 128 heads of 64 x 128.
    assert state.state_elements == 3 * (128 * 64 + 2 * 8 * 128) + 128 * 64 * 128
    assert state.state == 2 * state.state_elements
    assert (state.per_token(1), state.per_sequence(4)) == (0, state.state // 4)
    # In float32 the state itself takes twice as much.
    wide = layer_caches(nemotron_h(mamba_ssm_cache_dtype="float32"))[0]
    assert wide.state == 2 * 3 * (128 * 64 + 2 * 8 * 128) + 4 * 128 * 64 * 128
    config = nemotron_h(layers_block_type=["mamba", "moe", "attention"])
    del config["num_hidden_layers"], config["hybrid_override_pattern"]
    assert [layer.kind for layer in layer_caches(config)] == ["state", "none", "attention"]


@by_table("changes", "expected")
def test_hybrid_models_attend_in_some_layers(changes: dict[str, Any], expected: str) -> None:
    layers = layer_caches(llama(num_hidden_layers=8, mamba_d_state=16, mamba_expand=2, **changes))
    assert "".join(layer.kind[0] for layer in layers) == expected
    assert all(layer.state > 0 for layer in layers if layer.kind == "state")
    # A layer of Falcon-H1 attends and keeps a state.
    assert all(layer.per_token(1) > 0 for layer in layers if layer.kind == "attention")
    assert (layers[0].per_sequence(1) > 0) == (expected[0] == "s" or "model_type" in changes)


def test_qwen3_next_keeps_a_matrix_per_head() -> None:
    config = llama(
        full_attention_interval=4,
        linear_num_value_heads=32,
        linear_num_key_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    )
    assert layer_caches(config)[0].state_elements == 3 * (2 * 2048 + 4096) + 4096 * 128


def test_layers_of_an_architecture_search_differ() -> None:
    def block(**attention: object) -> dict[str, object]:
        return {"attention": attention, "ffn": {"ffn_mult": 1.0}}

    blocks = [block(n_heads_in_group=8), block(n_heads_in_group=4), block(no_op=True), block(replace_with_linear=True)]
    layers = layer_caches(llama(num_hidden_layers=4, num_key_value_heads=None, block_configs=blocks))
    assert [(layer.kind, layer.kv_heads) for layer in layers] == [
        ("attention", 4),
        ("attention", 8),
        ("none", 0),
        ("none", 0),
    ]


def test_mimo_v2_has_other_heads_in_layers_with_a_window_and_shorter_values() -> None:
    config = llama(
        num_hidden_layers=2,
        num_key_value_heads=4,
        head_dim=192,
        v_head_dim=128,
        sliding_window=128,
        hybrid_layer_pattern=[0, 1],
        swa_num_key_value_heads=8,
        swa_head_dim=192,
        swa_v_head_dim=128,
    )
    full, windowed = layer_caches(config)
    assert (full.window, full.per_token(1)) == (None, 4 * (192 + 128))
    assert (windowed.window, windowed.per_token(1)) == (128, 8 * (192 + 128))


def test_gemma_4_has_longer_keys_in_layers_without_a_window() -> None:
    config = llama(
        layer_types=["sliding_attention", "full_attention"] * 16,
        sliding_window=1024,
        head_dim=256,
        global_head_dim=512,
        num_global_key_value_heads=4,
    )
    windowed, full = layer_caches(config)[:2]
    assert (windowed.per_token(1), full.per_token(1)) == (2 * 8 * 256, 2 * 4 * 512)


def test_kimi_linear_counts_its_layers_from_one() -> None:
    linear = {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    }
    layers = layer_caches(deepseek(num_hidden_layers=4, linear_attn_config=linear))
    assert [layer.kind for layer in layers] == ["state"] * 3 + ["latent"]
    assert layers[0].state_elements == 3 * 32 * 128 * 3 + 32 * 128 * 128


def test_kimi_linear_keeps_the_inputs_of_three_convolutions() -> None:
    config = llama(
        full_attention_interval=2,
        linear_attn_config={"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 3},
    )
    state = next(layer for layer in layer_caches(config) if layer.kind == "state")
    assert state.state_elements == 3 * 4 * 16 * 2 + 4 * 16 * 16


@pytest.mark.parametrize("names", [("mamba_num_heads", "mamba_head_dim"), ("mamba_n_heads", "mamba_d_head")])
def test_the_heads_of_mamba_decide_its_width(names: tuple[str, str]) -> None:
    config = llama(attn_layer_indices=[1], mamba_d_state=16, mamba_d_conv=5, **dict(zip(names, (3, 32), strict=True)))
    assert layer_caches(config)[0].state_elements == 4 * 96 + 96 * 16
    config = llama(attn_layer_indices=[1], mamba_d_state=16, mamba_d_conv=5, mamba_d_ssm=96)
    assert layer_caches(config)[0].state_elements == 4 * 96 + 96 * 16
    expanded = shapes(llama(model_type="mamba2", mamba_d_state=16, expand=3))
    assert expanded["mixer.out_proj.weight"] == (4096, 3 * 4096)


@pytest.mark.parametrize(("family", "step"), [("gemma2", 2), ("gemma3", 6), ("gemma3_text", 6), ("cohere2", 4)])
def test_every_nth_layer_of_some_families_sees_everything(family: str, step: int) -> None:
    found = windows(llama(model_type=family, sliding_window=64))
    assert [index + 1 for index, window in enumerate(found) if window is None] == list(range(step, 33, step))


@by_rows("size", ["ssm_state_size", "mamba_d_state", "state_size"])
@by_rows("width", ["hidden_size", "d_model", "n_embd"])
@by_rows("factor", ["mamba_expand", "expand"])
def test_a_state_is_found_under_every_name_of_its_sizes(size: str, width: str, factor: str) -> None:
    config = {"model_type": "mamba", "num_hidden_layers": 1, width: 100, size: 8, factor: 3, "conv_kernel": 3}
    assert layer_caches(config)[0].state_elements == 2 * 300 + 300 * 8


@pytest.mark.parametrize(("kernel", "inputs"), [(None, 3), (6, 5)])
def test_gated_delta_nets_keep_the_inputs_of_their_convolution(kernel: int | None, inputs: int) -> None:
    config = llama(full_attention_interval=4, linear_num_value_heads=2, linear_conv_kernel_dim=kernel)
    assert layer_caches(config)[0].state_elements == inputs * (2 * 256 + 256) + 256 * 128


def test_the_parameters_of_llama_3_8b_are_counted_exactly() -> None:
    # The total of its index file: https://huggingface.co/NousResearch/Meta-Llama-3-8B
    assert sum(tensor.bytes for tensor in expected_tensors(llama())) == 16_060_522_496


def billions(config: dict[str, Any]) -> float:
    return round(sum(tensor.elements for tensor in expected_tensors(config)) / 1e9, 1)


def test_known_models_have_the_parameters_that_they_are_named_after() -> None:
    assert billions(nemotron_h()) == 8.1
    assert billions(deepseek()) == pytest.approx(671, abs=0.5)
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
    assert "model.layers.1.mlp.experts.up_proj.weight" in names and "lm_head.weight" in names
    assert "lm_head.weight" not in shapes(llama(tie_word_embeddings=True))
    # With a step of two every second layer has experts.
    sparse = shapes(llama(num_local_experts=4, num_hidden_layers=3, interleave_moe_layer_step=2))
    assert [name for name in sparse if name.endswith("mlp.gate.weight")] == ["model.layers.1.mlp.gate.weight"]


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
