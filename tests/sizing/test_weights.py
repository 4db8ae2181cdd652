from __future__ import annotations

from dataclasses import replace

import pytest

from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.conditions import Conditions, LoraSlots
from djl_trtllm.sizing.weights import lora_bytes, weights_by_stage
from tests.sizing.configs import gpt_oss, llama, qwen3_32b_fp8

LLAMA = CheckpointSizes.from_config(llama())
EMBEDDING = 128256 * 4096 * 2
NORMS = (2 * 32 + 1) * 4096 * 2
LAYERS = 16_060_522_496 - 2 * EMBEDDING - NORMS


def weights(sizes: CheckpointSizes, **conditions: object) -> tuple[int, ...]:
    return weights_by_stage(sizes, Conditions(80 << 30, **conditions))  # type: ignore[arg-type]


def test_one_gpu_holds_everything() -> None:
    assert weights(LLAMA) == (16_060_522_496,)


def test_an_engine_has_the_whole_embedding_on_each_rank_and_pytorch_a_part() -> None:
    assert weights(LLAMA, tensor_parallel=4) == (EMBEDDING + NORMS + LAYERS // 4 + EMBEDDING // 4,)
    assert weights(LLAMA, tensor_parallel=4, backend="pytorch") == (NORMS + LAYERS // 4 + EMBEDDING // 2,)


def test_keys_of_fewer_heads_than_ranks_are_replicated() -> None:
    keys = 2 * 32 * 1024 * 4096 * 2
    expected = NORMS + (LAYERS - keys) // 16 + keys // 8 + 2 * EMBEDDING // 16
    assert weights(LLAMA, tensor_parallel=16, backend="pytorch") == (expected,)


def test_pipeline_stages_have_their_layers_and_the_ends_embedding_and_head() -> None:
    first, middle, last = weights(CheckpointSizes.from_config(llama(num_hidden_layers=5)), pipeline_parallel=3)
    layer = (LAYERS + NORMS - 4096 * 2) // 32
    assert (first, middle, last) == (EMBEDDING + 2 * layer + 4096 * 2, 2 * layer, layer + EMBEDDING)


def test_a_tied_head_is_a_second_copy_in_an_engine_only() -> None:
    tied = CheckpointSizes.from_config(llama(tie_word_embeddings=True))
    assert tied.tied
    assert weights(tied) == (16_060_522_496,)
    assert weights(tied, backend="pytorch") == (16_060_522_496 - EMBEDDING,)


@pytest.mark.parametrize(("quantization", "bits"), [("fp8", 8), ("awq", 4.125), ("nvfp4", 4.5), ("none", 16)])
def test_quantising_changes_the_matrices_of_layers_only(quantization: str, bits: float) -> None:
    assert weights(LLAMA, quantization=quantization) == (int(LAYERS * bits / 16) + NORMS + 2 * EMBEDDING,)


def test_unquantised_weights_take_the_type_that_is_asked_for() -> None:
    assert weights(LLAMA, dtype="float32") == (2 * 16_060_522_496,)
    assert weights(CheckpointSizes.from_config(llama(torch_dtype="float32")), dtype="float16") == (16_060_522_496,)


def test_what_is_quantised_already_stays_as_it_is_stored() -> None:
    stored = replace(LLAMA, quantization="FP8", exact=True)
    assert weights(stored, quantization="awq", dtype="float32") == (16_060_522_496,)


def test_counted_weights_of_a_quantised_checkpoint_take_its_format() -> None:
    qwen = CheckpointSizes.from_config(qwen3_32b_fp8())
    assert qwen.quantization == "FP8_BLOCK_SCALES"
    assert 31.9 < weights(qwen)[0] / (1 << 30) < 32.1
    # https://huggingface.co/openai/gpt-oss-20b: 13.8 GB of files
    assert 11.5e9 < weights(CheckpointSizes.from_config(gpt_oss()))[0] < 14e9


def test_an_unknown_stored_format_counts_as_it_was_before() -> None:
    assert weights(replace(LLAMA, quantization="bitsandbytes")) == (16_060_522_496,)


def test_adapters_take_rank_times_inputs_and_outputs() -> None:
    slots = LoraSlots(adapters=2, rank=8, modules=("attn_q", "attn_v"))
    assert lora_bytes(LLAMA.shape, slots, 1) == 2 * 2 * 8 * 32 * (4096 + 4096 + 4096 + 1024)
    assert lora_bytes(LLAMA.shape, slots, 4, 2) == 2 * 2 * 8 * 16 * (4096 + 1024 + 4096 + 256)
    assert lora_bytes(LLAMA.shape, None, 1) == 0
    assert lora_bytes(LLAMA.shape, LoraSlots(modules=("unheard",)), 1) > 0


@pytest.mark.parametrize(
    ("module", "whole", "split"),
    [
        ("attn_q", 4096, 2048),
        ("attn_k", 4096, 1024),
        ("attn_v", 4096, 1024),
        ("attn_qkv", 4096, 2048 + 2 * 1024),
        ("attn_dense", 4096, 2048),
        ("mlp_h_to_4h", 4096, 14336),
        ("mlp_gate", 4096, 14336),
        ("mlp_4h_to_h", 4096, 14336),
        ("mlp_gate_up", 4096, 2 * 14336),
        ("unheard", 4096, 14336),
    ],
)
def test_a_module_has_a_whole_matrix_and_a_split_one(module: str, whole: int, split: int) -> None:
    shape = replace(LLAMA.shape, head_dim=64, num_kv_heads=16)
    slots = LoraSlots(adapters=1, rank=1, modules=(module,))
    assert lora_bytes(shape, slots, 4) == 2 * 32 * (whole + split // 4)


def test_heads_that_are_not_known_count_as_none() -> None:
    shape = replace(LLAMA.shape, num_heads=None, num_kv_heads=None, head_dim=128)
    assert lora_bytes(shape, LoraSlots(1, 1, ("attn_qkv",)), 1) == 2 * 32 * 4096


def test_weights_are_loaded_in_the_type_of_the_config_whatever_the_files_have() -> None:
    wide = replace(LLAMA, shape=replace(LLAMA.shape, dtype="float32"), exact=True)
    assert weights(wide) == (2 * 16_060_522_496,)


def test_what_was_counted_beside_quantised_matrices_takes_the_type_that_is_asked_for() -> None:
    counted = replace(LLAMA, quantization="FP8", exact=False)
    assert weights(counted, dtype="float32") == (LAYERS // 2 + 2 * (NORMS + 2 * EMBEDDING),)
