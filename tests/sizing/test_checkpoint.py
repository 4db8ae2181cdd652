from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from djl_trtllm.config.options.choices import KvCacheDType, QuantAlgorithm, Quantization
from djl_trtllm.errors import LayoutError, SizingError
from djl_trtllm.model.checkpoint import StoredTensor
from djl_trtllm.model.vision import Vision
from djl_trtllm.sizing.checkpoint import CheckpointSizes, expected_tensors
from djl_trtllm.sizing.estimate import GIB, Conditions, Estimate, warnings_of
from djl_trtllm.sizing.tensors import (
    BITS,
    OF_TORCH,
    WEIGHT_FORMATS,
    Division,
    Part,
    WeightTensor,
    cache_bits,
    compute_format,
    group_of,
    indivisible_heads,
    layer_of,
    parts_of,
    stage_of,
    tensors_of,
    weight_bits,
)
from tests.sizing.configs import deepseek, llama, nemotron_h
from tests.support.s3 import Store, s3, store
from tests.support.stub_http import Hub, hub_server
from tests.support.tables import by_rows, by_table

__all__ = ["s3", "store"]

TINY = Path(__file__).parents[2] / "serving" / "models" / "tiny-stories"


def write_checkpoint(path: Path, config: dict[str, Any], shards: int = 1, dtype: str | None = None) -> None:
    """A checkpoint whose weights are holes: only headers take room on the disk."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    tensors = list(expected_tensors(config))
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        header, at = {}, 0
        for tensor in tensors[shard::shards]:
            weight_map[tensor.name] = name
            header[tensor.name] = {
                "dtype": dtype or tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [at, at + tensor.bytes],
            }
            at += tensor.bytes
        text = json.dumps(header).encode()
        (path / name).write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(path / name, 8 + len(text) + at)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_sizes_of_a_directory_are_those_of_its_file() -> None:
    sizes = CheckpointSizes.read(TINY)
    header = int.from_bytes((TINY / "model.safetensors").read_bytes()[:8], "little")
    assert sizes.bytes == (TINY / "model.safetensors").stat().st_size - 8 - header
    assert sizes.shape.parameter_bytes == sizes.bytes
    assert sizes.exact


def test_a_config_alone_gives_counted_sizes() -> None:
    sizes = CheckpointSizes.from_config(llama())
    assert (sizes.parameters, sizes.exact) == (8_030_261_248, False)
    assert len(sizes.layers) == 32
    assert (sizes.experts, sizes.experts_per_token) == (0, 0)
    sizes = CheckpointSizes.from_config(llama(num_local_experts=8, num_experts_per_tok=2))
    assert (sizes.experts, sizes.experts_per_token) == (8, 2)


def test_a_checkpoint_of_70_billion_in_30_shards_is_answered_within_two_seconds(tmp_path: Path) -> None:
    config = llama(num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64)
    write_checkpoint(tmp_path, config, shards=30)
    began = time.process_time()
    found = Estimate(CheckpointSizes.read(tmp_path), Conditions(80 * GIB, tensor_parallel=4))
    assert found.recommended == 16_384
    assert found.sequences_of(4096) > 0
    assert time.process_time() - began < 2
    assert found.sizes.parameters == 70_553_706_496


def test_layers_that_predict_further_tokens_are_not_loaded(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, llama(num_hidden_layers=4))
    config = llama(num_hidden_layers=3)
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = CheckpointSizes.read(tmp_path)
    assert sizes.bytes == CheckpointSizes.from_config(config).bytes


def test_the_quantisation_of_weights_and_cache_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, llama(num_hidden_layers=1), dtype="BF16")
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    sizes = CheckpointSizes.read(tmp_path)
    assert (sizes.quantization, sizes.kv_quantization) == ("FP8", "FP8")


def test_weights_in_other_files_than_safetensors_are_counted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama()))
    (tmp_path / "pytorch_model.bin").write_bytes(b"old")
    sizes = CheckpointSizes.read(tmp_path)
    assert (sizes.exact, sizes.parameters) == (False, 8_030_261_248)


def test_a_directory_without_config_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"no config\.json"):
        CheckpointSizes.read(tmp_path)


def test_a_config_with_a_billion_layers_is_refused_at_once() -> None:
    with pytest.raises(LayoutError, match="num_hidden_layers is 1000000000, expected at most 10000"):
        CheckpointSizes.from_config(llama(num_hidden_layers=10**9))


@pytest.mark.parametrize("key", ["build_config", "builder_config"])
def test_a_compiled_engine_is_refused(tmp_path: Path, key: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"pretrained_config": llama(), key: {}}))
    with pytest.raises(LayoutError, match="compiled engine"):
        CheckpointSizes.read(tmp_path)


@pytest.mark.parametrize("source", ["s3://models/team/story.tar.gz", "here.tgz"])
def test_an_archive_is_refused_before_it_is_fetched(source: str) -> None:
    with pytest.raises(LayoutError, match=f"{source} is an archive.*name the directory"):
        CheckpointSizes.read(source)


def test_a_local_archive_by_another_name_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "model", "w") as archive:
        archive.add(TINY / "config.json", "config.json")
    with pytest.raises(LayoutError, match="is an archive"):
        CheckpointSizes.read(tmp_path / "model")


def test_a_checkpoint_on_the_hub_is_read_by_its_headers(tmp_path: Path) -> None:
    config = llama(num_hidden_layers=1, hidden_size=512, intermediate_size=2048, vocab_size=1000)
    write_checkpoint(tmp_path / "here", config, shards=2)
    files = {file.name: file.read_bytes() for file in (tmp_path / "here").iterdir()}
    program = (
        "from djl_trtllm.sizing.checkpoint import CheckpointSizes\n"
        "sizes = CheckpointSizes.read('acme/small')\n"
        "print(sizes.bytes, sizes.exact, sizes.source)"
    )
    with hub_server(Hub({"acme/small": files})) as endpoint:
        # The hub's library reads its address when it is imported.
        environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home")}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
        )
    assert done.stdout == f"{CheckpointSizes.read(tmp_path / 'here').bytes} True acme/small\n", done.stderr
    assert list((tmp_path / "home").rglob("config.json"))
    assert not list((tmp_path / "home").rglob("*.safetensors"))


def test_a_checkpoint_in_s3_is_read_by_its_headers(store: Store, tmp_path: Path) -> None:
    config = llama(num_hidden_layers=1, hidden_size=512, intermediate_size=2048, vocab_size=1000)
    write_checkpoint(tmp_path / "here", config, shards=2)
    for file in (tmp_path / "here").iterdir():
        store.put(f"team/small/{file.name}", file.read_bytes())
    local, remote = CheckpointSizes.read(tmp_path / "here"), CheckpointSizes.read("s3://models/team/small")
    assert (remote.parts, remote.exact, remote.source) == (local.parts, True, "s3://models/team/small")
    got = sum(request.end - request.start for request in store.requests if request.method == "GET" and request.key)
    assert got < local.bytes / 4


_KEYS = """attn_layer_indices block_configs block_types first_k_dense_replace head_dim hidden_size hybrid_layer_pattern
hybrid_override_pattern interleave_moe_layer_step kv_lora_rank layer_types linear_attn_config mlp_only_layers model_type
moe_intermediate_size moe_layer_freq n_routed_experts num_experts_per_tok num_key_value_heads q_lora_rank
quantization_config rope_scaling sliding_window tie_word_embeddings torch_dtype v_head_dim"""
KEYS = st.sampled_from(_KEYS.split())
ATOMS = st.none() | st.booleans() | st.integers(-2, 64) | st.floats(0, 9) | st.text(max_size=3)
VALUES = ATOMS | st.lists(ATOMS | st.just({}) | st.just({"attention": 3, "ffn": []}), max_size=4) | st.just({"a": 1})


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([llama, deepseek, nemotron_h]), st.dictionaries(KEYS, VALUES, max_size=4))
def test_values_of_other_types_than_expected_do_not_end_it(make: Any, changes: dict[str, Any]) -> None:
    config = make() | changes | {"num_hidden_layers": 4}
    found = Estimate(CheckpointSizes.from_config(config), Conditions(80 * GIB))
    assert found.max_num_tokens >= 0
    assert isinstance(warnings_of(found), tuple)


# -- tensors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bytes_"), [("BF16", 30), ("F32", 60), ("I8", 15), ("F8_E4M3", 15), ("F4", 8)])
def test_the_bytes_of_a_tensor_follow_from_type_and_shape(dtype: str, bytes_: int) -> None:
    tensor = WeightTensor("a", dtype, (3, 5))
    assert (tensor.elements, tensor.bytes) == (15, bytes_)


def test_a_type_that_the_format_does_not_have_is_an_error_with_its_name() -> None:
    assert list(tensors_of({"a": StoredTensor("F16", (2, 3), (0, 12))}, "file")) == [WeightTensor("a", "F16", (2, 3))]
    with pytest.raises(LayoutError, match=r"shard\.safetensors: lm_head has the type 'Q9'"):
        list(tensors_of({"lm_head": StoredTensor("Q9", (1,), (0, 1))}, "shard.safetensors"))


def test_the_types_are_those_of_safetensors_and_have_their_bits_in_their_names() -> None:
    whole = {f"{kind}{bits}" for kind in "IU" for bits in (8, 16, 32, 64)}
    floats = {"F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F6_E2M3", "F6_E3M2", "F4"}
    assert BITS.keys() == whole | floats | {"BOOL"}
    assert set(OF_TORCH.values()) == {"BF16", "F16", "F32", "F64"}
    assert all(dtype in (f"F{name[-2:]}", f"BF{name[-2:]}") for name, dtype in OF_TORCH.items() if name[-2:].isdigit())
    assert (OF_TORCH["half"], OF_TORCH["float"], OF_TORCH["bfloat16"]) == ("F16", "F32", "BF16")
    for name, bits in BITS.items():
        found = re.search(r"\d+", name)
        assert bits == (8 if found is None else int(found[0])), name


@by_table("name", "bits")
def test_scales_are_spread_over_the_weights_that_share_them(name: str, bits: float) -> None:
    assert weight_bits(name) == bits


def test_every_value_of_the_options_has_a_size() -> None:
    for choice in (*Quantization, *QuantAlgorithm):
        assert 4 <= weight_bits(choice.value) <= 16
    for dtype in set(KvCacheDType) - {KvCacheDType.AUTO}:
        assert 4 <= cache_bits(dtype.value) <= 32


def test_matrices_without_a_narrower_format_are_multiplied_in_sixteen_bits() -> None:
    formats = [compute_format(name) for name in (None, "int8", "awq", "w4a8_awq", "FP8", "nvfp4")]
    assert formats == ["bf16", "bf16", "bf16", "fp8", "fp8", "fp4"]


@by_rows(("images", "tokens"), [("2", 2 * 16), ("1:2x2", 1), ("3:8x4", 3 * 2)])
def test_images_have_the_tokens_of_their_pixels_or_of_the_largest(images: str, tokens: int) -> None:
    sizes = replace(CheckpointSizes.from_config(llama()), vision=Vision(7, 4, 16, 256))
    assert sizes.image_tokens(images) == tokens


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(SizingError, match=r"fp9: expected a quantisation; did you mean fp8\?"):
        weight_bits("fp9")
    with pytest.raises(SizingError, match=r"zz: expected a type of the KV cache; known are fp8"):
        cache_bits("zz")


SCALES = {"GPTQ": 0.25, "AWQ": 0.125, "PER_GROUP": 0.125, "BLOCK_SCALES": 32 / 128**2, "NVFP4": 0.5, "MXFP4": 0.25}
"""Bits per weight of the scales, by what the name of a format contains."""


@by_rows("name", sorted(set(WEIGHT_FORMATS) - {"no_quant", "mixed_precision"}))
def test_a_format_has_the_bits_of_its_name_and_those_of_its_scales(name: str) -> None:
    bits = re.search(r"(?:w|fp|int)(\d)", name)
    assert bits is not None
    scales = [size for part, size in SCALES.items() if part.lower() in name]
    assert WEIGHT_FORMATS[name] == int(bits[1]) + sum(scales)


@by_rows("dtype", ["fp8", "int8", "fp16", "float16", "bf16", "bfloat16", "fp32", "float32", "nvfp4"])
def test_a_type_of_the_cache_has_the_bits_of_its_name(dtype: str) -> None:
    bits = re.search(r"\d+", dtype)
    assert bits is not None
    assert cache_bits(dtype) == int(bits[0]) + (0.5 if dtype == "nvfp4" else 0)


@by_table("name", "group")
def test_the_name_says_how_a_tensor_is_divided(name: str, group: str) -> None:
    assert group_of(WeightTensor(name, "BF16", (8, 8))) == group


def test_the_layer_is_the_number_in_the_name() -> None:
    assert layer_of(WeightTensor("transformer.h.13.ln_1.weight", "F16", (8,))) == 13
    assert layer_of(WeightTensor("vision_tower.layers.13.ln_1.weight", "F16", (8,))) is None
    assert layer_of(WeightTensor("lm_head.weight", "F16", (8, 8))) is None
    assert group_of(WeightTensor("model.layers.3.input_layernorm.weight", "BF16", (8,))) == "replicated"


def test_keys_of_few_heads_are_replicated() -> None:
    division = Division(8, 32, 2)
    assert division.share("matrix") == 1 / 8
    assert division.share("key_value") == 1 / 2
    assert division.share("fused") == (32 / 8 + 2 * 1) / (32 + 4)
    assert division.share("embedding") == 1 / 8
    assert Division(8, 32, 2, replicated_embedding=True).share("embedding") == 1
    # Heads that are not known are divided as other matrices are.
    unknown = [Division(4, heads, kv_heads) for heads, kv_heads in ((None, None), (None, 2), (8, None))]
    assert [each.share("fused") for each in unknown] == [1 / 4] * 3


@by_table("heads", "kv_heads", "ranks", "divisible")
def test_heads_are_divided_and_those_of_keys_divided_or_repeated(
    heads: int | None, kv_heads: int | None, ranks: int, divisible: bool
) -> None:
    assert (indivisible_heads(heads, kv_heads, ranks) is None) is divisible


def test_tensors_are_summed_by_what_decides_their_division() -> None:
    tensors = [
        WeightTensor("model.layers.0.mlp.up_proj.weight", "BF16", (8, 4)),
        WeightTensor("model.layers.0.mlp.down_proj.weight", "BF16", (4, 8)),
        WeightTensor("model.layers.0.mlp.down_proj.weight_scale_inv", "F32", (1, 1)),
        WeightTensor("model.layers.1.mlp.down_proj.qweight", "I32", (4, 1)),
        WeightTensor("model.layers.1.input_layernorm.weight", "BF16", (4,)),
        WeightTensor("lm_head.weight", "BF16", (10, 4)),
        WeightTensor("model.projection.weight", "BF16", (3, 4)),
        WeightTensor("model.layers.1.mlp.experts.0.bias", "BF16", (6,)),
        WeightTensor("model.layers.1.attn.qkv_proj.weight", "BF16", (5, 4)),
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


@by_table("name")
def test_what_an_engine_computes_or_does_not_load_is_left_out(name: str) -> None:
    assert parts_of([WeightTensor(name, "F16", (4, 4))], 2) == ()


def test_the_first_pipeline_stages_have_the_layers_that_are_left_over() -> None:
    assert [stage_of(layer, 5, 3) for layer in range(5)] == [0, 0, 1, 1, 2]
    assert [stage_of(layer, 4, 2) for layer in range(4)] == [0, 0, 1, 1]
    assert [stage_of(layer, 2, 4) for layer in range(2)] == [0, 1]
    assert [stage_of(layer, 6, 4) for layer in range(6)] == [0, 0, 1, 1, 2, 3]
