"""Who runs, and what comes of it."""

from __future__ import annotations

import collections
from typing import Any

import msgspec
import psutil
import pytest

from djl_trtllm.backends.scripted.executor import ScriptedExecutor
from djl_trtllm.batching.admission import BatchLimits
from djl_trtllm.batching.rolling_batch import RollingBatch
from djl_trtllm.batching.statistics import Statistics
from djl_trtllm.errors import (
    GenerationError,
    HarmfulRequestError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
    RequestError,
)
from djl_trtllm.executor.protocol import FullQueue, Refusal, Stats, Step, Submit, Try
from djl_trtllm.logs import request_id_of
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import (
    Adapter,
    FinishReason,
    GenerationRequest,
    Guide,
    GuideKind,
    OutputChunk,
    Pooling,
    RequestOrigin,
    Sampling,
)
from tests.batching.helpers import Bench, FakeExecutor, Recorder
from tests.support.steps import Delta, step_of

LENGTH, END, CANCELLED, ERROR = FinishReason.LENGTH, FinishReason.STOP, FinishReason.CANCELLED, FinishReason.ERROR


@pytest.fixture
def bench(tokenizer: Tokenizer) -> Bench:
    return Bench(tokenizer)


# -- the way in --------------------------------------------------------------------------------------------------------


def test_admission_is_refused_with_the_numbers_before_there_are_tokens(bench: Bench) -> None:
    bench.batch.admit(8)
    with pytest.raises(OverloadedError, match="8 waiting, job_queue_size is 4") as caught:
        bench.batch.admit(1)
    assert (caught.value.queue_depth, caught.value.capacity, caught.value.retry_after) == (8, 4, 2)
    bench.batch.withdraw(3)
    bench.batch.admit(3)
    bench.batch.withdraw(8)
    assert bench.batch.idle
    bench.batch.admit(8)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [((), 2), ((6,), 12), ((2, 6), 8), ((0.25, 0.35), 1), ((0.0,), 1), ((15,), 30), ((14.6,), 30), ((16,), 30)],
)
def test_retry_after_is_what_the_queue_takes_within_bounds(
    bench: Bench, seconds: tuple[float, ...], expected: int
) -> None:
    for taken in seconds:
        generation, _ = bench.submit()
        bench.now += taken
        bench.step(Delta(generation.ids[0], [5], finish=LENGTH))
    bench.batch.admit(8)
    with pytest.raises(OverloadedError) as caught:
        bench.batch.admit(1)
    assert caught.value.retry_after == expected


def test_more_sequences_than_there_ever_is_room_for_are_invalid(bench: Bench) -> None:
    with pytest.raises(InvalidRequestError, match="9 sequences, and there is room for 8"):
        bench.batch.admit(9)
    assert bench.batch.idle


@pytest.mark.parametrize(
    ("prompt", "fields", "error"),
    [
        ([5] * 51, {}, PromptTooLongError),
        ([], {}, InvalidRequestError),
        ([5] * 30, {"max_new_tokens": 10}, PromptTooLongError),
        ([5] * 51, {"n": 3, "do_sample": True}, PromptTooLongError),
        ([5], {"beam_width": 5}, InvalidRequestError),
    ],
    ids=["prompt", "empty", "blocks", "several", "beams"],
)
def test_a_request_that_can_never_run_is_refused_and_its_room_given_back(
    tokenizer: Tokenizer, prompt: list[int], fields: dict[str, Any], error: type[Exception]
) -> None:
    bench = Bench(tokenizer, kv_blocks=4)
    with pytest.raises(error):
        bench.submit(prompt, **fields)
    assert bench.batch.idle
    assert (bench.executor.submitted, bench.statistics.requests) == ([], 0)


def test_a_request_reaches_the_executor_with_its_adapter_and_the_length_that_fits(bench: Bench) -> None:
    adapter = Adapter("french", 3, "adapters/french")
    bench.submit([5] * 45, max_new_tokens=0, adapter=adapter, origin=RequestOrigin("story-1"))
    generation, _ = bench.submit(range(10, 80), truncate=3)
    message, truncated = bench.executor.submitted
    assert (message.sampling.max_new_tokens, message.adapter, message.stop_token_ids) == (15, adapter, [2])
    assert (message.origin, truncated.origin, truncated.prompt_ids) == ("story-1", "", [77, 78, 79])
    assert (generation.record.prompt_tokens, bench.statistics.prompt_tokens) == (3, 48)


