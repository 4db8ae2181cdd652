"""A model from loading to its end."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import psutil
import pytest

from djl_trtllm.errors import (
    ExecutorStartError,
    GenerationError,
    HarmfulRequestError,
    NotReadyError,
    TokenizerError,
)
from djl_trtllm.executor.protocol import Start
from djl_trtllm.request import FinishReason
from djl_trtllm.service.lifecycle import ModelService, State
from djl_trtllm.service.model import Model, open_source, prepare
from tests.service.conftest import Stage
from tests.support import models
from tests.support.in_process import Asked, ask, state_of
from tests.support.models import scripted_model
from tests.support.virtual_time import until


def now() -> float:
    return asyncio.get_running_loop().time()


def test_the_states_have_the_words_that_clients_read() -> None:
    assert [state.value for state in State] == ["loading", "ready", "recovering", "draining", "failed", "stopped"]


async def test_a_model_loads_serves_and_stops(stage: Stage) -> None:
    service = stage.service()
    assert (service.name, state_of(service), service.batch, service.pid) == ("story", State.LOADING, None, None)
    assert (service.load_now, service.restarts, service.failure, service.memory) == (0, 0, None, 0)
    await service.load(stage.model())
    assert (state_of(service), service.pid, service.memory) == (State.READY, stage.last.pid, stage.resident)
    assert service.batch is not None and service.batch.limits.max_input_len == 1024
    asked = await ask(service)
    stage.last.step(4)
    assert asked.reason is FinishReason.LENGTH
    await service.close()
    assert state_of(service) is State.STOPPED
    assert stage.last.closed
    await service.close()
    assert state_of(service) is State.STOPPED


async def test_an_engine_process_starts_as_the_models_options_say(stage: Stage) -> None:
    model = stage.model(script={"end_after": 3}, model_loading_timeout=7, executor_hang_timeout=9)
    service = stage.service()
    await service.load(model)
    assert stage.last.started_with == Start(models.SCRIPTED, {"end_after": 3})
    assert (stage.last.load_timeout, stage.last.hang_timeout) == (7, 9)


async def test_a_model_that_does_not_load_has_failed(stage: Stage) -> None:
    service = stage.service()
    stage.failures = [error := ExecutorStartError("no such engine")]
    with pytest.raises(ExecutorStartError, match="no such engine"):
        await service.load(stage.model())
    assert (state_of(service), service.failure, stage.reported) == (State.FAILED, error, [error])
    await service.close()
    assert state_of(service) is State.FAILED


async def test_a_model_that_is_ended_while_it_loads_does_not_get_ready(stage: Stage) -> None:
    stage.load_seconds = 10
    service = stage.service()
    load = asyncio.ensure_future(service.load(stage.model()))
    await asyncio.sleep(5)
    assert (service.memory, service.refusals, service.load_now) == (0, {}, 0), "nothing is known of it yet"
    service.refuse_new()
    await load
    assert state_of(service) is State.DRAINING
    assert "beam_width" in service.refusals, "its engine is loaded"


# -- the end -----------------------------------------------------------------------------------------------------------


async def test_draining_refuses_new_requests_and_ends_with_the_last_old_one(stage: Stage) -> None:
    service = await stage.load()
    asked = await ask(service, tokens=1)
    drain = asyncio.ensure_future(service.drain(60))
    await asyncio.sleep(5)
    assert state_of(service) is State.DRAINING
    with pytest.raises(NotReadyError, match="model story is shutting down"):
        await ask(service)
    assert not drain.done()
    stage.last.step()
    await drain
    assert now() == pytest.approx(5, abs=0.03)
    assert asked.reason is FinishReason.LENGTH


async def test_draining_ends_at_its_timeout(stage: Stage) -> None:
    service = await stage.load()
    asked = await ask(service)
    await service.drain(0.2)
    assert now() == 0.2
    assert asked.finished is None


async def test_closing_ends_what_still_runs_with_an_error(stage: Stage) -> None:
    service = await stage.load(max_rolling_batch_size=1)
    asked = [await ask(service) for _ in range(2)]
    await service.close()
    for one in asked:
        assert one.reason is FinishReason.ERROR
        assert isinstance(one.error, NotReadyError)
        assert "model story was shut down while it was answering" in str(one.error)
        service.cancel(one.generations)
    assert (service.load_now, service.batch) == (0, None)


async def test_an_engine_process_that_is_late_with_its_news_or_its_end_changes_nothing(stage: Stage) -> None:
    service = await stage.load()
    await service.close()
    stage.last.step()
    stage.last.die()
    await asyncio.sleep(60)
    assert (state_of(service), len(stage.made)) == (State.STOPPED, 1)


async def test_a_failed_or_stopped_model_does_not_drain(stage: Stage) -> None:
    service = stage.service()
    await service.close()
    service.refuse_new()
    assert state_of(service) is State.STOPPED
    service.fail(ExecutorStartError("no such engine"))
    service.refuse_new()
    assert state_of(service) is State.FAILED


# -- recovery ----------------------------------------------------------------------------------------------------------

LONG_ENOUGH = 60.0
"""Seconds after which any replacement has started."""


async def sleep_until(when: float) -> None:
    await asyncio.sleep(when - asyncio.get_running_loop().time())


async def test_a_lost_engine_process_is_replaced_and_every_request_answered(stage: Stage) -> None:
    service = await stage.load(max_rolling_batch_size=1, resume_after_restart=False)
    asked = [await ask(service) for _ in range(3)]
    stage.last.step()
    stage.last.die("it was killed by SIGKILL\nits last output:\n  | secrets")
    assert [one.reason for one in asked] == [FinishReason.ERROR, None, None]
    assert isinstance(asked[0].error, GenerationError)
    assert str(asked[0].error).endswith("it was killed by SIGKILL); the request may be repeated")
    assert (state_of(service), service.load_now, service.pid) == (State.RECOVERING, 2, None)
    await asyncio.sleep(LONG_ENOUGH)
    assert (state_of(service), service.restarts, len(stage.made)) == (State.READY, 1, 2)
    stage.last.step(8)
    assert [one.reason for one in asked[1:]] == [FinishReason.LENGTH] * 2


async def test_requests_go_on_in_the_next_engine_process_with_the_same_output(stage: Stage) -> None:
    service = await stage.load(max_rolling_batch_size=2)
    undisturbed = await ask(service, tokens=20)
    stage.last.step(20)
    asked = [await ask(service, tokens=20) for _ in range(3)]
    for _ in range(3):
        stage.last.step(4)
        stage.last.die()
        assert state_of(service) is State.RECOVERING
        await asyncio.sleep(LONG_ENOUGH)
        assert state_of(service) is State.READY
    stage.last.step(8)
    assert asked[2].updates == []
    stage.last.step(20)
    for one in asked:
        assert (one.text, one.reason) == (undisturbed.text, FinishReason.LENGTH)
        assert one.finished is not None
        assert one.finished.generated_tokens == 20
    assert (service.statistics.resumed, service.restarts) == (6, 3)


async def test_a_request_that_kills_engine_processes_ends_and_the_model_does_not_fail(stage: Stage) -> None:
    service = await stage.load(retry_threshold=2)
    asked = await ask(service)
    for deaths in (1, 2, 3):
        assert (asked.finished, len(stage.made)) == (None, deaths)
        stage.last.die()
        await asyncio.sleep(1)
    assert isinstance(asked.error, GenerationError)
    assert (state_of(service), service.load_now) == (State.READY, 0)
    with pytest.raises(HarmfulRequestError):
        await ask(service)
    for _ in range(2):  # the three before are forgiven
        stage.last.die()
        await asyncio.sleep(1)
        assert state_of(service) is State.READY


async def test_an_engine_that_survives_no_request_fails_the_model(stage: Stage) -> None:
    service = await stage.load()
    asked = [await ask(service, prompt=f"{number} wolves") for number in range(3)]
    while state_of(service) is not State.FAILED:
        stage.last.die()
        await asyncio.sleep(1)
    assert len(stage.made) == 4
    assert all(isinstance(one.error, GenerationError) for one in asked)


@pytest.mark.parametrize("streams", [0, 3])
async def test_ten_kills_in_ten_minutes_end_no_request_and_fail_no_model(stage: Stage, streams: int) -> None:
    service = await stage.load(max_output_len=1000)
    asked = [await ask(service, tokens=800, prompt=f"{number} wolves") for number in range(streams)]
    for _ in range(10):
        await asyncio.sleep(LONG_ENOUGH)
        stage.last.step(70)
        stage.last.die()
        assert state_of(service) is State.RECOVERING
    await asyncio.sleep(LONG_ENOUGH)
    assert state_of(service) is State.READY
    stage.last.step(100)
    assert [one.reason for one in asked] == [FinishReason.LENGTH] * streams


@pytest.mark.parametrize("loading", [False, True])
async def test_engine_processes_that_are_killed_before_they_have_worked_fail_no_model(
    stage: Stage, loading: bool
) -> None:
    """Example: an operator's script, or the kernel for memory, kills ten of them as soon as they are there."""
    await asyncio.sleep(700)
    service = await stage.load()
    asked = [await ask(service, tokens=20, prompt=f"{number} wolves") for number in range(20)]
    if loading:
        stage.failures = [ExecutorStartError("it was killed", killed=True)] * 9
        stage.last.die(killed=True)
        await asyncio.sleep(LONG_ENOUGH)
    for _ in range(0 if loading else 10):
        stage.last.die(killed=True)
        assert state_of(service) is State.RECOVERING
        await asyncio.sleep(11)
    assert (state_of(service), len(stage.made)) == (State.READY, 11)
    stage.last.step(1000)
    assert [one.reason for one in asked] == [FinishReason.LENGTH] * 20
    assert stage.reported == []


