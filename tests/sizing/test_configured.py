"""What options say of memory."""

from __future__ import annotations

import pytest

from djl_trtllm.model.shape import ModelShape
from djl_trtllm.sizing.conditions import LoraSlots
from djl_trtllm.sizing.configured import conditions_of, weight_dtype
from tests.engines.helpers import configured
from tests.sizing.configs import llama

SHAPE = ModelShape.from_config(llama())


def test_lengths_end_at_the_models_context() -> None:
    found = conditions_of(configured(max_input_len=8000, max_output_len=4000), SHAPE, gpu_memory=1)
    assert (found.max_input_len, found.max_output_len) == (8000, 192)
    found = conditions_of(configured(max_input_len=100, max_seq_len=300), SHAPE, gpu_memory=1)
    assert (found.max_input_len, found.max_output_len) == (100, 200)
    found = conditions_of(configured(max_input_len=9000), SHAPE, gpu_memory=1)
    assert (found.max_input_len, found.max_output_len) == (8192, 1)


def test_the_engine_is_made_for_max_num_sequences_else_for_the_batch() -> None:
    assert conditions_of(configured(), SHAPE, gpu_memory=1).max_batch_size == 32
    assert conditions_of(configured(max_num_sequences=64), SHAPE, gpu_memory=1).max_batch_size == 64


def test_machine_and_degrees_are_passed_on() -> None:
    found = conditions_of(configured(), SHAPE, gpu_memory=7, tensor_parallel=4, pipeline_parallel=2, compiled=False)
    assert (found.gpu_memory, found.tensor_parallel, found.pipeline_parallel, found.backend) == (7, 4, 2, "pytorch")
    assert conditions_of(configured(max_beam_width=3), SHAPE, gpu_memory=1).max_beam_width == 3


@pytest.mark.parametrize(
    ("options", "quantization", "kv_dtype", "fraction"),
    [
        ({}, None, None, 0.95),
        ({"quantize": "fp8", "kv_cache_dtype": "fp8"}, "fp8", "fp8", 0.95),
        ({"quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}, "NVFP4", "nvfp4", 0.95),
        ({"kv_cache_dtype": "int8"}, None, "int8", 0.95),
        ({"kv_cache_dtype": "fp16", "kv_cache_free_gpu_mem_fraction": "0.8"}, None, None, 0.8),
    ],
)
def test_formats_and_fraction(
    options: dict[str, str], quantization: str | None, kv_dtype: str | None, fraction: float
) -> None:
    found = conditions_of(configured(**options), SHAPE, gpu_memory=1)
    assert (found.quantization, found.kv_dtype, found.fraction) == (quantization, kv_dtype, fraction)


@pytest.mark.parametrize(
    ("dtype", "stored", "capability", "compiled", "expected"),
    [
        ("auto", "bfloat16", (9, 0), True, "bfloat16"),
        ("auto", "bfloat16", None, True, "bfloat16"),
        ("auto", "bfloat16", (7, 5), True, "float16"),
        ("auto", "float32", (9, 0), True, "float16"),
        ("auto", "float32", (9, 0), False, "float32"),
        ("fp32", "bfloat16", (9, 0), True, "float32"),
        ("bf16", "float16", (7, 5), True, "bfloat16"),
        ("auto", None, (9, 0), True, None),
    ],
)
def test_the_type_of_weights_is_what_tensorrt_llm_makes_of_auto(
    dtype: str, stored: str | None, capability: tuple[int, int] | None, compiled: bool, expected: str | None
) -> None:
    shape = ModelShape(dtype=stored)
    assert weight_dtype(configured(dtype=dtype), shape, capability, compiled=compiled) == expected


def test_windows_and_adapters_are_passed_on() -> None:
    found = conditions_of(configured(), SHAPE, gpu_memory=1)
    assert (found.attention_windows, found.lora) == (None, None)
    options = {"max_attention_window": "512,1024", "enable_lora": "true", "max_lora_rank": "8"}
    found = conditions_of(configured(**options), SHAPE, gpu_memory=1)
    assert (found.attention_windows, found.lora) == ((512, 1024), LoraSlots(adapters=0, rank=8, free_share=0.05))
    found = conditions_of(configured(**options, lora_target_modules="attn_q"), SHAPE, gpu_memory=1)
    assert found.lora == LoraSlots(adapters=0, rank=8, free_share=0.05, modules=("attn_q",))


def test_a_model_runs_as_an_engine_unless_it_is_said_otherwise() -> None:
    assert conditions_of(configured(), SHAPE, gpu_memory=1).backend == "tensorrt"
    assert conditions_of(configured(), SHAPE, gpu_memory=1, compiled=False).backend == "pytorch"
