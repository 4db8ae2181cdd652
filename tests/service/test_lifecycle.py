"""The life of a model on a real executor host."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import orjson
import psutil
import pytest

from djl_trtllm.api import lmi
from djl_trtllm.batching import FinishReason, Update
from djl_trtllm.errors import (
    DjlTrtllmError,
    ExecutorStartError,
    GenerationError,
    NotReadyError,
    OverloadedError,
    PromptTooLongError,
    RequestTimeoutError,
)
from djl_trtllm.service import Model, ModelService, State, open_source, prepare
from tests.support.serving_process import PROMPT, scripted_model

Make = Callable[..., Model]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make(script, **options)`: a prepared model."""

    def make_one(script: dict[str, object] | None = None, **options: object) -> Model:
        return prepare(open_source(scripted_model(tmp_path / "model", script, **options), {}))

    return make_one


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process of a test outlives it."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


class Request:
    """A request to a service, and what came of it."""

    def __init__(self, service: ModelService) -> None:
        self.service = service
        self.updates: list[Update] = []
        self.done = asyncio.Event()

    def consume(self, update: Update) -> None:
        self.updates.append(update)
        if update.finished is not None:
            self.done.set()

    async def start(self, tokens: int = 4, prompt: str = PROMPT) -> Request:
        payload = {"inputs": prompt, "parameters": {"max_new_tokens": tokens}}
        call = lmi.parse(orjson.dumps(payload), "application/json")
        self.generation = await self.service.generate(call, self.consume)
        return self

    async def ended(self) -> FinishReason:
        await asyncio.wait_for(self.done.wait(), 20)
        (finished,) = [update.finished for update in self.updates if update.finished is not None]
        self.error = finished.error
        return finished.reason


async def reached(service: ModelService, state: State) -> None:
    async def wait() -> None:
        while service.state is not state:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), 30)


def run(body: Callable[[], Awaitable[None]]) -> None:
    """Run a test; afterwards no task may be left."""

    async def checked() -> None:
        tasks = asyncio.all_tasks()
        await body()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == tasks

    asyncio.run(asyncio.wait_for(checked(), 60))


def test_a_model_loads_serves_and_stops(make: Make) -> None:
    async def body() -> None:
        service = ModelService("story")
        assert service.state is State.LOADING
        with pytest.raises(NotReadyError, match="still loading") as refused:
            await Request(service).start()
        assert refused.value.retry_after == 10
        await service.load(make())
        assert service.state is State.READY
        request = await Request(service).start(4)
        assert await request.ended() is FinishReason.LENGTH
        await service.close()
        assert service.state is State.STOPPED
        assert service.batch is None
        await service.close()

    run(body)


def test_a_model_that_does_not_load_has_failed(make: Make) -> None:
    async def body() -> None:
        told: list[DjlTrtllmError] = []
        service = ModelService("story", on_failed=told.append)
        with pytest.raises(ExecutorStartError, match="no such engine"):
            await service.load(make({"start_error": "no such engine"}))
        assert service.state is State.FAILED
        assert told == [service.failure]
        await service.close()
        assert service.state is State.FAILED

    run(body)


@pytest.mark.parametrize("action", ["die", "raise", "exit", "hang", "stop"])
def test_a_lost_host_is_replaced_and_every_request_answered(make: Make, action: str) -> None:
    async def body() -> None:
        service = ModelService("story")
        faults = [{"action": action, "at_token": 2, "max_new_tokens": 99}]
        options = {"option.executor_hang_timeout": 0.8, "option.max_rolling_batch_size": 2}
        await service.load(make({"steps_per_second": 50, "faults": faults}, **options))
        requests = [await Request(service).start(tokens) for tokens in (500, 99, 500)]
        for request in requests:
            assert await request.ended() is FinishReason.ERROR
            assert isinstance(request.error, GenerationError)
        assert service.state is State.RECOVERING
        with pytest.raises(NotReadyError, match="recovering"):
            await Request(service).start()
        await reached(service, State.READY)
        assert service.restarts == 1
        assert await (await Request(service).start()).ended() is FinishReason.LENGTH
        await service.close()

    run(body)


def test_a_host_that_dies_too_often_fails_the_model(make: Make) -> None:
    async def body() -> None:
        told: list[DjlTrtllmError] = []
        service = ModelService("story", on_failed=told.append)
        await service.load(make({"faults": [{"action": "die"}]}, retry_threshold=1))
        for state in (State.READY, State.FAILED):
            assert await (await Request(service).start()).ended() is FinishReason.ERROR
            await reached(service, state)
        assert len(told) == 1
        assert "SIGKILL" in str(told[0])
        with pytest.raises(NotReadyError, match="has failed") as refused:
            await Request(service).start()
        assert refused.value.retry_after is None
        await service.close()

    run(body)


