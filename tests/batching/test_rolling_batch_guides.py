"""Requests whose guides are being tried: they have no place, and wait for one afterwards."""

from __future__ import annotations

import msgspec
import pytest

from djl_trtllm.errors import HarmfulRequestError, InvalidRequestError, OverloadedError, RequestError
from djl_trtllm.executor.protocol import Delta, FullQueue, Refusal
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, Guide, GuideKind
from tests.batching.helpers import Bench, FakeExecutor

GUIDE = Guide(GuideKind.REGEX, "a")


@pytest.fixture
def bench(tokenizer: Tokenizer) -> Bench:
    bench = Bench(tokenizer, max_batch_size=2)
    bench.batch.attach(trying(bench))
    return bench


def trying(bench: Bench) -> FakeExecutor:
    bench.executor = FakeExecutor(msgspec.structs.replace(bench.executor.limits, tries_guides=True))
    return bench.executor


def tried(bench: Bench, error: Refusal | None = None) -> None:
    """The news of the oldest trial."""
    finish = FinishReason.STOP if error is None else FinishReason.ERROR
    bench.step(Delta(bench.executor.trials.pop(0).request_id, [], finish=finish, error=error))


def test_a_request_has_no_place_while_its_guide_is_tried(bench: Bench) -> None:
    guided, recorder = bench.submit(guide=GUIDE, n=2, do_sample=True)
    bench.submit()
    bench.submit()
    (trial,) = bench.executor.trials
    assert trial.guide == GUIDE, "one trial for all sequences"
    plain = bench.executor.ids
    assert (len(plain), bench.batch.running, bench.batch.waiting) == (2, 2, 2)
    tried(bench)
    assert bench.executor.ids == plain, "the places are taken"
    bench.step(*(Delta(id_, [9], finish=FinishReason.LENGTH) for id_ in plain))
    assert bench.executor.ids == [*plain, *guided.ids]
    bench.step(*(Delta(id_, [9], finish=FinishReason.LENGTH) for id_ in guided.ids))
    assert recorder.ids(0) == recorder.ids(1) == [9]
    assert bench.batch.idle


@pytest.mark.parametrize(
    ("refusal", "error"),
    [(Refusal("wrong"), InvalidRequestError), (Refusal("full", FullQueue(64, 64, 10)), OverloadedError)],
)
def test_a_guide_that_cannot_be_used_is_the_error_of_its_request(
    bench: Bench, refusal: Refusal, error: type[RequestError]
) -> None:
    _, recorder = bench.submit(guide=GUIDE)
    tried(bench, refusal)
    assert isinstance(recorder.finished().error, error)
    assert (bench.batch.idle, bench.executor.ids) == (True, [])


def test_the_trial_ends_with_the_last_client_that_waits_for_it(bench: Bench) -> None:
    left, _ = bench.submit(guide=GUIDE)
    _, late = bench.submit(guide=GUIDE)
    trials = [trial.request_id for trial in bench.executor.trials]
    bench.batch.cancel(left)
    assert bench.executor.cancelled == trials[:1]
    bench.now += 100
    bench.batch.expire(50)
    assert (bench.executor.cancelled, bench.batch.idle) == (trials, True)
    assert late.finished().error is not None
    tried(bench)  # the news crosses the cancellation
    assert bench.executor.ids == []


def test_a_trial_begins_again_in_the_next_engine_process(bench: Bench) -> None:
    bench.batch.hold()
    _, recorder = bench.submit(guide=GUIDE)
    assert bench.executor.trials == []
    for _ in range(2):
        bench.batch.attach(trying(bench))
        assert len(bench.executor.trials) == 1
        bench.batch.lose(bench.executor, RequestError("gone"))
    bench.batch.attach(FakeExecutor(bench.executor.limits))
    bench.batch.fail(RequestError("no more"))
    assert (bench.batch.idle, recorder.finished().reason) == (True, FinishReason.ERROR)
    again, _ = bench.submit(guide=GUIDE)
    executor = FakeExecutor(msgspec.structs.replace(bench.executor.limits, tries_guides=False))
    bench.batch.attach(executor)
    assert executor.ids == again.ids, "an engine that tries none gets them at once"


def test_a_suspect_is_held_back_after_its_trial_and_a_guilty_one_is_not_tried(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_output_len=200, max_seq_len=300)
    bench.batch.attach(trying(bench))
    bench.submit([5, 6], max_new_tokens=200)
    for _ in range(4):
        bench.step(Delta(0, [8]))
    verdict = None
    for steps in (1, 16, 64):  # the news of a trial is a step
        poison, _ = bench.submit([9, 9], guide=GUIDE)
        tried(bench)
        for _ in range(steps - 1):
            assert bench.executor.ids == [0]
            bench.step(Delta(0, [8]))
        assert bench.executor.ids == [0, *poison.ids]
        verdict = bench.batch.lose(bench.executor, RequestError("gone")).guilty
        bench.batch.cancel(poison)
        bench.batch.attach(trying(bench))
    assert verdict is not None
    with pytest.raises(HarmfulRequestError):
        bench.submit([9, 9], guide=GUIDE)
    assert bench.executor.trials == []