@pytest.mark.parametrize(("threshold", "seconds"), [(3, 600), (0, 0)])
async def test_engine_processes_that_are_killed_fail_a_model_that_has_not_worked_for_ten_minutes(
    stage: Stage, threshold: int, seconds: float
) -> None:
    service = await stage.load(retry_threshold=threshold)
    while state_of(service) is not State.FAILED:
        stage.last.die(killed=True)
        await until(lambda: state_of(service) is not State.RECOVERING)
    assert seconds <= now() <= seconds + 11


async def test_engine_processes_that_are_killed_after_others_have_worked_for_long_fail_no_model(stage: Stage) -> None:
    service = await stage.load()
    await asyncio.sleep(1000)
    for _ in range(6):
        stage.last.die(killed=True)
        assert state_of(service) is State.RECOVERING
        await until(lambda: state_of(service) is not State.RECOVERING)
        assert state_of(service) is State.READY


async def test_replacements_come_later_and_later(stage: Stage) -> None:
    service = await stage.load(retry_threshold=10)
    stage.failures = [ExecutorStartError(f"start {number}") for number in range(1, 10)]
    stage.last.die()
    await asyncio.sleep(LONG_ENOUGH)
    starts = [host.started_at for host in stage.made]
    waits = [round(later - sooner, 6) for sooner, later in itertools.pairwise(starts)]
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10, 10]
    assert (state_of(service), service.restarts) == (State.READY, 1)