def test_a_replacement_that_does_not_start_counts_as_a_try(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        service = ModelService("story")
        await service.load(make(retry_threshold=2))
        monkeypatch.setattr("djl_trtllm.executor.client.sys.executable", "/nonexistent/python")
        assert service._client is not None
        os.kill(service._client.pid, signal.SIGKILL)
        await reached(service, State.FAILED)
        assert "could not be started" in str(service.failure)
        assert service.restarts == 0
        await service.close()

    run(body)


def test_draining_refuses_new_requests_and_finishes_old_ones(make: Make) -> None:
    async def body() -> None:
        service = ModelService("story")
        await service.load(make({"steps_per_second": 100}, **{"option.max_rolling_batch_size": 1}))
        requests = [await Request(service).start(20) for _ in range(3)]
        drain = asyncio.ensure_future(service.drain(20))
        await asyncio.sleep(0)
        assert service.state is State.DRAINING
        with pytest.raises(NotReadyError, match="shutting down"):
            await Request(service).start()
        await drain
        assert [await request.ended() for request in requests] == [FinishReason.LENGTH] * 3
        await service.close()

    run(body)


def test_closing_ends_what_still_runs_with_an_error(make: Make) -> None:
    async def body() -> None:
        service = ModelService("story")
        await service.load(make({"steps_per_second": 50}, **{"option.max_rolling_batch_size": 1}))
        requests = [await Request(service).start(10_000) for _ in range(2)]
        await service.drain(0.2)
        await service.close()
        for request in requests:
            assert await request.ended() is FinishReason.ERROR
            assert isinstance(request.error, NotReadyError)
            service.cancel(request.generation)

    run(body)


def test_a_host_that_dies_while_draining_is_not_replaced(make: Make) -> None:
    async def body() -> None:
        service = ModelService("story")
        await service.load(make({"steps_per_second": 50, "faults": [{"action": "die", "at_token": 20}]}))
        request = await Request(service).start(100)
        await service.drain(20)
        assert await request.ended() is FinishReason.ERROR
        assert (service.state, service.restarts) == (State.DRAINING, 0)
        await service.close()
        assert service.state is State.STOPPED

    run(body)


def test_closing_while_it_recovers_leaves_nothing(make: Make) -> None:
    async def body() -> None:
        told: list[DjlTrtllmError] = []
        service = ModelService("story", on_failed=told.append)
        await service.load(make({"start_seconds": 1.0}))
        assert service._client is not None
        os.kill(service._client.pid, signal.SIGKILL)
        await reached(service, State.RECOVERING)
        await asyncio.sleep(0.3)
        await service.close()
        assert (service.state, told) == (State.STOPPED, [])

    run(body)


def test_a_cancelled_load_leaves_nothing(make: Make) -> None:
    async def body() -> None:
        service = ModelService("story")
        load = asyncio.ensure_future(service.load(make({"start_seconds": 60})))
        await asyncio.sleep(0.3)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        await service.close()

    run(body)


def test_a_request_past_predict_timeout_is_ended(make: Make) -> None:
    async def body() -> None:
        service = ModelService("story")
        await service.load(make({"steps_per_second": 50}, **{"option.predict_timeout": 0.3}))
        request = await Request(service).start(10_000)
        assert await request.ended() is FinishReason.ERROR
        assert isinstance(request.error, RequestTimeoutError)
        await service.close()

    run(body)


def test_a_full_queue_refuses_before_it_tokenises(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        service = ModelService("story")
        options = {"option.max_rolling_batch_size": 1, "job_queue_size": 1}
        await service.load(make({"steps_per_second": 50}, **options))
        requests = [await Request(service).start(10_000) for _ in range(2)]

        def encode(*_: object) -> list[int]:
            raise AssertionError("tokenised")

        monkeypatch.setattr(type(service.model.tokenizer), "encode", encode)
        with pytest.raises(OverloadedError, match="1 waiting, job_queue_size is 1"):
            await Request(service).start()
        for request in requests:
            service.cancel(request.generation)
            assert await request.ended() is FinishReason.CANCELLED
        await service.drain(20)
        await service.close()

    run(body)


def test_a_refused_request_gives_its_place_back(make: Make) -> None:
    async def body() -> None:
        service = ModelService("story")
        await service.load(make(**{"option.max_rolling_batch_size": 1, "job_queue_size": 1}))
        for _ in range(5):
            with pytest.raises(PromptTooLongError):
                await Request(service).start(4, "wolf " * 5000)
        assert service.batch is not None
        assert service.batch.idle
        await service.close()

    run(body)


def test_a_host_that_dies_while_a_long_prompt_is_tokenised(make: Make) -> None:
    async def body() -> None:
        service = ModelService("story")
        await service.load(make())
        request = asyncio.ensure_future(Request(service).start(4, "wolf " * 2000))
        await asyncio.sleep(0)
        batch = service.batch
        service._batch = None  # what a death does; the real one is not so exactly timed
        with pytest.raises(NotReadyError):
            await request
        assert batch is not None
        assert batch.idle
        await service.close()

    run(body)
