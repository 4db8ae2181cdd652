"""Log-probabilities, which are all the same."""

from __future__ import annotations

from typing import Any

from .results import Logprob


def likeliest(token_id: int, params: Any) -> dict[int, Logprob]:
    """The likeliest tokens only: a sampled one need not be among them (TorchSampler of about 1.2, by torch.topk)."""
    if params._greedy_decoding or token_id % 2:
        return logprobs(token_id, params)
    return {
        other: Logprob(-0.1, rank + 1) for rank, other in enumerate(range(token_id + 1, token_id + 1 + params.logprobs))
    }


def logprobs(token_id: int, params: Any) -> dict[int, Logprob]:
    return of_most(token_id, params.logprobs or 1)


def of_most(token_id: int, count: int) -> dict[int, Logprob]:
    """The token's own, and of as many others as make `count`."""
    others = [other for other in range(count + 1) if other != token_id][: count - 1]
    return {token_id: Logprob(-0.5, 1), **{other: Logprob(-2.0, rank + 2) for rank, other in enumerate(others)}}