async def test_engine_processes_that_do_nothing_before_their_end_fail_the_model_for_a_while(stage: Stage) -> None:
    service = await stage.load(retry_threshold=2)
    for state in (State.READY, State.READY, State.FAILED):
        stage.last.die("it exited with status 3")
        await asyncio.sleep(1)
        assert state_of(service) is state
    assert stage.reported == [service.failure]
    assert "status 3" in str(service.failure)
    with pytest.raises(NotReadyError, match=r"model story has failed.* in 29 seconds") as refused:
        await ask(service)
    assert refused.value.retry_after == service.retry_in == 29
    for pause in (30, 60, 120):
        failed_at = now() - 1
        await sleep_until(failed_at + pause - 1)
        assert state_of(service) is State.FAILED
        await asyncio.sleep(2)
        assert state_of(service) is State.READY
        assert [service.failure, service.retry_in] == [None, None]
        stage.last.die()
        await asyncio.sleep(1)
        assert state_of(service) is State.FAILED
    await asyncio.sleep(240)
    asked = await ask(service, tokens=4)
    stage.last.step(4)
    assert asked.reason is FinishReason.LENGTH
    stage.last.die()  # it has done something
    await asyncio.sleep(5)
    assert state_of(service) is State.READY
    stage.last.die()
    await asyncio.sleep(1)
    assert service.retry_in == 29, "the first pause again"


