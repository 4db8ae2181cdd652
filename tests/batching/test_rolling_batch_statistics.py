"""What the rolling batch counts."""

from __future__ import annotations

import time

import pytest

from djl_trtllm.batching.request_record import RequestRecord
from djl_trtllm.errors import GenerationError
from djl_trtllm.executor.protocol import Delta
from djl_trtllm.logs.context import request_id_of
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import Adapter, FinishReason, Origin, OutputChunk
from tests.batching.helpers import Bench, Recorder

LENGTH = FinishReason.LENGTH


def test_times_are_measured_on_the_clock(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=1)
    bench.submit()
    bench.submit()
    bench.now += 2
    bench.step(Delta(0, [5]))
    bench.now += 3
    bench.step(Delta(0, [6, 7, 8], finish=LENGTH, cached_tokens=2))
    statistics = bench.statistics
    assert (statistics.requests, statistics.prompt_tokens, statistics.generated_tokens) == (2, 6, 4)
    assert statistics.reused_prompt_tokens == 2
    assert statistics.time_to_first_token.sum == 2
    assert (statistics.inter_token_latency.sum, sum(statistics.inter_token_latency.counts)) == (3, 3)
    assert (statistics.queue_time.sum, sum(statistics.queue_time.counts)) == (5, 2)
    assert (statistics.request_time.sum, sum(statistics.request_time.counts)) == (5, 1)


