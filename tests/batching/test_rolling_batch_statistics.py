"""What the rolling batch counts."""

from __future__ import annotations

import time

from djl_trtllm.executor.protocol import Delta
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason
from tests.batching.helpers import Bench

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
    assert (statistics.inter_token_latency.sum, sum(statistics.inter_token_latency.counts)) == (3, 2)
    assert (statistics.request_time.sum, sum(statistics.request_time.counts)) == (4, 1)
    assert statistics.finished == {FinishReason.LENGTH: 2}


def test_iterations_without_tokens_are_no_latency(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    bench.submit()
    bench.step(Delta(0, []))
    bench.now += 2
    bench.step(Delta(0, [5]))
    assert (bench.statistics.time_to_first_token.sum, bench.statistics.generated_tokens) == (2, 1)
