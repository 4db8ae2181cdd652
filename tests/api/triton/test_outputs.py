from __future__ import annotations

from djl_trtllm.api.triton.outputs import (
    ALWAYS,
    NOT_PRODUCED,
    OUTPUTS,
    SequenceOutput,
    index_tensor,
    output_tensors,
    sequence_output,
)
from djl_trtllm.api.triton.tensors import Tensor
from djl_trtllm.request import Token
from tests.api.scripts import check_golden

TOKENS = [Token(1, "a", -0.5, False), Token(2, "b", None, False)]


def test_every_output_of_the_ensemble_is_there_or_known_not_to_be() -> None:
    names = {output.name for output in OUTPUTS}
    assert len(names | NOT_PRODUCED) == 17
    assert set(ALWAYS) < names


def test_log_probabilities_are_0_unless_they_are_wanted() -> None:
    assert sequence_output("ab", TOKENS, logprobs=False, cumulative=-1.0) == SequenceOutput("ab", [0.0, 0.0], 0.0)
    assert sequence_output("ab", TOKENS, logprobs=True, cumulative=-1.0) == SequenceOutput("ab", [-0.5, 0.0], -1.0)
    assert sequence_output("ab", TOKENS, logprobs=True, cumulative=None).cumulative == 0.0


def test_a_text_for_each_sequence_and_rows_of_equal_length() -> None:
    sequences = [SequenceOutput("a", [-1.0], -1.0), SequenceOutput("bc", [-2.0, -3.0], -5.0)]
    log_probabilities = [-1.0, 0.0, -2.0, -3.0]
    assert output_tensors(sequences) == [
        Tensor("text_output", "BYTES", (2,), ["a", "bc"]),
        Tensor("cum_log_probs", "FP32", (1, 2), [-1.0, -5.0]),
        Tensor("output_log_probs", "FP32", (1, 2, 2), log_probabilities),
    ]
    assert [tensor.shape for tensor in output_tensors(sequences, 2)] == [(2,), (2, 1), (2, 1, 2)]


def test_an_index_has_a_batch_dimension() -> None:
    assert index_tensor("batch_index", 3) == Tensor("batch_index", "INT32", (1, 1), [3])


def test_the_outputs_are_as_stored() -> None:
    lines = [f"{each.name} {each.datatype} {each.dims}" for each in OUTPUTS]
    check_golden("triton-outputs", "\n".join([*lines, "not produced:", *sorted(NOT_PRODUCED), ""]).encode())
