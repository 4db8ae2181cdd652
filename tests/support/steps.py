"""What a step of an engine process brings, request by request."""

from __future__ import annotations

from djl_trtllm.executor.protocol import Delta, Step


def deltas_of(step: Step | list[Delta]) -> list[Delta]:
    """The news of each request."""
    if isinstance(step, list):
        return step
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
