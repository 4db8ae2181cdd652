"""The outputs of Triton's TensorRT-LLM models, and the tensors of a response.

Source: `ensemble/config.pbtxt` of tensorrtllm_backend v0.19, and what its engine model writes: `text_output` has an
element for each sequence and no batch dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from djl_trtllm.api.triton.tensors import Tensor
from djl_trtllm.request import Token


class Output(NamedTuple):
    """One output. `dims` have no batch dimension, -1 is any size."""

    name: str
    datatype: str
    dims: tuple[int, ...]


OUTPUTS = (
    Output("text_output", "BYTES", (-1,)),
    Output("cum_log_probs", "FP32", (-1,)),
    Output("output_log_probs", "FP32", (-1, -1)),
    Output("batch_index", "INT32", (1,)),
    Output("sequence_index", "INT32", (1,)),
)
"""What responses have. The indices are those of a response that is one of several."""

ALWAYS = ("text_output", "cum_log_probs", "output_log_probs")
"""The outputs of a response to a request that names none."""

NOT_PRODUCED = frozenset(
    {
        "context_logits",
        "generation_logits",
        "kv_cache_alloc_new_blocks",
        "kv_cache_alloc_total_blocks",
        "kv_cache_reused_blocks",
        "arrival_time_ns",
        "first_scheduled_time_ns",
        "first_token_time_ns",
        "last_token_time_ns",
        "acceptance_rate",
        "total_accepted_draft_tokens",
        "total_draft_tokens",
    }
)
"""Outputs that need inputs which are refused."""


class SequenceOutput(NamedTuple):
    """The text of a sequence, or a part of it, with the log-probabilities of its tokens."""

    text: str
    logprobs: list[float]
    cumulative: float = 0.0


def sequence_output(text: str, tokens: Sequence[Token], *, logprobs: bool, cumulative: float | None) -> SequenceOutput:
    """Without `logprobs` a log-probability for each token is there and 0, as in Triton.

    So is one that the engine did not report: a tensor has no null.
    """
    if not logprobs:
        return SequenceOutput(text, [0.0] * len(tokens))
    return SequenceOutput(text, [token.logprob or 0.0 for token in tokens], cumulative or 0.0)


def output_tensors(sequences: Sequence[SequenceOutput], batch: int = 1) -> list[Tensor]:
    """The tensors of a whole response with the sequences of `batch` prompts, one prompt's after the other.

    Rows of log-probabilities that are shorter than others are filled up with 0.
    """
    count = len(sequences) // batch
    longest = max(len(sequence.logprobs) for sequence in sequences)
    rows = [logprob for each in sequences for logprob in (*each.logprobs, *[0.0] * (longest - len(each.logprobs)))]
    return [
        Tensor("text_output", "BYTES", (len(sequences),), [sequence.text for sequence in sequences]),
        Tensor("cum_log_probs", "FP32", (batch, count), [sequence.cumulative for sequence in sequences]),
        Tensor("output_log_probs", "FP32", (batch, count, longest), rows),
    ]


def index_tensor(name: str, index: int) -> Tensor:
    """`batch_index` or `sequence_index` of a response that is one of several."""
    return Tensor(name, "INT32", (1, 1), [index])
