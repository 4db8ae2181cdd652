"""Beam search: sequences that enter, are cancelled and are delivered together."""

from __future__ import annotations

import pytest

from djl_trtllm.errors import InvalidRequestError, PromptTooLongError
from djl_trtllm.executor.protocol import Delta
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason
from tests.batching.helpers import Bench


def ended(request_id: int, *token_ids: int, finish: FinishReason = FinishReason.LENGTH) -> Delta:
    return Delta(request_id, list(token_ids), finish=finish)


def test_beams_are_one_request_of_the_executor(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    bench.submit(beam_width=3, max_new_tokens=2)
    (message,) = bench.executor.submitted
    assert (message.request_id, message.sampling.beam_width) == (0, 3)
    assert (bench.batch.running, bench.batch.waiting) == (3, 0)


def test_the_best_are_delivered_in_the_engines_order(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    _, recorder = bench.submit(beam_width=3, n=2, max_new_tokens=2)
    bench.step(ended(0, 10, 11), ended(1, 10, 12), ended(2, 10, 13))
    assert [recorder.ids(0), recorder.ids(1)] == [[10, 11], [10, 12]]
    assert {update.index for update in recorder.updates} == {0, 1}
    assert bench.batch.idle


def test_nothing_is_delivered_before_all_beams_have_ended(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    _, recorder = bench.submit(beam_width=2, max_new_tokens=2)
    bench.step(ended(0, 10, 11))
    assert recorder.updates == []
    bench.step(ended(1, 10, 12))
    assert recorder.ids() == [10, 11]


def test_beams_wait_until_there_is_room_for_all_of_them(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=4)
    bench.submit(n=2)
    bench.submit(beam_width=3)
    assert (bench.batch.running, bench.batch.waiting) == (2, 3)
    bench.step(ended(0, 1))
    assert (bench.batch.running, bench.batch.waiting) == (4, 0)
    assert bench.executor.ids == [0, 1, 2]


def test_all_beams_have_kv_blocks_of_their_own(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=8, kv_blocks=10)
    bench.submit([5], beam_width=2, max_new_tokens=9)  # 2 blocks each
    bench.submit([5], beam_width=4, max_new_tokens=9)  # does not fit
    assert bench.executor.ids == [0]
    bench.step(ended(0, 1), ended(1, 2))
    assert bench.executor.ids == [0, 2]
    bench.submit([5], max_new_tokens=9)  # the last 2
    bench.submit([5], max_new_tokens=9)
    assert bench.executor.ids == [0, 2, 6]


def test_beams_that_together_never_fit_the_kv_cache_are_refused(tokenizer: Tokenizer) -> None:
    """They would wait for ever, and all behind them."""
    bench = Bench(tokenizer, kv_blocks=10)
    with pytest.raises(PromptTooLongError, match="need 12 KV cache blocks, the engine has 10"):
        bench.submit([5], beam_width=4, max_new_tokens=10)
    assert bench.batch.idle


def test_more_beams_than_ever_run_together_are_refused(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=2)
    with pytest.raises(InvalidRequestError, match="asks for 3 beams, and 2 sequences run together"):
        bench.submit(beam_width=3)
    assert bench.batch.idle
    bench.submit(beam_width=2)
    assert bench.batch.running == 2


def test_cancelling_ends_all_beams(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    generation, recorder = bench.submit(beam_width=2)
    bench.batch.cancel(generation)
    assert recorder.finished().reason is FinishReason.CANCELLED
    assert 0 in bench.executor.cancelled
    assert bench.batch.running == 2
    bench.step(ended(0, finish=FinishReason.CANCELLED), ended(1, finish=FinishReason.CANCELLED))
    assert bench.batch.idle


def test_beams_that_wait_are_cancelled_without_the_executor(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=2)
    bench.submit(n=2)
    generation, recorder = bench.submit(beam_width=2)
    bench.batch.cancel(generation)
    assert recorder.finished().reason is FinishReason.CANCELLED
    assert bench.executor.cancelled == []
    assert bench.batch.waiting == 0