# -- what comes of it --------------------------------------------------------------------------------------------------


def test_merged_iterations_are_one_update_per_sequence(bench: Bench) -> None:
    _, first = bench.submit()
    _, second = bench.submit()
    steps = [step_of([Delta(0, [10 + k]), Delta(1, [20 + k])], Stats(kv_usage=k)) for k in range(3)]
    steps.append(step_of([Delta(1, [30], finish=LENGTH)]))
    bench.batch.process(steps)
    assert [[token.id for token in update.tokens] for update in first.updates] == [[10, 11, 12]]
    assert [[token.id for token in update.tokens] for update in second.updates] == [[20, 21, 22, 30]]
    assert second.finished().reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("delta", "reason"),
    [
        (Delta(0, [2], finish=END), FinishReason.END_TOKEN),
        (Delta(0, [5, 9, 2], finish=END), FinishReason.END_TOKEN),
        (Delta(0, [9], finish=END), FinishReason.STOP),
        (Delta(0, [], finish=END), FinishReason.STOP),
        (Delta(0, [5], finish=LENGTH), FinishReason.LENGTH),
        (Delta(0, [], finish=CANCELLED), FinishReason.CANCELLED),
        (Delta(0, [], finish=ERROR, error="bad"), FinishReason.ERROR),
        (Delta(0, [], finish=ERROR, error=Refusal("the guide is bad")), FinishReason.ERROR),
        (Delta(0, [], finish=ERROR, error=Refusal("many guides wait", FullQueue(70, 64, 10))), FinishReason.ERROR),
    ],
)
def test_each_end_has_its_reason(bench: Bench, delta: Delta, reason: FinishReason) -> None:
    _, consumer = bench.submit(stop_token_ids=(9,))
    bench.step(delta)
    finished = consumer.finished()
    assert finished.reason is reason
    assert bench.batch.idle
    assert bench.statistics.finished == {reason.value: 1}
    if isinstance(finished.error, OverloadedError):
        assert (finished.error.queue_depth, finished.error.capacity, finished.error.retry_after) == (70, 64, 10)
    elif isinstance(delta.error, Refusal):  # it is not the engine's failure
        assert isinstance(finished.error, InvalidRequestError)
        assert str(finished.error) == "the guide is bad"
    elif reason is FinishReason.ERROR:
        assert isinstance(finished.error, GenerationError)
        assert str(finished.error) == "bad"
    else:
        assert finished.error is None


def test_a_stop_string_ends_the_sequence_and_what_comes_after_is_thrown_away(bench: Bench) -> None:
    generation, consumer = bench.submit(stop=("wolf",), max_new_tokens=20)
    for token in bench.encode("the big wolf ran away"):
        bench.step(Delta(0, [token]))
    assert consumer.text() == "the big "
    assert (consumer.finished().reason, consumer.finished().stop_sequence) == (FinishReason.STOP, "wolf")
    assert bench.executor.cancelled == [0]
    assert generation.done
    assert bench.batch.running == 1
    bench.step(Delta(0, [], finish=CANCELLED))
    assert bench.batch.idle
    assert bench.statistics.finished == {FinishReason.STOP: 1}


def test_the_engines_state_is_that_of_its_last_iteration(bench: Bench) -> None:
    assert bench.batch.engine_stats == Stats()
    assert Bench(bench.tokenizer, kv_blocks=5).batch.engine_stats == Stats(kv_usage=0, kv_blocks=5, kv_blocks_used=0)
    bench.batch.process([Step(stats=Stats(running=number)) for number in (1, 2, 3)])
    assert bench.batch.engine_stats == Stats(running=3)
    bench.batch.process([])
    assert bench.batch.engine_stats == Stats(running=3)
    bench.batch.fail(GenerationError("gone"))
    assert bench.batch.engine_stats == Stats()


# -- Stops that the engine is not given: the server finds them and cancels.


REQUESTS = 20_000
FLAT = 8 << 20
"""Bytes; a leak of 600 bytes for each request is more, and what the batch keeps of one is thousands."""


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