async def test_an_engine_that_does_not_start_again_is_tried_at_most_every_ten_minutes(stage: Stage) -> None:
    service = await stage.load(retry_threshold=1)
    asked = [await ask(service) for _ in range(2)]
    stage.failures = [ExecutorStartError("no such engine")] * 8
    stage.last.die()
    await asyncio.sleep(1)
    for one in asked:
        assert isinstance(one.error, GenerationError)
        assert "could not be replaced (no such engine)" in str(one.error)
        assert one.error.__cause__ is service.failure, "with all lines of its message"
    await asyncio.sleep(3000)
    starts = [host.started_at for host in stage.made]
    waits = [round(later - sooner) for sooner, later in itertools.pairwise(starts)]
    assert waits == [0, 30, 60, 120, 240, 480, 600, 600, 600]
    assert (state_of(service), len(stage.reported)) == (State.READY, 8)


@pytest.mark.parametrize("action", ["end", "drain"])
async def test_a_failed_model_that_is_to_end_is_not_started_again(stage: Stage, action: str) -> None:
    service = await stage.load(retry_threshold=1)
    for _ in range(2):
        stage.last.die()
        await asyncio.sleep(1)
    await (service.close() if action == "end" else service.drain(1))
    assert service.retry_in is None
    await asyncio.sleep(3000)
    assert (state_of(service), len(stage.made)) == (State.FAILED, 2)


@pytest.mark.parametrize("busy", [True, False])
async def test_without_retries_each_loss_fails_the_model_for_good(stage: Stage, busy: bool) -> None:
    service = await stage.load(retry_threshold=0)
    asked = [await ask(service, tokens=20) for _ in range(busy)]
    stage.last.step(10)
    await asyncio.sleep(LONG_ENOUGH)
    stage.last.die()
    await asyncio.sleep(3000)
    assert (state_of(service), service.retry_in, len(stage.made)) == (State.FAILED, None, 1)
    assert all(isinstance(one.error, GenerationError) for one in asked)
    with pytest.raises(NotReadyError, match="model story has failed; the server's log says why") as refused:
        await ask(service)
    assert refused.value.retry_after is None
    await service.close()
    assert state_of(service) is State.FAILED


@pytest.mark.parametrize(("when", "state"), [(599.9, State.FAILED), (600.0, State.READY), (700.0, State.READY)])
async def test_deaths_are_forgiven_after_ten_minutes(stage: Stage, when: float, state: State) -> None:
    service = await stage.load(retry_threshold=1)
    await sleep_until(1)
    stage.last.die()
    await sleep_until(1 + when)
    await ask(service)
    stage.last.die()
    await asyncio.sleep(1)
    assert state_of(service) is state


async def test_an_engine_process_that_dies_while_draining_is_replaced_for_what_still_runs(stage: Stage) -> None:
    service = await stage.load()
    asked = await ask(service, tokens=2)
    stage.last.step()
    draining = asyncio.ensure_future(service.drain(LONG_ENOUGH))
    await asyncio.sleep(1)
    stage.last.die()
    await asyncio.sleep(1)
    assert (state_of(service), len(stage.made)) == (State.DRAINING, 2)
    stage.last.step()
    assert asked.reason is FinishReason.LENGTH
    await draining
    await service.close()
    assert state_of(service) is State.STOPPED


@pytest.mark.parametrize("first", ["it dies", "it drains"])
async def test_an_engine_process_with_nothing_to_do_is_not_replaced_while_its_model_drains(
    stage: Stage, first: str
) -> None:
    service = await stage.load(resume_after_restart=False)
    asked = await ask(service)
    if first == "it dies":
        stage.last.die()
    service.refuse_new()
    if first == "it drains":
        stage.last.die()
    assert asked.reason is FinishReason.ERROR
    await service.drain(LONG_ENOUGH)
    assert asyncio.get_running_loop().time() == 0
    await asyncio.sleep(LONG_ENOUGH)
    assert (state_of(service), len(stage.made)) == (State.DRAINING, 1)
    await service.close()
    assert state_of(service) is State.STOPPED


