"""Requests that end before their time: cancelled, late, with their executor, or for their consumer."""

from __future__ import annotations

import pytest

from djl_trtllm.errors import GenerationError, RequestTimeoutError
from djl_trtllm.executor.protocol import Delta
from djl_trtllm.logs.context import request_id_of
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, Origin, OutputChunk
from tests.batching.helpers import Bench, Recorder

LENGTH, CANCELLED = FinishReason.LENGTH, FinishReason.CANCELLED


@pytest.fixture
def bench(tokenizer: Tokenizer) -> Bench:
    return Bench(tokenizer)


# -- cancelling --------------------------------------------------------------------------------------------------------


def test_a_waiting_request_is_cancelled_at_once(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=1)
    bench.submit()
    waiting, consumer = bench.submit()
    bench.batch.cancel(waiting)
    assert consumer.finished().reason is FinishReason.CANCELLED
    assert (bench.batch.waiting, bench.batch.running, bench.executor.cancelled) == (0, 1, [])


def test_a_cancelled_head_of_the_queue_lets_the_next_in(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, kv_blocks=10)
    bench.submit([5] * 40, max_new_tokens=10)
    large, _ = bench.submit([5] * 40, max_new_tokens=10)
    bench.submit([5], max_new_tokens=1)
    assert bench.executor.ids == [0]
    bench.batch.cancel(large)
    assert bench.executor.ids == [0, 2]


def test_cancelling_twice_and_after_the_end_does_nothing(bench: Bench) -> None:
    generation, consumer = bench.submit()
    bench.step(Delta(0, [5]))
    bench.batch.cancel(generation)
    bench.batch.cancel(generation)
    bench.step(Delta(0, [6]), Delta(0, [], finish=CANCELLED))
    bench.batch.cancel(generation)
    assert bench.executor.cancelled == [0]
    assert consumer.finished().reason is FinishReason.CANCELLED
    assert consumer.ids() == [5]
    assert bench.statistics.finished == {FinishReason.CANCELLED: 1}
    assert bench.batch.idle


def test_a_request_that_ends_while_its_cancel_is_under_way_is_cancelled_once(bench: Bench) -> None:
    generation, consumer = bench.submit()
    bench.batch.cancel(generation)
    bench.step(Delta(0, [5], finish=LENGTH))
    assert consumer.finished().reason is FinishReason.CANCELLED
    assert bench.batch.idle


def test_cancelling_reaches_every_sequence_wherever_it_is(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=2)
    generation, consumer = bench.submit(n=4, do_sample=True)
    bench.step(Delta(0, [5], finish=LENGTH))
    bench.batch.cancel(generation)
    reasons = [consumer.finished(index).reason for index in range(4)]
    assert reasons == [FinishReason.LENGTH, *[FinishReason.CANCELLED] * 3]
    assert bench.executor.cancelled == [1, 2]
    assert (bench.batch.running, bench.batch.waiting) == (2, 0)


def test_a_request_expires_when_it_is_older_than_the_timeout_and_not_before(bench: Bench) -> None:
    generation, consumer = bench.submit()
    bench.now += 10
    bench.batch.expire(10)
    assert not generation.done
    bench.now += 0.5
    bench.batch.expire(10)
    assert str(consumer.finished().error) == "the request did not finish within predict_timeout=10 seconds"


def test_an_expired_head_of_the_queue_lets_the_next_in(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, kv_blocks=10)
    bench.submit([5] * 40, max_new_tokens=10)
    bench.submit([5] * 40, max_new_tokens=10)
    bench.now += 8
    bench.submit([5], max_new_tokens=1)
    bench.now += 3
    assert bench.executor.ids == [0]
    bench.batch.expire(10)
    assert bench.executor.ids == [0, 2]


def test_late_requests_expire_and_others_do_not(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=1)
    _, running = bench.submit()
    _, waiting = bench.submit()
    bench.now += 8
    _, young = bench.submit()
    bench.now += 3
    bench.batch.expire(10)
    for consumer in (running, waiting):
        assert consumer.finished().reason is FinishReason.ERROR
        assert isinstance(consumer.finished().error, RequestTimeoutError)
    assert young.updates == []
    assert bench.executor.cancelled == [0]
    bench.batch.expire(10)
    bench.step(Delta(0, [], finish=CANCELLED))
    assert bench.executor.ids == [0, 2]


def test_a_failed_executor_ends_every_request_once(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=3)
    consumers = [bench.submit(n=2, do_sample=True)[1] for _ in range(3)]
    gone, cancelled = bench.submit()
    bench.batch.cancel(gone)
    bench.step(Delta(0, [5]), Delta(1, [5], finish=LENGTH))
    error = GenerationError("gone")
    bench.batch.fail(error)
    assert bench.batch.idle
    ends = [consumer.finished(index) for consumer in consumers for index in range(2)]
    assert [end.reason for end in ends] == [FinishReason.ERROR, FinishReason.LENGTH, *[FinishReason.ERROR] * 4]
    assert all(end.error is error for end in ends if end.reason is FinishReason.ERROR)
    assert cancelled.finished().reason is FinishReason.CANCELLED
    bench.batch.fail(error)
    bench.step(Delta(0, [5], finish=LENGTH))
    assert sum(bench.statistics.finished.values()) == 7


# -- a consumer that raises --------------------------------------------------------------------------------------------


class Broken(Recorder):
    def __call__(self, update: OutputChunk) -> None:
        super().__call__(update)
        raise ZeroDivisionError


@pytest.mark.parametrize("finish", [None, LENGTH])
def test_a_consumer_that_raises_is_cancelled_and_disturbs_nobody(bench: Bench, finish: FinishReason | None) -> None:
    generation, broken = bench.submit(n=2, do_sample=True, consumer=Broken())
    _, other = bench.submit()
    bench.step(Delta(0, [5], finish=finish), Delta(1, [6]), Delta(2, [7]))
    assert len(broken.updates) == 1
    assert generation.done
    assert other.ids() == [7]
    assert bench.executor.cancelled == ([1] if finish else [0, 1])
    bench.step(Delta(1, [], finish=CANCELLED), Delta(2, [8], finish=LENGTH))
    if not finish:
        bench.step(Delta(0, [], finish=CANCELLED))
    assert other.finished().reason is FinishReason.LENGTH
    assert bench.batch.idle


def test_the_line_of_a_consumer_that_raises_has_the_id_of_its_request(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.submit(consumer=Broken(), origin=Origin("asked-7"))
    bench.step(Delta(0, [5]))
    assert [request_id_of(line) for line in caplog.records] == ["asked-7"]


def test_consumers_that_raise_do_not_stop_a_failure_from_reaching_the_others(bench: Bench) -> None:
    bench.submit(n=2, do_sample=True, consumer=Broken())
    _, other = bench.submit()
    bench.batch.fail(GenerationError("gone"))
    assert other.finished().reason is FinishReason.ERROR
    assert bench.batch.idle
