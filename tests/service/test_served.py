"""A model and its workers."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import pytest

from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.errors import DjlTrtllmError, ExecutorStartError, LayoutError, ModelError, NotReadyError
from djl_trtllm.executor.protocol import Feature, Start
from djl_trtllm.model import Tokenizer
from djl_trtllm.service import Model, ServedModel, State
from tests.engines.helpers import gpu_machine
from tests.support import executors
from tests.support.in_process import Hosts, ask, played_model, state_of
from tests.support.virtual_time import in_virtual_time, until


async def loaded(model: Model, workers: int = 1) -> ServedModel:
    served = ServedModel("story", "/store/story")
    await served.load(lambda: model, workers)
    return served


def now() -> float:
    return asyncio.get_running_loop().time()


# -- loading -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_model_is_prepared_beside_the_event_loop(hosts: Hosts, tokenizer: Tokenizer) -> None:
    threads: list[threading.Thread] = []

    def prepare() -> Model:
        threads.append(threading.current_thread())
        return played_model(tokenizer)

    served = ServedModel("story", "/store/story")
    assert (served.name, served.source, served.at_startup) == ("story", "/store/story", True)
    assert (state_of(served), served.failure, served.restarts) == (State.LOADING, None, 0)
    with pytest.raises(NotReadyError, match="story is still loading"):
        _ = served.model
    await served.load(prepare)
    assert threads != [threading.main_thread()]
    assert state_of(served) is State.READY
    assert served.model.name == "story"
    assert served.adapters is served.workers[0].adapters
    assert len(hosts.made) == 1
    await served.close()


@in_virtual_time
async def test_what_is_wrong_in_the_files_fails_the_model(hosts: Hosts) -> None:
    told: list[DjlTrtllmError] = []
    error = LayoutError("no model at /store/story")

    def prepare() -> Model:
        raise error

    served = ServedModel("story", "/store/story", at_startup=False, on_failed=told.append)
    with pytest.raises(LayoutError):
        await served.load(prepare)
    assert (state_of(served), served.failure, told, served.at_startup) == (State.FAILED, error, [error], False)


@in_virtual_time
async def test_a_defect_fails_the_model_too(hosts: Hosts) -> None:
    def prepare() -> Model:
        raise KeyError("tokenizer")

    served = ServedModel("story", "/store/story")
    with pytest.raises(KeyError):
        await served.load(prepare)
    assert state_of(served) is State.FAILED
    assert str(served.failure) == "loading it failed: KeyError('tokenizer')"


@in_virtual_time
async def test_an_engine_process_that_does_not_start_fails_the_model_once(hosts: Hosts, tokenizer: Tokenizer) -> None:
    told: list[DjlTrtllmError] = []
    hosts.failures = [error := ExecutorStartError("no such engine")]
    served = ServedModel("story", "/store/story", on_failed=told.append)
    with pytest.raises(ExecutorStartError):
        await served.load(lambda: played_model(tokenizer))
    assert (state_of(served), told) == (State.FAILED, [error])
    await served.close()


@in_virtual_time
async def test_a_model_of_which_not_all_workers_start_has_failed(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.failures = [None, ExecutorStartError("no room")]
    served = ServedModel("story", "/store/story")
    with pytest.raises(ExecutorStartError, match="no room"):
        await served.load(lambda: played_model(tokenizer), 2)
    assert state_of(served) is State.FAILED
    await served.close()
    assert hosts.made[0].closed


@in_virtual_time
async def test_a_model_is_loaded_with_the_workers_that_were_asked_for(hosts: Hosts, tokenizer: Tokenizer) -> None:
    served = await loaded(played_model(tokenizer), 3)
    assert [worker.state for worker in served.workers] == [State.READY] * 3
    assert [host.started_with for host in hosts.made] == [Start(executors.SCRIPTED, {})] * 3
    await served.close()


# -- scaling -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_workers_share_statistics_and_adapters(hosts: Hosts, tokenizer: Tokenizer) -> None:
    served = await loaded(played_model(tokenizer), 2)
    for worker in served.workers:
        assert worker.name == "story"
        assert worker.adapters is served.adapters
        await ask(worker)
    assert served.statistics.requests == 2
    await served.close()


@in_virtual_time
async def test_workers_that_are_taken_away_end_what_they_have_begun(hosts: Hosts, tokenizer: Tokenizer) -> None:
    served = await loaded(played_model(tokenizer, shutdown_timeout=9), 3)
    kept = served.workers[0]
    asked = await ask(served.workers[2], tokens=1)
    scaled = asyncio.ensure_future(served.scale(1))
    await asyncio.sleep(1)
    assert served.workers == [kept]
    hosts.made[2].step()
    assert asked.error is None and asked.finished is not None
    await scaled
    assert [host.closed for host in hosts.made] == [False, True, True]
    await served.close()


@in_virtual_time
async def test_workers_that_are_taken_away_have_shutdown_timeout_seconds(hosts: Hosts, tokenizer: Tokenizer) -> None:
    served = await loaded(played_model(tokenizer, shutdown_timeout=9), 2)
    asked = await ask(served.workers[1])
    begun = now()
    await served.scale(1)
    assert now() - begun == pytest.approx(9, abs=0.05)
    assert isinstance(asked.error, NotReadyError)
    await served.close()


@in_virtual_time
async def test_a_model_that_loads_is_not_scaled(hosts: Hosts) -> None:
    with pytest.raises(ModelError, match="model story is still loading"):
        await ServedModel("story", "/store/story").scale(2)


@in_virtual_time
async def test_a_worker_that_does_not_start_leaves_the_others(hosts: Hosts, tokenizer: Tokenizer) -> None:
    told: list[DjlTrtllmError] = []
    served = ServedModel("story", "/store/story", on_failed=told.append)
    await served.load(lambda: played_model(tokenizer))
    hosts.failures = [ExecutorStartError("no room")]
    with pytest.raises(ExecutorStartError, match="no room"):
        await served.scale(3)
    assert (state_of(served), len(served.workers), told) == (State.READY, 1, [])
    assert len(hosts.made) == 2
    await served.close()


@in_virtual_time
async def test_a_worker_that_was_added_counts_when_it_fails(hosts: Hosts, tokenizer: Tokenizer) -> None:
    told: list[DjlTrtllmError] = []
    served = ServedModel("story", "/store/story", on_failed=told.append)
    await served.load(lambda: played_model(tokenizer, retry_threshold=0), 2)
    hosts.made[1].die()
    await asyncio.sleep(1)
    assert (state_of(served), told) == (State.FAILED, [served.workers[1].failure])
    assert served.failure is served.workers[1].failure
    await served.close()


@in_virtual_time
async def test_models_are_scaled_one_after_the_other(hosts: Hosts, tokenizer: Tokenizer) -> None:
    served = await loaded(played_model(tokenizer))
    hosts.load_seconds = 5
    await asyncio.gather(served.scale(2), served.scale(2))
    assert (len(served.workers), len(hosts.made)) == (2, 2)
    await served.close()


@pytest.mark.parametrize("how", ["end", "close"])
@in_virtual_time
async def test_a_model_that_ends_while_it_is_scaled_leaves_no_engine_process(
    hosts: Hosts, tokenizer: Tokenizer, how: str
) -> None:
    served = await loaded(played_model(tokenizer))
    hosts.load_seconds = 5
    scaled = asyncio.ensure_future(served.scale(2))
    await until(lambda: len(hosts.made) == 2)
    await (served.end(1) if how == "end" else served.close())
    with pytest.raises(ModelError, match="model story was unregistered while it was scaled"):
        await scaled
    assert [host.closed for host in hosts.made] == [True, True]
    assert len(served.workers) == 1


# -- the end -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_all_workers_refuse_and_end_together(hosts: Hosts, tokenizer: Tokenizer) -> None:
    served = await loaded(played_model(tokenizer), 2)
    asked = [await ask(worker) for worker in served.workers]
    served.refuse_new()
    assert [worker.state for worker in served.workers] == [State.DRAINING] * 2
    begun = now()
    await served.end(5)
    assert now() - begun == pytest.approx(5, abs=0.05)
    assert [type(one.error) for one in asked] == [NotReadyError] * 2
    assert [host.closed for host in hosts.made] == [True, True]
    assert state_of(served) is State.STOPPED


@in_virtual_time
async def test_the_end_of_a_model_refuses_new_requests_at_once(hosts: Hosts, tokenizer: Tokenizer) -> None:
    served = await loaded(played_model(tokenizer))
    await ask(served.workers[0])
    end = asyncio.ensure_future(served.end(5))
    await asyncio.sleep(0)
    assert state_of(served) is State.DRAINING
    await end


# -- requests ----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_request_goes_to_the_worker_with_the_least_to_do(hosts: Hosts, tokenizer: Tokenizer) -> None:
    served = await loaded(played_model(tokenizer))
    assert served.pick() is served.workers[0]
    await served.scale(3)
    first, second, third = served.workers
    for worker in (first, first, second):
        await ask(worker)
    assert served.pick() is third
    hosts.made[2].die()
    assert served.pick() is second
    await served.close()


@pytest.mark.parametrize(
    ("states", "state"),
    [
        ([State.READY, State.RECOVERING], State.READY),
        ([State.RECOVERING, State.LOADING], State.RECOVERING),
        ([State.LOADING, State.DRAINING], State.LOADING),
        ([State.DRAINING, State.STOPPED], State.DRAINING),
        ([State.READY, State.FAILED], State.FAILED),
    ],
)
@in_virtual_time
async def test_a_model_is_as_well_as_its_best_worker_unless_one_has_failed(
    hosts: Hosts, tokenizer: Tokenizer, states: list[State], state: State
) -> None:
    served = await loaded(played_model(tokenizer), 2)
    for worker, each in zip(served.workers, states, strict=True):
        worker.state = each
    assert state_of(served) is state
    await served.close()


@in_virtual_time
async def test_engine_processes_that_were_replaced_are_counted_over_all_workers(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    served = await loaded(played_model(tokenizer), 2)
    for host in list(hosts.made):
        host.die()
    await asyncio.sleep(5)
    assert (served.restarts, served.failure) == (2, None)
    await served.close()


@in_virtual_time
async def test_adapters_are_served_where_the_engine_takes_them(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.features |= {Feature.ADAPTERS}
    served = await loaded(played_model(tokenizer))
    assert served.serves_adapters
    await served.close()
    assert not served.serves_adapters


# -- GPUs --------------------------------------------------------------------------------------------------------------


def of_gpus(tokenizer: Tokenizer, gpus: int, **options: Any) -> Model:
    """A model that takes this number of GPUs."""
    model = played_model(tokenizer)
    start = Start(executors.SCRIPTED, options, stream_interval=4)
    return dataclasses.replace(model, gpus=gpus, start=start)


def visible(host_start: Start | None) -> str | None:
    """The GPUs that a host was given; None where it sees all."""
    assert host_start is not None
    devices: str | None = host_start.options.get("environment", {}).get("CUDA_VISIBLE_DEVICES")
    return devices


@pytest.fixture
def any_options(hosts: Hosts) -> Hosts:
    """Hosts that are started with options that the scripted executor does not have."""
    hosts.script = {}
    return hosts


@in_virtual_time
async def test_each_worker_has_gpus_of_its_own(
    any_options: Hosts, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5, ,6,7,8")
    served = await loaded(of_gpus(tokenizer, 2, environment={"NCCL_DEBUG": "INFO"}, max_beam_width=3), 2)
    first, second = (host.started_with for host in any_options.made)
    assert first == served.model.start
    assert second is not None
    assert (second.executor, second.stream_interval) == (executors.SCRIPTED, 4)
    assert second.options == {
        "environment": {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "6,7"},
        "max_beam_width": 3,
    }
    with pytest.raises(ModelError, match=r"3 workers of model story need 6 GPUs, 2 each .*, and 5 are visible"):
        await served.scale(3)
    assert len(any_options.made) == 2
    await served.close()


@in_virtual_time
async def test_without_a_list_of_gpus_those_of_the_machine_count(
    any_options: Hosts, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(Hardware, "probe", lambda: gpu_machine(gpus=3))
    served = await loaded(of_gpus(tokenizer, 1), 3)
    assert [visible(host.started_with) for host in any_options.made] == [None, "1", "2"]
    with pytest.raises(ModelError, match=r"4 workers of model story need 4 GPUs, 1 each .*, and 3 are visible"):
        await served.scale(4)
    await served.close()


@in_virtual_time
async def test_workers_without_gpus_start_alike(any_options: Hosts, tokenizer: Tokenizer) -> None:
    served = await loaded(of_gpus(tokenizer, 0), 2)
    assert [visible(host.started_with) for host in any_options.made] == [None, None]
    await served.close()