@pytest.mark.parametrize("load_seconds", [0.0, 30.0], ids=["while it waits", "while a host starts"])
async def test_a_recovery_ends_with_the_model_and_so_does_what_waits(stage: Stage, load_seconds: float) -> None:
    service = stage.service()
    await service.load(stage.model())
    asked = await ask(service)
    stage.load_seconds = load_seconds
    stage.last.die()
    await asyncio.sleep(0.05 if not load_seconds else 5)
    assert asked.finished is None
    await service.close()
    assert asyncio.get_running_loop().time() < LONG_ENOUGH / 2
    assert isinstance(asked.error, NotReadyError)
    assert stage.last.closed or not load_seconds
    assert (state_of(service), stage.reported) == (State.STOPPED, [])
    await asyncio.sleep(LONG_ENOUGH)
    assert len(stage.made) == (1 if not load_seconds else 2)
    assert service.batch is None


# -- The life of a model on real engine processes.


Make = Callable[..., Model]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make(script, **options)`: a prepared model."""

    def make_one(script: dict[str, object] | None = None, **options: object) -> Model:
        return prepare(open_source(scripted_model(tmp_path / "model", script, **options), {}))

    return make_one


@pytest.fixture
def service() -> ModelService:
    """A service without a model, which `in_real_time` closes."""
    return ModelService("story")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process of a test outlives it."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


async def end_of(asked: Asked) -> FinishReason:
    await until(lambda: asked.finished is not None)
    assert asked.reason is not None
    return asked.reason


def in_real_time(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    """Makes a test of a coroutine function with a `service`, which is closed at its end. It leaves no task behind."""

    @functools.wraps(test)
    def running(service: ModelService, **fixtures: object) -> None:
        async def checked() -> None:
            tasks = asyncio.all_tasks()
            try:
                await test(service=service, **fixtures)
            finally:
                await service.close()
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == tasks

        asyncio.run(asyncio.wait_for(checked(), 120))

    return running


@pytest.mark.slow
@in_real_time
async def test_a_model_that_does_not_load_says_why(service: ModelService, make: Make) -> None:
    with pytest.raises(ExecutorStartError, match="no such engine"):
        await service.load(make({"start_error": "no such engine"}))


@pytest.mark.slow
@in_real_time
async def test_a_tokenizer_that_cannot_be_loaded_ends_the_engine_process_that_loads(
    service: ModelService, make: Make
) -> None:
    model = make({"start_seconds": 60})
    tokenizer = model.directory / "tokenizer.json"
    tokenizer.unlink()  # others share it
    tokenizer.write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        await service.load(model)
    assert isinstance(service.failure, TokenizerError)
    with pytest.raises(NotReadyError, match="has failed"):
        _ = service.model


@pytest.mark.slow
@pytest.mark.parametrize("action", ["die", "raise", "exit", "hang", "stop"])
@in_real_time
async def test_requests_go_on_after_any_end_of_an_engine_process(
    service: ModelService, make: Make, action: str
) -> None:
    faults = [{"action": action, "at_token": 2, "max_new_tokens": 99}]
    await service.load(make({"steps_per_second": 50, "faults": faults}, **{"option.executor_hang_timeout": 0.8}))
    whole = await ask(service, 98)
    assert await end_of(whole) is FinishReason.LENGTH
    for asked in [await ask(service, tokens) for tokens in (98, 99, 98)]:
        assert await end_of(asked) is FinishReason.LENGTH
        assert asked.text.startswith(whole.text)
    assert (service.restarts, service.statistics.resumed) == (1, 3)


@pytest.mark.slow
@in_real_time
async def test_an_engine_process_is_recycled_without_an_error(service: ModelService, make: Make) -> None:
    await service.load(make({"steps_per_second": 20}, **{"option.executor_max_requests": 2}))
    first = service.pid
    asked = [await ask(service, 150) for _ in range(3)]
    await until(lambda: service.pid not in (None, first))
    asked.append(await ask(service, 5))
    for one in asked:
        assert await end_of(one) is FinishReason.LENGTH
    assert first is not None
    await until(lambda: not psutil.pid_exists(first))
    assert (service.restarts, service.statistics.resumed) == (0, 0)


@pytest.mark.slow
@in_real_time
async def test_a_cancelled_load_leaves_nothing(service: ModelService, make: Make) -> None:
    load = asyncio.ensure_future(service.load(make({"start_seconds": 60})))
    await asyncio.sleep(0.3)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
