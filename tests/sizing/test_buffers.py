from __future__ import annotations

import pytest

from djl_trtllm.sizing import buffers
from djl_trtllm.sizing.buffers import GIB, MIB
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.conditions import Conditions
from tests.sizing.configs import deepseek, gpt_oss, llama

LLAMA = CheckpointSizes.from_config(llama())


@pytest.mark.parametrize(("ranks", "factor"), [(1, 11), (2, 6.5), (3, 6.5), (4, 5), (8, 5), (16, 5)])
def test_pytorch_activations_are_those_of_aiconfigurator(ranks: int, factor: float) -> None:
    assert buffers.pytorch_activations(LLAMA, ranks, 8192) == 2 * 8192 * 4096 * factor


def test_experts_take_twice_as_much_and_a_workspace() -> None:
    sizes = CheckpointSizes.from_config(gpt_oss())
    width = 64 * 64
    assert buffers.pytorch_activations(sizes, 1, 8192) == 2 * 8192 * width * 22 + 8192 * width * 32 * 4 * 4 // 128
    assert buffers.pytorch_activations(CheckpointSizes.from_config(deepseek()), 8, 1) >= 70 * MIB


def test_few_tokens_take_70_mib() -> None:
    assert buffers.pytorch_activations(LLAMA, 1, 1) == 70 * MIB


def test_an_engine_has_residuals_on_every_rank_and_splits_the_rest() -> None:
    one = buffers.engine_activations_per_token(LLAMA, 1, 1.0)
    four = buffers.engine_activations_per_token(LLAMA, 4, 1.0)
    assert one == 2 * (2 * 14336 + 4 * 4096 + 48 * 128)
    assert four == 2 * (2 * 14336 / 4 + 4 * 4096 + 12 * 128)
    assert buffers.engine_activations_per_token(LLAMA, 4, 2.0) == 2 * four


def test_an_engine_with_experts_has_an_mlp_for_each_that_a_token_goes_to() -> None:
    mixtral = CheckpointSizes.from_config(llama(num_local_experts=8, num_experts_per_tok=2))
    expected = 2 * 2 * (2 * 2 * 14336 + 4 * 4096 + 48 * 128)
    assert buffers.engine_activations_per_token(mixtral, 1, 1.0) == expected


def test_logits_of_the_whole_batch_are_kept_five_times_by_an_engine() -> None:
    assert buffers.logits(LLAMA, Conditions(1, max_batch_size=256)) == 5 * 4 * 256 * 128256
    assert buffers.logits(LLAMA, Conditions(1, max_batch_size=8, max_beam_width=4)) == 5 * 4 * 32 * 128256
    assert buffers.logits(LLAMA, Conditions(1, backend="pytorch")) == 0


@pytest.mark.parametrize(
    ("tensor", "pipeline", "mib"), [(1, 1, 0), (2, 1, 342), (3, 1, 342), (4, 1, 392), (1, 4, 342), (8, 1, 392)]
)
def test_ranks_need_buffers_to_communicate(tensor: int, pipeline: int, mib: int) -> None:
    conditions = Conditions(1, tensor_parallel=tensor, pipeline_parallel=pipeline, backend="pytorch")
    assert buffers.communication(conditions) == mib * MIB


def test_eight_ranks_of_an_engine_and_its_runtime_take_what_was_fitted() -> None:
    constants = buffers.EngineConstants(scale=1.0, overhead=5, eight_ranks=7)
    assert buffers.communication(Conditions(1, tensor_parallel=8), constants) == 7
    assert buffers.communication(Conditions(1, tensor_parallel=4), constants) == 392 * MIB
    assert buffers.overhead(Conditions(1), constants) == 5
    assert 3 * GIB < buffers.overhead(Conditions(1, backend="pytorch"), constants) < 3.5 * GIB


def test_the_constants_of_an_engine_are_the_fitted_ones() -> None:
    assert buffers.EngineConstants(scale=2.4, overhead=2560 * 1024**2, eight_ranks=2816 * 1024**2) == buffers.FITTED
    assert (MIB, GIB) == (1024**2, 1024**3)


def test_a_model_without_a_vocabulary_has_no_logits() -> None:
    assert buffers.logits(CheckpointSizes.from_config({}), Conditions(1)) == 0
