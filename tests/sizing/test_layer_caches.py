from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.sizing.layer_caches import LayerCache, layer_caches
from tests.sizing.configs import deepseek, gemma3, gpt_oss, llama, nemotron_h


def test_grouped_heads_keep_a_key_and_a_value_each() -> None:
    assert layer_caches(llama()) == (LayerCache("attention", 8, 128),) * 32


def test_a_rank_has_at_least_one_head() -> None:
    assert [LayerCache("attention", 8, 128).per_token(ranks) for ranks in (1, 4, 8, 16)] == [2048, 512, 256, 256]


def test_latent_attention_keeps_one_vector_of_576_on_every_rank() -> None:
    layers = layer_caches(deepseek())
    assert {layer.kind for layer in layers} == {"latent"}
    assert [layers[0].per_token(ranks) for ranks in (1, 8)] == [576, 576]


def windows(config: dict[str, Any]) -> list[int | None]:
    return [layer.window for layer in layer_caches(config)]


def test_five_of_six_layers_of_gemma_3_have_a_window() -> None:
    assert windows(gemma3())[:7] == [1024] * 5 + [None, 1024]
    assert windows(gemma3(sliding_window_pattern=2))[:3] == [1024, None, 1024]


def test_layer_types_say_which_layers_have_a_window() -> None:
    assert windows(gpt_oss())[:4] == [128, None, 128, None]
    chunked = llama(layer_types=["chunked_attention", "full_attention"] * 16, attention_chunk_size=8192)
    assert windows(chunked)[:2] == [8192, None]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": 4096}, [4096, 4096]),
        ({"sliding_window": 4096, "use_sliding_window": False}, [None, None]),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 1}, [None, 4096]),
        ({"sliding_window": None}, [None, None]),
    ],
)
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


def test_a_state_in_float32_takes_twice_as_much_as_one_in_16_bits() -> None:
    state = layer_caches(nemotron_h(mamba_ssm_cache_dtype="float32"))[0]
    assert state.state == 2 * 3 * (128 * 64 + 2 * 8 * 128) + 4 * 128 * 64 * 128


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"attn_layer_period": 4, "attn_layer_offset": 1}, "sasssass"),
        ({"attn_layer_indices": [3]}, "sssassss"),
        ({"full_attention_interval": 4}, "sssasssa"),
        ({"layer_types": ["linear_attention", "full_attention"] * 4}, "sasasasa"),
        ({"block_types": ["recurrent", "recurrent", "attention"], "lru_width": 4096}, "ssassass"),
        ({"model_type": "mamba2"}, "ssssssss"),
        ({"model_type": "falcon_h1"}, "aaaaaaaa"),
    ],
)
def test_hybrid_models_attend_in_some_layers(changes: dict[str, Any], expected: str) -> None:
    layers = layer_caches(llama(num_hidden_layers=8, mamba_d_state=16, mamba_expand=2, **changes))
    assert "".join(layer.kind[0] for layer in layers) == expected
    assert all(layer.state > 0 for layer in layers if layer.kind == "state")


def test_a_layer_can_attend_and_keep_a_state() -> None:
    layer = layer_caches(llama(model_type="falcon_h1", mamba_d_state=16, mamba_expand=2))[0]
    assert layer.per_token(1) > 0
    assert layer.per_sequence(1) > 0


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


def test_a_config_without_layers_has_none() -> None:
    assert layer_caches({"hidden_size": 8}) == ()


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


def test_a_list_of_kinds_gives_the_number_of_layers() -> None:
    config = nemotron_h(layers_block_type=["mamba", "moe", "attention"])
    del config["num_hidden_layers"], config["hybrid_override_pattern"]
    assert [layer.kind for layer in layer_caches(config)] == ["state", "none", "attention"]


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


@pytest.mark.parametrize(("family", "step"), [("gemma2", 2), ("gemma3", 6), ("gemma3_text", 6), ("cohere2", 4)])
def test_every_nth_layer_of_some_families_sees_everything(family: str, step: int) -> None:
    found = windows(llama(model_type=family, sliding_window=64))
    assert [index + 1 for index, window in enumerate(found) if window is None] == list(range(step, 33, step))


@pytest.mark.parametrize("size", ["ssm_state_size", "mamba_d_state", "state_size"])
@pytest.mark.parametrize("width", ["hidden_size", "d_model", "n_embd"])
@pytest.mark.parametrize("factor", ["mamba_expand", "expand"])
def test_a_state_is_found_under_every_name_of_its_sizes(size: str, width: str, factor: str) -> None:
    config = {"model_type": "mamba", "num_hidden_layers": 1, width: 100, size: 8, factor: 3, "conv_kernel": 3}
    assert layer_caches(config)[0].state_elements == 2 * 300 + 300 * 8


@pytest.mark.parametrize(("kernel", "inputs"), [(None, 3), (6, 5)])
def test_gated_delta_nets_keep_the_inputs_of_their_convolution(kernel: int | None, inputs: int) -> None:
    config = llama(full_attention_interval=4, linear_num_value_heads=2, linear_conv_kernel_dim=kernel)
    assert layer_caches(config)[0].state_elements == inputs * (2 * 256 + 256) + 256 * 128


def test_a_latent_vector_need_not_have_a_part_for_positions() -> None:
    assert layer_caches(deepseek(qk_rope_head_dim=None))[0].per_token(1) == 512
