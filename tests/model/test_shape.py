from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.model import ModelShape

# (config.json, layers, key-value heads, head size, hidden, positions)
FAMILIES: dict[str, tuple[dict[str, Any], int, int, int, int, int]] = {
    "llama-3-8b": (
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "vocab_size": 128256,
        },
        32,
        8,
        128,
        4096,
        8192,
    ),
    "gemma-7b, whose heads are wider than hidden / heads": (
        {
            "model_type": "gemma",
            "num_hidden_layers": 28,
            "hidden_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "vocab_size": 256000,
        },
        28,
        16,
        256,
        3072,
        8192,
    ),
    "gpt2": (
        {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257},
        12,
        12,
        64,
        768,
        1024,
    ),
    "starcoder": (
        {
            "model_type": "gpt_bigcode",
            "n_layer": 40,
            "n_head": 48,
            "n_embd": 6144,
            "n_positions": 8192,
            "multi_query": True,
            "vocab_size": 49152,
        },
        40,
        1,
        128,
        6144,
        8192,
    ),
    "falcon-7b": (
        {
            "model_type": "falcon",
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "hidden_size": 4544,
            "multi_query": True,
            "new_decoder_architecture": False,
            "max_position_embeddings": 2048,
            "vocab_size": 65024,
        },
        32,
        1,
        64,
        4544,
        2048,
    ),
    "falcon-40b": (
        {
            "model_type": "falcon",
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "hidden_size": 8192,
            "multi_query": True,
            "new_decoder_architecture": True,
            "num_kv_heads": 8,
            "max_position_embeddings": 2048,
            "vocab_size": 65024,
        },
        60,
        8,
        64,
        8192,
        2048,
    ),
    "falcon-40b, first release": (
        {
            "model_type": "RefinedWeb",
            "n_layer": 60,
            "n_head": 128,
            "n_head_kv": 8,
            "hidden_size": 8192,
            "max_position_embeddings": 2048,
            "vocab_size": 65024,
        },
        60,
        8,
        64,
        8192,
        2048,
    ),
    "chatglm3-6b": (
        {
            "model_type": "chatglm",
            "num_layers": 28,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "kv_channels": 128,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "seq_length": 8192,
            "padded_vocab_size": 65024,
        },
        28,
        2,
        128,
        4096,
        8192,
    ),
    "mpt-7b": (
        {"model_type": "mpt", "n_layers": 32, "n_heads": 32, "d_model": 4096, "max_seq_len": 2048, "vocab_size": 50432},
        32,
        32,
        128,
        4096,
        2048,
    ),
    "dbrx": (
        {
            "model_type": "dbrx",
            "n_layers": 40,
            "n_heads": 48,
            "d_model": 6144,
            "max_seq_len": 32768,
            "attn_config": {"kv_n_heads": 8},
            "vocab_size": 100352,
        },
        40,
        8,
        128,
        6144,
        32768,
    ),
    "llava, by its text part": (
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "vision_config": {"hidden_size": 1},
            "text_config": {
                "model_type": "llama",
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
                "hidden_size": 4096,
                "max_position_embeddings": 4096,
            },
            "vocab_size": 32064,
        },
        32,
        32,
        128,
        4096,
        4096,
    ),
    "a TensorRT-LLM engine": (
        {
            "version": "1.2.0",
            "build_config": {},
            "pretrained_config": {
                "architecture": "LlamaForCausalLM",
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "head_size": 128,
                "num_key_value_heads": 8,
                "hidden_size": 4096,
                "max_position_embeddings": 8192,
                "vocab_size": 128256,
            },
        },
        32,
        8,
        128,
        4096,
        8192,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_in_its_own_words(family: str) -> None:
    config, layers, kv_heads, head_dim, hidden, positions = FAMILIES[family]
    shape = ModelShape.from_config(config)
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (layers, kv_heads, head_dim)
    assert (shape.hidden, shape.max_position_embeddings) == (hidden, positions)
    assert shape.vocab_size is not None


def test_the_outer_architecture_and_the_inner_type_are_reported() -> None:
    llava = ModelShape.from_config(FAMILIES["llava, by its text part"][0])
    assert (llava.architecture, llava.model_type) == ("LlavaForConditionalGeneration", "llama")
    engine = ModelShape.from_config(FAMILIES["a TensorRT-LLM engine"][0])
    assert engine.architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_dtype_is_read_under_its_old_and_new_name(name: str) -> None:
    assert ModelShape.from_config({name: "torch.bfloat16"}).dtype == "bfloat16"


def test_what_is_not_given_is_none() -> None:
    assert ModelShape.from_config({}) == ModelShape()
    assert ModelShape.from_config({"hidden_size": 4096}, parameter_bytes=7) == ModelShape(
        hidden=4096, parameter_bytes=7
    )


_VALUES = st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3)
_KEYS = st.sampled_from(
    [
        "hidden_size",
        "num_attention_heads",
        "n_head",
        "text_config",
        "architectures",
        "model_type",
        "attn_config",
        "dtype",
    ]
)


@given(
    st.dictionaries(
        _KEYS, _VALUES | st.lists(_VALUES, max_size=2) | st.dictionaries(_KEYS, _VALUES, max_size=4), max_size=6
    )
)
def test_no_config_makes_it_fail(config: dict[str, Any]) -> None:
    shape = ModelShape.from_config(config)
    for value in (shape.hidden, shape.num_heads, shape.head_dim):
        assert value is None or value >= 0


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 1.5}}, 3072),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2}}, 4096),
        ({"rotary_scaling": {"type": "linear", "factor": 2}}, 4096),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 2048),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, 2048),
        ({"rope_scaling": None}, 2048),
    ],
)
def test_linear_and_dynamic_scaling_stretch_the_context(scaling: dict[str, object], positions: int) -> None:
    assert ModelShape.from_config({"max_position_embeddings": 2048, **scaling}).max_position_embeddings == positions


def test_a_list_of_layers_is_their_number_where_nothing_else_gives_it() -> None:
    kinds = ["mamba", "moe", "attention"]
    assert ModelShape.from_config({"layers_block_type": kinds}).num_layers == 3
    assert ModelShape.from_config({"layers_block_type": kinds, "num_hidden_layers": 4}).num_layers == 4
    assert ModelShape.from_config({"layers_block_type": []}).num_layers is None
    assert ModelShape.from_config({"layers_block_type": "mamba"}).num_layers is None
