"""Stops that the engine is not given: the server finds them and cancels."""

from __future__ import annotations

import collections

import msgspec
import psutil
import pytest

from djl_trtllm.backends.scripted.executor import ScriptedExecutor
from djl_trtllm.batching.limits import BatchLimits
from djl_trtllm.batching.rolling_batch import RollingBatch
from djl_trtllm.batching.statistics import Statistics
from djl_trtllm.executor.protocol import Delta, Step, Submit
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, GenerationRequest, OutputChunk, Sampling
from tests.batching.helpers import Bench

REQUESTS = 100_000
FLAT = 8 << 20
"""Bytes; a leak of 100 bytes for each request is more."""


def test_a_stop_id_ends_the_request_at_once_and_its_slot_is_free_when_the_engine_says_so(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=1, stops=False)
    _, first = bench.submit(stop_token_ids=(40,))
    _, second = bench.submit()
    assert bench.executor.submitted[0].stop_token_ids == []
    bench.step(Delta(0, [5, 40, 6]))
    assert (first.ids(), first.finished().reason) == ([5, 40], FinishReason.STOP)
    assert (bench.executor.cancelled, bench.executor.ids) == ([0], [0])
    bench.step(Delta(0, [], finish=FinishReason.CANCELLED))
    assert bench.executor.ids == [0, 1]
    bench.step(Delta(1, [5, min(tokenizer.end_ids)]))
    assert second.finished().reason is FinishReason.END_TOKEN


class UnstoppedExecutor(ScriptedExecutor):
    """The scripted executor in this process, which is never given a stop."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = msgspec.structs.replace(self.limits, stops=False)

    def submit(self, request: Submit) -> None:
        assert not request.stop
        assert not request.stop_token_ids
        super().submit(request)


@pytest.mark.slow
def test_100_000_requests_with_stops_take_no_memory(tokenizer: Tokenizer) -> None:
    """What TensorRT-LLM #5509 was measured with: host memory while requests with stops come and go."""
    executor = UnstoppedExecutor()
    batch = RollingBatch(executor, tokenizer, BatchLimits(64, 64, 50, 40, 60), Statistics())
    prompt = tokenizer.encode("the wolf ran", False)
    ended: collections.Counter[str] = collections.Counter()

    def count(chunk: OutputChunk) -> None:
        if chunk.finished is not None:
            ended[chunk.finished.stop_sequence or "id"] += 1

    warm = 0
    for number in range(REQUESTS):
        stops = {"stop": ("ran", f"cat {number}")} if number % 2 else {"stop_token_ids": (prompt[-1],)}
        batch.admit(1)
        batch.submit(GenerationRequest(prompt_ids=prompt, sampling=Sampling(30), **stops), prompt, count, None)
        while batch.waiting or (number == REQUESTS - 1 and executor.busy):
            batch.process([Step(executor.step(), executor.stats())])
        if number == REQUESTS // 5:
            warm = psutil.Process().memory_info().rss
    assert ended == {"ran": REQUESTS // 2, "id": REQUESTS // 2}
    assert psutil.Process().memory_info().rss - warm < FLAT
