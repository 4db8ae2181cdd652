from __future__ import annotations

from dataclasses import replace
from typing import Any

from djl_trtllm.sizing.advice import warnings_of
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.estimate import GIB, Conditions, estimate
from tests.sizing.configs import gpt_oss, llama

LLAMA = replace(CheckpointSizes.from_config(llama(), "llama"), exact=True)


def said(sizes: CheckpointSizes = LLAMA, memory: float = 80, **conditions: Any) -> str:
    return "\n".join(warnings_of(estimate(sizes, Conditions(int(memory * GIB), **conditions))))


def test_nothing_is_said_of_what_fits() -> None:
    assert said() == ""


def test_what_does_not_fit_is_said_with_its_numbers() -> None:
    text = said(memory=12)
    assert "llama does not fit: 15.0 GiB of weights, 0.6 GiB of logits, 2.5 GiB of runtime on each of 1 GPUs" in text
    assert "12.0 GiB" in text
    assert "option.tensor_parallel_degree" in text
    assert "KV cache has" not in text


def test_a_prompt_longer_than_the_recommended_number_needs_chunks() -> None:
    assert "below the longest prompt of 30000 tokens" in said(max_input_len=30_000)


def test_heads_that_do_not_divide_are_named() -> None:
    assert "32 attention heads cannot be divided among 3 GPUs" in said(tensor_parallel=3)


def test_more_groups_than_layers_are_named() -> None:
    assert "32 layers cannot be divided among 33 groups of GPUs" in said(pipeline_parallel=33)
    assert "layers cannot" not in said(pipeline_parallel=32)


def test_a_cache_without_room_for_one_sequence_is_named_as_such() -> None:
    found = estimate(LLAMA, Conditions(int(22.5 * GIB), max_input_len=7500, max_output_len=512))
    assert "does not hold one sequence of 8012 tokens" in "\n".join(warnings_of(found, 20_000))


def test_a_quantised_checkpoint_is_not_quantised_again() -> None:
    assert "stored as FP8 already" in said(replace(LLAMA, quantization="FP8"), quantization="awq")


def test_counted_weights_are_named_as_such() -> None:
    assert "counted from config.json" in said(replace(LLAMA, exact=False))
    assert "no weights are counted" in said(CheckpointSizes.from_config({}))


def test_a_small_cache_is_named_with_the_sequences_it_holds() -> None:
    assert "the KV cache has" in said(memory=22.5)
    assert "sequences of 4096 tokens" in said(memory=22.5)


def test_windows_that_nothing_uses_are_named() -> None:
    sizes = replace(CheckpointSizes.from_config(gpt_oss()), exact=True)
    assert "option.max_attention_window" in said(sizes)
    assert said(sizes, attention_windows=(128, 0)) == ""