def test_a_seed_is_drawn_where_the_engine_wants_one(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    for draws in (True, False):
        executor = FakeExecutor(msgspec.structs.replace(bench.executor.limits, draws_seeds=draws))
        bench.batch.attach(executor)
        bench.submit(do_sample=True)
        assert (executor.submitted[-1].sampling.seed is not None) == draws


class UnstoppedExecutor(ScriptedExecutor):
    """The scripted executor in this process, which is never given a stop."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = msgspec.structs.replace(self.limits, stops=False)

    def try_guide(self, trial: Try) -> None:
        raise NotImplementedError

    def submit(self, request: Submit) -> None:
        assert not request.stop
        assert not request.stop_token_ids
        super().submit(request)


@pytest.mark.slow
def test_thousands_of_requests_with_stops_take_no_memory(tokenizer: Tokenizer) -> None:
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
            step = executor.step()
            step.stats = executor.stats()
            batch.process([step])
        if number == REQUESTS // 5:
            warm = psutil.Process().memory_info().rss
    assert ended == {"ran": REQUESTS // 2, "id": REQUESTS // 2}
    assert psutil.Process().memory_info().rss - warm < FLAT


# -- Requests that end before their time: cancelled, late, with their executor, or for their consumer.


def test_a_request_expires_when_it_is_older_than_the_timeout_and_not_before(bench: Bench) -> None:
    generation, consumer = bench.submit()
    bench.now += 10
    bench.batch.expire(10)
    assert not generation.done
    bench.now += 0.5
    bench.batch.expire(10)
    assert str(consumer.finished().error) == "the request did not finish within predict_timeout=10 seconds"


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
def test_a_consumer_that_raises_is_cancelled_and_disturbs_nobody(
    bench: Bench, finish: FinishReason | None, caplog: pytest.LogCaptureFixture
) -> None:
    generation, broken = bench.submit(n=2, do_sample=True, consumer=Broken(), origin=RequestOrigin("asked-7"))
    _, other = bench.submit()
    bench.step(Delta(0, [5], finish=finish), Delta(1, [6]), Delta(2, [7]))
    assert [request_id_of(line) for line in caplog.records] == ["asked-7"]
    assert len(broken.updates) == 1
    assert generation.done
    assert other.ids() == [7]
    assert bench.executor.cancelled == ([1] if finish else [0, 1])
    bench.step(Delta(1, [], finish=CANCELLED), Delta(2, [8], finish=LENGTH))
    if not finish:
        bench.step(Delta(0, [], finish=CANCELLED))
    assert other.finished().reason is FinishReason.LENGTH
    assert bench.batch.idle


# -- requests whose guides are being tried: they have no place, and wait for one afterwards ----------------------------

GUIDE = Guide(GuideKind.REGEX, "a")


@pytest.fixture
def tries(tokenizer: Tokenizer) -> Bench:
    tries = Bench(tokenizer, max_batch_size=2)
    tries.batch.attach(trying(tries))
    return tries


def trying(tries: Bench) -> FakeExecutor:
    tries.executor = FakeExecutor(msgspec.structs.replace(tries.executor.limits, tries_guides=True))
    return tries.executor


def tried(tries: Bench, error: Refusal | None = None) -> None:
    """The news of the oldest trial."""
    finish = FinishReason.STOP if error is None else FinishReason.ERROR
    tries.step(Delta(tries.executor.trials.pop(0).request_id, [], finish=finish, error=error))


def test_a_request_has_no_place_while_its_guide_is_tried(tries: Bench) -> None:
    guided, recorder = tries.submit(guide=GUIDE, n=2, do_sample=True)
    tries.submit()
    tries.submit()
    (trial,) = tries.executor.trials
    assert trial.guide == GUIDE, "one trial for all sequences"
    plain = tries.executor.ids
    assert (len(plain), tries.batch.running, tries.batch.waiting) == (2, 2, 2)
    tried(tries)
    assert tries.executor.ids == plain, "the places are taken"
    tries.step(*(Delta(id_, [9], finish=FinishReason.LENGTH) for id_ in plain))
    assert tries.executor.ids == [*plain, *guided.ids]
    tries.step(*(Delta(id_, [9], finish=FinishReason.LENGTH) for id_ in guided.ids))
    assert recorder.ids(0) == recorder.ids(1) == [9]
    assert tries.batch.idle


def test_of_requests_whose_trials_end_in_one_iteration_the_client_with_the_lowest_service_is_first(
    tries: Bench,
) -> None:
    for client, tokens in (("a", 20), ("b", 1)):
        served, _ = tries.submit(client=client)
        tries.step(*(Delta(served.ids[0], [5]) for _ in range(tokens)))
        tries.step(Delta(served.ids[0], [], finish=FinishReason.LENGTH))
    tries.submit(client="c")
    guided = [tries.submit(guide=GUIDE, client=client)[0].ids for client in "ab"]
    tries.step(*(Delta(trial.request_id, [], finish=FinishReason.STOP) for trial in tries.executor.trials))
    assert tries.executor.ids[3:] == guided[1]
    assert tries.batch.waiting == 1


@pytest.mark.parametrize(
    ("refusal", "error"),
    [(Refusal("wrong"), InvalidRequestError), (Refusal("full", FullQueue(64, 64, 10)), OverloadedError)],
)
def test_a_guide_that_cannot_be_used_is_the_error_of_its_request(
    tries: Bench, refusal: Refusal, error: type[RequestError]
) -> None:
    _, recorder = tries.submit(guide=GUIDE)
    tried(tries, refusal)
    assert isinstance(recorder.finished().error, error)
    assert (tries.batch.idle, tries.executor.ids) == (True, [])


def test_the_trial_ends_with_the_last_client_that_waits_for_it(tries: Bench) -> None:
    left, _ = tries.submit(guide=GUIDE)
    _, late = tries.submit(guide=GUIDE)
    trials = [trial.request_id for trial in tries.executor.trials]
    tries.batch.cancel(left)
    assert tries.executor.cancelled == trials[:1]
    tries.now += 100
    tries.batch.expire(50)
    assert (tries.executor.cancelled, tries.batch.idle) == (trials, True)
    assert late.finished().error is not None
    tried(tries)  # the news crosses the cancellation
    assert tries.executor.ids == []


def test_a_trial_begins_again_in_the_next_engine_process(tries: Bench) -> None:
    tries.batch.hold()
    _, recorder = tries.submit(guide=GUIDE)
    assert tries.executor.trials == []
    for _ in range(2):
        tries.batch.attach(trying(tries))
        assert len(tries.executor.trials) == 1
        tries.batch.lose(tries.executor, RequestError("gone"))
    tries.batch.attach(FakeExecutor(tries.executor.limits))
    tries.batch.fail(RequestError("no more"))
    assert (tries.batch.idle, recorder.finished().reason) == (True, FinishReason.ERROR)
    again, _ = tries.submit(guide=GUIDE)
    executor = FakeExecutor(msgspec.structs.replace(tries.executor.limits, tries_guides=False))
    tries.batch.attach(executor)
    assert executor.ids == again.ids, "an engine that tries none gets them at once"


@pytest.mark.parametrize("vector", [b"", b"four"])
@pytest.mark.parametrize("reason", [LENGTH, END, CANCELLED])
def test_an_end_of_its_own_without_a_vector_fails_a_request_for_one(
    bench: Bench, reason: FinishReason, vector: bytes
) -> None:
    state, recorder = bench.submit(pooling=Pooling())
    step = step_of([Delta(state.ids[0], [], finish=reason)])
    step.vectors = {state.ids[0]: vector} if vector else {}
    bench.batch.process([step])
    ended = recorder.finished()
    fails = not vector and reason is not CANCELLED
    assert (ended.reason is ERROR, type(ended.error) is GenerationError) == (fails, fails)
    assert recorder.updates[-1].vector == vector


def test_a_suspect_is_held_back_after_its_trial_and_a_guilty_one_is_not_tried(tokenizer: Tokenizer) -> None:
    tries = Bench(tokenizer, max_output_len=200, max_seq_len=300)
    tries.batch.attach(trying(tries))
    tries.submit([5, 6], max_new_tokens=200)
    for _ in range(4):
        tries.step(Delta(0, [8]))
    verdict = None
    for steps in (1, 16, 64):  # the news of a trial is a step
        poison, _ = tries.submit([9, 9], guide=GUIDE)
        tried(tries)
        for _ in range(steps - 1):
            assert tries.executor.ids == [0]
            tries.step(Delta(0, [8]))
        assert tries.executor.ids == [0, *poison.ids]
        verdict = tries.batch.lose(tries.executor, RequestError("gone")).guilty
        tries.batch.cancel(poison)
        tries.batch.attach(trying(tries))
    assert verdict is not None
    with pytest.raises(HarmfulRequestError):
        tries.submit([9, 9], guide=GUIDE)
    assert tries.executor.trials == []