def test_the_last_request_has_a_date(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    assert bench.statistics.last_request_at == 0
    before = time.time()
    bench.submit()
    assert before <= bench.statistics.last_request_at <= time.time()


def test_a_request_of_several_sequences_is_one_in_all_times(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=1)
    bench.submit(n=2, do_sample=True)
    bench.now += 1
    bench.step(Delta(0, [5], finish=LENGTH))
    bench.now += 3
    bench.step(Delta(1, [5, 6], finish=LENGTH))
    statistics = bench.statistics
    assert (statistics.requests, statistics.prompt_tokens, statistics.generated_tokens) == (1, 3, 3)
    assert (statistics.queue_time.sum, sum(statistics.queue_time.counts)) == (0, 1)
    assert (statistics.time_to_first_token.sum, sum(statistics.time_to_first_token.counts)) == (1, 1)
    assert (statistics.inter_token_latency.sum, sum(statistics.inter_token_latency.counts)) == (0, 1)
    assert (statistics.request_time.sum, sum(statistics.request_time.counts)) == (4, 1)
    assert statistics.finished == {FinishReason.LENGTH: 2}


def test_iterations_without_tokens_are_no_latency(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    bench.submit()
    bench.step(Delta(0, []))
    bench.now += 2
    bench.step(Delta(0, [5]))
    assert (bench.statistics.time_to_first_token.sum, bench.statistics.generated_tokens) == (2, 1)


def test_tokens_that_arrive_together_share_the_time_since_those_before_them(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    bench.submit()
    for token_ids in ([5, 6], [7], [8, 9, 10]):
        bench.now += 6
        bench.step(Delta(0, token_ids))
    gaps = bench.statistics.inter_token_latency
    # Every token but the first has a gap, and together they are the time from the first to the last.
    assert (gaps.sum, sum(gaps.counts)) == (12, 5)
    assert [bound for bound, count in zip(gaps.bounds, gaps.counts, strict=False) if count] == [0.0005, 2.5, 7.5]
    assert gaps.counts[gaps.bounds.index(2.5)] == 3


def test_the_gaps_of_a_sequence_are_its_own(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    bench.submit(n=2, do_sample=True)
    bench.now += 1
    bench.step(Delta(0, [5]), Delta(1, [5]))
    bench.now += 2
    bench.step(Delta(0, [6]))
    bench.now += 3
    bench.step(Delta(1, [6]))
    gaps, record = bench.statistics.inter_token_latency, bench.statistics.live[1]
    assert (gaps.sum, sum(gaps.counts)) == (2 + 5, 2)
    assert (record.first_token_at, record.last_token_at, record.generated_tokens) == (101, 106, 4)


def test_gaps_of_the_same_length_all_count(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    bench.submit(n=2, do_sample=True)
    bench.step(Delta(0, [5, 6, 7]), Delta(1, [5, 6]))
    bench.now += 2
    bench.step(Delta(0, [8]), Delta(1, [7]))
    gaps = bench.statistics.inter_token_latency
    assert (gaps.counts[0], gaps.counts[gaps.bounds.index(2.5)], gaps.sum) == (3, 2, 4)


def test_tokens_count_when_they_are_generated_even_if_ranking_holds_them_back(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    _, consumer = bench.submit(n=1, best_of=2, do_sample=True)
    bench.now += 1
    bench.step(Delta(0, [5], [-1.0]), Delta(1, [5], [-1.0]))
    assert (consumer.updates, bench.statistics.generated_tokens) == ([], 2)
    assert bench.statistics.time_to_first_token.sum == 1


def test_what_a_stop_string_cut_off_does_not_count(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    bench.submit(stop=("wolf",))
    bench.step(Delta(0, bench.encode("the wolf went away")))
    (record,) = bench.statistics.ended
    assert record.generated_tokens == bench.statistics.generated_tokens < len(bench.encode("the wolf went away"))


def test_a_request_is_recorded_from_the_queue_to_its_end(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=1)
    bench.submit()
    bench.now += 1
    bench.submit(origin=Origin("asked-7", "lmi"), adapter=Adapter("french", 1, "/french"))
    record = bench.statistics.live[2]
    assert (record.arrived, record.started) == (101, None)
    assert (record.number, record.model, record.adapter) == (2, "story", "french")
    assert record.origin[:2] == ("asked-7", "lmi")
    bench.now += 1
    bench.step(Delta(0, [5], finish=LENGTH))
    assert (record.started, record.first_token_at) == (102, None)
    bench.now += 1
    bench.step(Delta(1, [5], cached_tokens=2))
    bench.now += 1
    bench.step(Delta(1, [6]))
    assert bench.statistics.live == {2: record}
    assert (record.ended, record.reason) == (None, None)
    bench.now += 1
    bench.step(Delta(1, [], finish=LENGTH))
    assert (record.first_token_at, record.last_token_at, record.ended) == (103, 104, 105)
    assert (record.prompt_tokens, record.reused_tokens, record.generated_tokens, record.sequences) == (3, 2, 2, 1)
    assert (record.reason, record.error, record.resumes) == (LENGTH, None, 0)
    assert ([each.number for each in bench.statistics.ended], bench.statistics.live) == ([1, 2], {})


def test_the_worst_end_of_its_sequences_is_that_of_the_request(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    bench.submit(n=3, do_sample=True)
    bench.step(Delta(0, [5], finish=LENGTH))
    bench.step(Delta(1, [], finish=FinishReason.ERROR, error="broken"))
    assert not bench.statistics.ended
    bench.step(Delta(2, [5], finish=LENGTH))
    (record,) = bench.statistics.ended
    assert (record.reason, record.error) == (FinishReason.ERROR, "GenerationError")


@pytest.mark.parametrize("sequences", [1, 2])
def test_a_request_whose_consumer_fails_at_its_end_ends_once(tokenizer: Tokenizer, sequences: int) -> None:
    class Failing(Recorder):
        def __call__(self, update: OutputChunk) -> None:
            raise RuntimeError("broken")

    bench = Bench(tokenizer)
    bench.submit(consumer=Failing(), n=sequences, do_sample=True)
    bench.step(Delta(0, [5], finish=LENGTH))
    (record,) = bench.statistics.ended
    assert (bench.statistics.live, sum(bench.statistics.request_time.counts)) == ({}, 1)
    assert bench.statistics.finished.total() == sequences
    assert record.reason is (LENGTH if sequences == 1 else FinishReason.CANCELLED)


@pytest.mark.parametrize("end", ["cancel", "expire", "fail"])
def test_a_request_that_never_ran_ends_too(tokenizer: Tokenizer, end: str) -> None:
    bench = Bench(tokenizer, max_batch_size=1)
    bench.submit()
    state, _ = bench.submit()
    bench.now = 105
    if end == "cancel":
        bench.batch.cancel(state)
    elif end == "expire":
        bench.batch.expire(4)
    else:
        bench.batch.fail(GenerationError("gone"))
    record = next(record for record in bench.statistics.ended if record.number == 2)
    assert (record.number, record.started, record.ended) == (2, None, 105)
    assert record.error == {"cancel": None, "expire": "RequestTimeoutError", "fail": "GenerationError"}[end]


def test_the_last_512_requests_are_remembered(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    for number in range(514):
        bench.submit()
        bench.step(Delta(number, [5], finish=LENGTH))
    assert [record.number for record in bench.statistics.ended] == list(range(3, 515))


def test_observers_get_the_record_of_each_request_that_ends(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tokenizer)
    seen: list[RequestRecord] = []

    def fail(record: RequestRecord) -> None:
        raise RuntimeError("broken")

    bench.statistics.observers += [fail, seen.append]
    bench.submit(origin=Origin("asked-7", "lmi"))
    bench.step(Delta(0, [5], finish=LENGTH))
    assert seen == list(bench.statistics.ended)
    assert seen[0].ended is not None
    assert [request_id_of(line) for line in caplog.records] == ["asked-7"]
