"""The executor: one token of the prompt for each request and iteration."""

from __future__ import annotations

from typing import Any

from djl_trtllm.executor.protocol import Limits, Stats, Step, Submit
from djl_trtllm.request import FinishReason


class EchoExecutor:
    """See `djl_trtllm.executor.process.Executor`."""

    features = frozenset({"max_new_tokens"})

    def __init__(self, *, max_sequences: int, max_seq_len: int) -> None:
        self.limits = Limits(max_sequences, kv_blocks=0, block_size=32, max_seq_len=max_seq_len)
        self.details: dict[str, Any] = {}
        self._requests: dict[int, Submit] = {}
        self._news = Step()
        self._echoed: dict[int, int] = {}

    @property
    def busy(self) -> bool:
        return bool(self._requests or self._news.has_news)

    def submit(self, request: Submit) -> None:
        self._requests[request.request_id] = request
        self._echoed[request.request_id] = 0

    def cancel(self, request_id: int) -> None:
        if self._requests.pop(request_id, None) is not None:
            self._news.end(request_id, FinishReason.CANCELLED)

    def step(self) -> Step:
        step, self._news = self._news, Step()
        for request_id, request in list(self._requests.items()):
            echoed = self._echoed[request_id]
            step.add(request_id, [request.prompt_ids[echoed % len(request.prompt_ids)]])
            self._echoed[request_id] += 1
            if echoed + 1 == request.sampling.max_new_tokens:
                step.end(request_id, FinishReason.LENGTH)
                del self._requests[request_id]
        return step

    def stats(self) -> Stats:
        return Stats(running=len(self._requests))
