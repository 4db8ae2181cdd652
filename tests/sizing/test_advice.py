from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

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


@pytest.mark.parametrize(
    ("cache", "sequences", "few"),
    [(10 * GIB - 1, 31, True), (10 * GIB, 31, False), (10 * GIB - 1, 32, False), (10 * GIB - 1, 1, True)],
)
def test_a_small_cache_for_few_sequences_is_said(cache: int, sequences: int, few: bool) -> None:
    narrow: Any = SimpleNamespace(
        conditions=Conditions(1, max_input_len=5),
        sizes=LLAMA,
        max_num_tokens=1,
        recommended=9,
        kv_bytes=lambda tokens: cache,
        sequences_of=lambda length, tokens: sequences,
    )
    assert ("requests will wait" in "".join(warnings_of(narrow))) == few


def test_parts_below_a_twentieth_of_a_gib_are_not_listed() -> None:
    large: Any = SimpleNamespace(
        conditions=Conditions(GIB),
        sizes=LLAMA,
        max_num_tokens=0,
        weights=9 * GIB,
        logits=GIB // 20,
        communication=GIB // 20 + 1,
        overhead=0,
    )
    (text,) = warnings_of(large, 5)
    assert "does not fit: 9.0 GiB of weights, 0.1 GiB of communication on each" in text


def test_a_prompt_as_long_as_the_number_needs_no_chunks() -> None:
    fitting = estimate(LLAMA, Conditions(80 * GIB, max_input_len=3000))
    assert not any("longest prompt" in text for text in warnings_of(fitting, 3000))
    assert any("longest prompt" in text for text in warnings_of(fitting, 2999))
