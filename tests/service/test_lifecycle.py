"""A model from loading to its end."""

from __future__ import annotations

import asyncio
import logging

import pytest

from djl_trtllm.batching.statistics import Statistics
from djl_trtllm.errors import DjlTrtllmError, ExecutorStartError, NotReadyError
from djl_trtllm.executor.protocol import Feature, Start
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason
from djl_trtllm.service import ModelService, State
from djl_trtllm.service.adapters import Adapters
from tests.support import executors
from tests.support.in_process import Hosts, ask, played_model, state_of
from tests.support.virtual_time import in_virtual_time


def now() -> float:
    return asyncio.get_running_loop().time()


def test_the_states_have_the_words_that_clients_read() -> None:
    assert [state.value for state in State] == ["loading", "ready", "recovering", "draining", "failed", "stopped"]


@in_virtual_time
async def test_a_model_loads_serves_and_stops(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = ModelService("story")
    assert (service.name, state_of(service), service.batch, service.pid) == ("story", State.LOADING, None, None)
    assert (service.load_now, service.restarts, service.failure) == (0, 0, None)
    await service.load(played_model(tokenizer))
    assert state_of(service) is State.READY
    asked = await ask(service)
    hosts.last.step(4)
    assert asked.reason is FinishReason.LENGTH
    await service.close()
    assert state_of(service) is State.STOPPED
    assert hosts.last.closed
    await service.close()
    assert state_of(service) is State.STOPPED


@in_virtual_time
async def test_batch_and_process_are_those_of_the_engine_process(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = ModelService("story")
    await service.load(played_model(tokenizer))
    assert service.pid == hosts.last.pid
    assert service.batch is not None
    assert service.batch.limits.max_input_len == 1024
    await service.close()


@in_virtual_time
async def test_an_engine_process_starts_as_the_models_options_say(hosts: Hosts, tokenizer: Tokenizer) -> None:
    model = played_model(tokenizer, script={"end_after": 3}, model_loading_timeout=7, executor_hang_timeout=9)
    service = ModelService("story")
    await service.load(model)
    assert hosts.last.started_with == Start(executors.SCRIPTED, {"end_after": 3})
    assert (hosts.last.load_timeout, hosts.last.hang_timeout) == (7, 9)
    await service.close()


@in_virtual_time
async def test_a_start_of_its_own_wins_over_the_models(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = ModelService("story")
    await service.load(played_model(tokenizer), Start(executors.SCRIPTED, {"end_after": 5}))
    assert hosts.last.started_with == Start(executors.SCRIPTED, {"end_after": 5})
    await service.close()


@in_virtual_time
async def test_the_log_says_what_is_ready(hosts: Hosts, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    service = ModelService("story")
    await service.load(played_model(tokenizer))
    assert f"model story is ready: ScriptedExecutor in process {hosts.last.pid}, loaded in" in caplog.text
    assert "(device played)" in caplog.text
    await service.close()


@in_virtual_time
async def test_a_model_that_does_not_load_has_failed(hosts: Hosts, tokenizer: Tokenizer) -> None:
    told: list[DjlTrtllmError] = []
    service = ModelService("story", on_failed=told.append)
    hosts.failures = [error := ExecutorStartError("no such engine")]
    with pytest.raises(ExecutorStartError, match="no such engine"):
        await service.load(played_model(tokenizer))
    assert (state_of(service), service.failure, told) == (State.FAILED, error, [error])
    await service.close()
    assert state_of(service) is State.FAILED


@in_virtual_time
async def test_a_model_may_fail_without_anybody_to_be_reported(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = ModelService("story")
    hosts.failures = [ExecutorStartError("no such engine")]
    with pytest.raises(ExecutorStartError):
        await service.load(played_model(tokenizer))
    assert state_of(service) is State.FAILED
    await service.close()


@in_virtual_time
async def test_a_model_that_is_ended_while_it_loads_does_not_get_ready(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.load_seconds = 10
    service = ModelService("story")
    load = asyncio.ensure_future(service.load(played_model(tokenizer)))
    await asyncio.sleep(5)
    service.refuse_new()
    await load
    assert state_of(service) is State.DRAINING
    await service.close()


@in_virtual_time
async def test_statistics_and_adapters_may_be_shared(hosts: Hosts, tokenizer: Tokenizer) -> None:
    model = played_model(tokenizer)
    statistics, adapters = Statistics(), Adapters(model.directory)
    services = [ModelService("story", statistics=statistics, adapters=adapters) for _ in range(2)]
    for service in services:
        await service.load(model)
        await ask(service)
        assert service.adapters is adapters
    assert statistics.requests == 2
    for service in services:
        await service.close()


@in_virtual_time
async def test_what_the_engine_process_says_about_adapters_counts(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = ModelService("story")
    serves = [service.serves_adapters]
    await service.load(played_model(tokenizer))
    serves.append(service.serves_adapters)
    hosts.last.features |= {Feature.ADAPTERS}
    serves.append(service.serves_adapters)
    await service.close()
    serves.append(service.serves_adapters)
    assert serves == [False, False, True, False]


# -- the end -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_draining_refuses_new_requests_and_ends_with_the_last_old_one(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = ModelService("story")
    await service.load(played_model(tokenizer))
    asked = await ask(service, tokens=1)
    drain = asyncio.ensure_future(service.drain(60))
    await asyncio.sleep(5)
    assert state_of(service) is State.DRAINING
    with pytest.raises(NotReadyError, match="model story is shutting down"):
        await ask(service)
    assert not drain.done()
    hosts.last.step()
    await drain
    assert now() == pytest.approx(5, abs=0.03)
    assert asked.reason is FinishReason.LENGTH
    await service.close()


@in_virtual_time
async def test_draining_ends_at_its_timeout(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = ModelService("story")
    await service.load(played_model(tokenizer))
    asked = await ask(service)
    await service.drain(0.2)
    assert now() == 0.2
    assert asked.finished is None
    await service.close()


@in_virtual_time
async def test_draining_waits_for_nothing_where_nothing_runs(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = ModelService("story")
    await service.drain(60)
    await service.load(played_model(tokenizer))
    await service.drain(60)
    assert now() == 0
    await service.close()


@in_virtual_time
async def test_closing_ends_what_still_runs_with_an_error(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = ModelService("story")
    await service.load(played_model(tokenizer, max_rolling_batch_size=1))
    asked = [await ask(service) for _ in range(2)]
    await service.close()
    for one in asked:
        assert one.reason is FinishReason.ERROR
        assert isinstance(one.error, NotReadyError)
        assert "model story was shut down while it was answering" in str(one.error)
        service.cancel(one.generations)
    assert (service.load_now, service.batch) == (0, None)


@in_virtual_time
async def test_an_engine_process_that_is_late_with_its_news_or_its_end_changes_nothing(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    service = ModelService("story")
    await service.load(played_model(tokenizer))
    await service.close()
    hosts.last.step()
    hosts.last.die()
    await asyncio.sleep(60)
    assert (state_of(service), len(hosts.made)) == (State.STOPPED, 1)


@in_virtual_time
async def test_a_failed_or_stopped_model_does_not_drain(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = ModelService("story")
    await service.close()
    service.refuse_new()
    assert state_of(service) is State.STOPPED
    service.fail(ExecutorStartError("no such engine"))
    service.refuse_new()
    assert state_of(service) is State.FAILED
