"""The life of a model on real engine processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from djl_trtllm.errors import DjlTrtllmError, ExecutorStartError, GenerationError, NotReadyError, TokenizerError
from djl_trtllm.request import FinishReason
from djl_trtllm.service import Model, ModelService, State, open_source, prepare
from tests.support.in_process import Asked, ask, state_of
from tests.support.models import scripted_model

pytestmark = pytest.mark.slow

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


async def until(condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), 60)


async def end_of(asked: Asked) -> FinishReason:
    await until(lambda: asked.finished is not None)
    assert asked.reason is not None
    return asked.reason


def run(body: Callable[[], Awaitable[None]]) -> None:
    """Run a test; afterwards no task may be left."""

    async def checked() -> None:
        tasks = asyncio.all_tasks()
        await body()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == tasks

    asyncio.run(asyncio.wait_for(checked(), 120))


def kill(service: ModelService) -> None:
    assert service.pid is not None
    os.kill(service.pid, signal.SIGKILL)


def test_a_model_that_does_not_load_says_why(make: Make) -> None:
    async def body() -> None:
        service = ModelService("story")
        with pytest.raises(ExecutorStartError, match="no such engine"):
            await service.load(make({"start_error": "no such engine"}))
        await service.close()

    run(body)


def test_a_tokenizer_that_cannot_be_loaded_ends_the_engine_process_that_loads(make: Make) -> None:
    async def body() -> None:
        model = make({"start_seconds": 60})
        tokenizer = model.directory / "tokenizer.json"
        tokenizer.unlink()  # others share it
        tokenizer.write_text("{}")
        service = ModelService("story")
        with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
            await service.load(model)
        assert isinstance(service.failure, TokenizerError)
        with pytest.raises(NotReadyError, match="has failed"):
            _ = service.model
        await service.close()

    run(body)


@pytest.mark.parametrize("action", ["die", "raise", "exit", "hang", "stop"])
def test_a_lost_engine_process_is_replaced_and_every_request_answered(make: Make, action: str) -> None:
    async def body() -> None:
        service = ModelService("story")
        faults = [{"action": action, "at_token": 2, "max_new_tokens": 99}]
        options = {
            "option.executor_hang_timeout": 0.8,
            "option.max_rolling_batch_size": 2,
            "option.resume_after_restart": "false",
        }
        await service.load(make({"steps_per_second": 50, "faults": faults}, **options))
        *lost, waiting = [await ask(service, tokens) for tokens in (500, 99, 5)]
        for asked in lost:
            assert await end_of(asked) is FinishReason.ERROR
            assert isinstance(asked.error, GenerationError)
        assert await end_of(waiting) is FinishReason.LENGTH
        await until(lambda: service.state is State.READY)
        assert service.restarts == 1
        assert await end_of(await ask(service)) is FinishReason.LENGTH
        await service.close()

    run(body)


@pytest.mark.parametrize("action", ["die", "raise", "exit", "hang", "stop"])
def test_requests_go_on_after_any_end_of_an_engine_process(make: Make, action: str) -> None:
    async def body() -> None:
        service = ModelService("story")
        faults = [{"action": action, "at_token": 2, "max_new_tokens": 99}]
        await service.load(make({"steps_per_second": 50, "faults": faults}, **{"option.executor_hang_timeout": 0.8}))
        whole = await ask(service, 98)
        assert await end_of(whole) is FinishReason.LENGTH
        for asked in [await ask(service, tokens) for tokens in (98, 99, 98)]:
            assert await end_of(asked) is FinishReason.LENGTH
            assert asked.text.startswith(whole.text)
        assert (service.restarts, service.statistics.resumed) == (1, 3)
        await service.close()

    run(body)


def test_an_engine_process_is_recycled_without_an_error(make: Make) -> None:
    async def body() -> None:
        service = ModelService("story")
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
        await service.close()

    run(body)


def test_a_replacement_that_does_not_start_counts_as_a_try(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        service = ModelService("story")
        await service.load(make(retry_threshold=2))
        monkeypatch.setattr("djl_trtllm.executor.client.sys.executable", "/nonexistent/python")
        kill(service)
        await until(lambda: service.state is State.FAILED)
        assert "could not be started" in str(service.failure)
        await service.close()

    run(body)


def test_closing_while_it_recovers_leaves_nothing(make: Make) -> None:
    async def body() -> None:
        told: list[DjlTrtllmError] = []
        service = ModelService("story", on_failed=told.append)
        await service.load(make({"start_seconds": 1.0}))
        kill(service)
        await until(lambda: service.state is State.RECOVERING)
        await asyncio.sleep(0.3)
        await service.close()
        assert (state_of(service), told) == (State.STOPPED, [])

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
