from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.model.checkpoint import first_positive, part
from djl_trtllm.sizing.checkpoint import LayerCache, expected_tensors, layer_caches, listed, model_type, positive
from tests.sizing.configs import CONFIGS, deepseek, gemma3, gpt_oss, llama, nemotron_h
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


@by_table("model", "base", "changes", "layers")
def test_a_layer_keeps_what_its_family_does(
    model: str, base: str, changes: dict[str, Any], layers: list[list[Any]]
) -> None:
    """`layers`, from the first one: kind, window, elements per token, bytes of the state in 16 bits."""
    found = layer_caches(CONFIGS[base] | changes)[: len(layers)]
    assert [[each.kind, each.window, each.per_token(1), each.state] for each in found] == layers, model


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
    assert state.state == 2 * (3 * (128 * 64 + 2 * 8 * 128) + 128 * 64 * 128)
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


@pytest.mark.parametrize(("family", "step"), [("gemma2", 2), ("gemma3", 6), ("gemma3_text", 6), ("cohere2", 4)])
def test_every_nth_layer_of_some_families_sees_everything(family: str, step: int) -> None:
    found = windows(llama(model_type=family, sliding_window=64))
    assert [index + 1 for index, window in enumerate(found) if window is None] == list(range(step, 33, step))


@by_rows("size", ["ssm_state_size", "mamba_d_state", "state_size"])
@by_rows("width", ["hidden_size", "d_model", "n_embd"])
@by_rows("factor", ["mamba_expand", "expand"])
def test_a_state_is_found_under_every_name_of_its_sizes(size: str, width: str, factor: str) -> None:
    config = {"model_type": "mamba", "num_hidden_layers": 1, width: 100, size: 8, factor: 3, "conv_kernel": 3}
    assert layer_caches(config)[0].state == 2 * (2 * 300 + 300 * 8)


def test_the_parameters_of_llama_3_8b_are_counted_exactly() -> None:
    # The total of its index file: https://huggingface.co/NousResearch/Meta-Llama-3-8B
    assert sum(tensor.bytes for tensor in expected_tensors(llama())) == 16_060_522_496


@by_table("model", "base", "changes", "billions")
def test_known_models_have_the_parameters_that_they_are_named_after(
    model: str, base: str, changes: dict[str, Any], billions: float
) -> None:
    parameters = sum(tensor.elements for tensor in expected_tensors(CONFIGS[base] | changes))
    assert round(parameters / 1e9, 1) == billions, model


def test_a_list_says_which_layers_have_experts() -> None:
    few = llama(num_local_experts=4, num_hidden_layers=2, moe_layer_freq=[0, 1])
    names = [tensor.name for tensor in expected_tensors(few)]
    assert "model.layers.0.mlp.up_proj.weight" in names
    assert "model.layers.1.mlp.experts.up_proj.weight" in names and "lm_head.weight" in names
    assert "lm_head.weight" not in shapes(llama(tie_word_embeddings=True))
    assert "lm_head.weight" not in shapes(gemma3()) and "lm_head.weight" in shapes(gemma3(tie_word_embeddings=False))
    assert "lm_head.weight" in shapes({**gemma3(), "tie_word_embeddings": False}), "beside the text's part"
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


@by_table("name", "base", "changes", "expected")
def test_the_matrices_of_a_layer_follow_from_the_sizes(
    name: str, base: str, changes: dict[str, Any], expected: dict[str, list[int] | None]
) -> None:
    found = shapes(CONFIGS[base] | changes)
    assert {matrix: found.get(matrix) for matrix in expected} == {
        matrix: None if shape is None else tuple(shape) for matrix, shape in expected.items()
    }, name


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
