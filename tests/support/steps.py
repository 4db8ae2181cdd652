"""What a step of an engine process brings, request by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from djl_trtllm.executor.protocol import Logprob, Refusal, Stats, Step
from djl_trtllm.request import FinishReason


@dataclass
class Delta:
    """The news of one request: those of a step, row by row, as tests read and write them."""

    request_id: int
    token_ids: list[int]
    logprobs: list[Logprob] | None = None
    finish: FinishReason | None = None
    error: str | Refusal | None = None
    cached_tokens: int = 0
    accepted_tokens: int | None = None
    drafted_tokens: int | None = None


def unreadable(request_id: int, patch: pytest.MonkeyPatch) -> None:
    """The engine gives this request more log-probabilities than tokens."""

    def add(step: Step, of: int, token_ids: Sequence[int], logprobs: Sequence[Logprob] | None = None) -> None:
        whole(step, of, token_ids, [-0.5] * (len(token_ids) + 1) if of == request_id else logprobs)

    whole = Step.add
    patch.setattr(Step, "add", add)


class Output:
    """What came of one request."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    @property
    def ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def end(self) -> Delta:
        """The terminal delta: there is one, and it is the last."""
        assert [bool(delta.finish) for delta in self.deltas] == [False] * (len(self.deltas) - 1) + [True]
        return self.deltas[-1]


def step_of(deltas: Sequence[Delta], stats: Stats = Stats()) -> Step:  # noqa: B008  immutable
    """A step with this news."""
    step = Step(stats=stats)
    for delta in deltas:
        if delta.token_ids:
            step.add(delta.request_id, delta.token_ids, delta.logprobs)
        if delta.finish is not None:
            step.end(delta.request_id, delta.finish, delta.error, delta.drafted_tokens)
        if delta.accepted_tokens is not None:
            step.accepted[delta.request_id] = delta.accepted_tokens
        if delta.cached_tokens:
            step.cached[delta.request_id] = delta.cached_tokens
    return step


def deltas_of(step: Step) -> list[Delta]:
    """The news of each request."""
    found: dict[int, Delta] = {}
    # A row that does not want log-probabilities has None beside those that do.
    wanted = {row[0] for row in step.rows() if any(logprob is not None for logprob in row[2] or ())}
    for request_id, token_ids, logprobs in step.rows():
        delta = found.setdefault(request_id, Delta(request_id, []))
        delta.token_ids += token_ids
        if logprobs is not None and (request_id in wanted or not wanted):
            delta.logprobs = [*(delta.logprobs or ()), *logprobs]
        delta.cached_tokens = step.cached.get(request_id, 0)
    for end in step.ends:
        delta = found.setdefault(end.request_id, Delta(end.request_id, []))
        delta.finish, delta.error = end.finish, end.error
    return list(found.values())
