"""The models of a server, and their workers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.config import Options
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.errors import (
    ExecutorStartError,
    InvalidRequestError,
    LayoutError,
    ModelError,
    NotReadyError,
    UnknownAdapterError,
)
from djl_trtllm.executor.protocol import Start
from djl_trtllm.model.adapter import CONFIG_FILE, AdapterLimits, check_adapter
from djl_trtllm.request import Adapter
from djl_trtllm.service.adapters import Adapters, adapter_roots, problem_of_name, problem_of_text
from djl_trtllm.service.lifecycle import Registry, ServedModel, State
from djl_trtllm.service.model import Model
from tests.engines.helpers import gpu_machine
from tests.service.conftest import Stage
from tests.support import models
from tests.support.in_process import ask, state_of
from tests.support.models import write_adapter
from tests.support.virtual_time import until

# -- loading -----------------------------------------------------------------------------------------------------------


async def test_a_model_is_prepared_beside_the_event_loop(stage: Stage) -> None:
    threads: list[threading.Thread] = []

    def prepare() -> Model:
        threads.append(threading.current_thread())
        return stage.model()

    served = stage.served()
    assert (served.name, served.source, served.at_startup) == ("story", "/store/story", True)
    assert (state_of(served), served.failure, served.restarts) == (State.LOADING, None, 0)
    with pytest.raises(NotReadyError, match="story is still loading"):
        _ = served.model
    await served.load(prepare)
    assert threads != [threading.main_thread()]
    assert state_of(served) is State.READY
    assert served.model.name == "story"
    assert served.adapters is served.workers[0].adapters
    assert len(stage.made) == 1


async def test_what_is_wrong_in_the_files_fails_the_model(stage: Stage) -> None:
    error = LayoutError("no model at /store/story")

    def prepare() -> Model:
        raise error

    served = stage.served(at_startup=False)
    with pytest.raises(LayoutError):
        await served.load(prepare)
    assert (state_of(served), served.failure, stage.reported, served.at_startup) == (
        State.FAILED,
        error,
        [error],
        False,
    )


@pytest.mark.parametrize("started", [0, 1])
async def test_a_model_of_which_not_all_workers_start_has_failed_once(stage: Stage, started: int) -> None:
    stage.failures = [None] * started + [error := ExecutorStartError("no room")]
    served = stage.served()
    with pytest.raises(ExecutorStartError, match="no room"):
        await served.load(lambda: stage.model(), 2)
    assert (state_of(served), stage.reported) == (State.FAILED, [error])
    await served.close()
    assert all(host.closed for host in stage.made[:started])


# -- scaling -----------------------------------------------------------------------------------------------------------


async def test_workers_share_statistics_and_adapters(stage: Stage) -> None:
    served = await stage.serve(2)
    assert [host.started_with for host in stage.made] == [Start(models.SCRIPTED, {})] * 2
    for worker in served.workers:
        assert worker.name == "story"
        assert worker.adapters is served.adapters
        await ask(worker)
    assert served.statistics.requests == 2


async def test_workers_that_are_taken_away_end_what_they_have_begun(stage: Stage) -> None:
    served = await stage.serve(3, shutdown_timeout=9)
    kept = served.workers[0]
    asked = await ask(served.workers[2], tokens=1)
    scaled = asyncio.ensure_future(served.scale(1))
    await asyncio.sleep(1)
    assert served.workers == [kept]
    stage.made[2].step()
    assert asked.error is None and asked.finished is not None
    await scaled
    assert [host.closed for host in stage.made] == [False, True, True]


async def test_a_worker_that_does_not_start_leaves_the_others(stage: Stage) -> None:
    served = await stage.serve()
    stage.failures = [ExecutorStartError("no room")]
    with pytest.raises(ExecutorStartError, match="no room"):
        await served.scale(3)
    assert (state_of(served), len(served.workers), stage.reported) == (State.READY, 1, [])
    assert len(stage.made) == 2


async def test_a_worker_that_was_added_counts_when_it_fails(stage: Stage) -> None:
    served = await stage.serve(2, retry_threshold=0)
    stage.made[1].die()
    await asyncio.sleep(1)
    assert (state_of(served), stage.reported) == (State.FAILED, [served.workers[1].failure])
    assert served.failure is served.workers[1].failure


async def test_models_are_scaled_one_after_the_other(stage: Stage) -> None:
    served = await stage.serve()
    stage.load_seconds = 5
    await asyncio.gather(served.scale(2), served.scale(2))
    assert (len(served.workers), len(stage.made)) == (2, 2)


@pytest.mark.parametrize("how", ["end", "close"])
async def test_a_model_that_ends_while_it_is_scaled_leaves_no_engine_process(stage: Stage, how: str) -> None:
    served = await stage.serve()
    stage.load_seconds = 5
    scaled = asyncio.ensure_future(served.scale(2))
    await until(lambda: len(stage.made) == 2)
    await (served.end(1) if how == "end" else served.close())
    with pytest.raises(ModelError, match="model story was unregistered while it was scaled"):
        await scaled
    assert [host.closed for host in stage.made] == [True, True]
    assert len(served.workers) == 1


# -- the end -----------------------------------------------------------------------------------------------------------


async def test_all_workers_refuse_and_end_together(stage: Stage) -> None:
    served = await stage.serve(2)
    asked = [await ask(worker) for worker in served.workers]
    served.refuse_new()
    assert [worker.state for worker in served.workers] == [State.DRAINING] * 2
    begun = asyncio.get_running_loop().time()
    await served.end(5)
    assert asyncio.get_running_loop().time() - begun == pytest.approx(5, abs=0.05)
    assert [type(one.error) for one in asked] == [NotReadyError] * 2
    assert [host.closed for host in stage.made] == [True, True]
    assert state_of(served) is State.STOPPED


# -- requests ----------------------------------------------------------------------------------------------------------


async def test_a_request_goes_to_the_worker_with_the_least_to_do(stage: Stage) -> None:
    served = await stage.serve()
    assert served.pick() is served.workers[0]
    await served.scale(3)
    first, second, third = served.workers
    for worker in (first, first, second):
        await ask(worker)
    assert served.pick() is third
    assert served.pick(second) is second, "its session is there"
    stage.made[2].die()
    assert served.pick() is second
    assert served.pick(third) is second, "it is not ready"
    await asyncio.sleep(5)
    assert (served.restarts, served.failure) == (1, None)


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
async def test_a_model_is_as_well_as_its_best_worker_unless_one_has_failed(
    stage: Stage, states: list[State], state: State
) -> None:
    served = await stage.serve(2)
    for worker, each in zip(served.workers, states, strict=True):
        worker.state = each
    assert state_of(served) is state


# -- GPUs --------------------------------------------------------------------------------------------------------------


def of_gpus(stage: Stage, gpus: int, **options: Any) -> Model:
    """A model that takes this number of GPUs, on processes with options that the scripted executor does not have."""
    stage.script = {}
    model = stage.model()
    start = Start(models.SCRIPTED, options, stream_interval=4)
    return dataclasses.replace(model, gpus=gpus, start=start)


async def test_each_worker_has_gpus_of_its_own(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5, ,6,7,8")
    served = await stage.serve(2, of_gpus(stage, 2, environment={"NCCL_DEBUG": "INFO"}, max_beam_width=3))
    first, second = (host.started_with for host in stage.made)
    assert first == served.model.start
    assert second is not None
    assert (second.executor, second.stream_interval) == (models.SCRIPTED, 4)
    assert second.options == {
        "environment": {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "6,7"},
        "max_beam_width": 3,
    }
    with pytest.raises(ModelError, match=r"3 workers of model story need 6 GPUs, 2 each .*, and 5 are visible"):
        await served.scale(3)
    assert len(stage.made) == 2


async def test_without_a_list_of_gpus_those_of_the_machine_count(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(Hardware, "probe", lambda: gpu_machine(gpus=3))
    served = await stage.serve(3, of_gpus(stage, 1))
    starts = [host.started_with.options for host in stage.made if host.started_with is not None]
    assert starts == [{}, *({"environment": {"CUDA_VISIBLE_DEVICES": gpu}} for gpu in "12")]
    with pytest.raises(ModelError, match=r"4 workers of model story need 4 GPUs, 1 each .*, and 3 are visible"):
        await served.scale(4)


async def test_models_are_found_by_name_until_they_are_removed_or_replaced() -> None:
    registry = Registry()
    fox, wolf, other = (ServedModel(name, f"/{number}") for number, name in enumerate(("fox", "wolf", "fox")))
    for model in (fox, wolf):
        registry.add(model)
    assert [registry.find(name) for name in ("fox", "wolf", "hen")] == [fox, wolf, None]
    registry.add(other)
    registry.remove(fox)
    assert registry.find("fox") is other, "fox was replaced already"
    registry.remove(other, lost=True)
    registry.remove(other)
    assert (registry.find("fox"), registry.lost) == (None, {"fox"})
    registry.add(fox)
    assert registry.lost == set()


async def test_without_a_name_the_model_of_the_start_is_meant_whatever_is_registered() -> None:
    registry = Registry()
    assert registry.find(None) is None
    fox, wolf, hen = (ServedModel(name, f"/{name}", at_startup=name == "fox") for name in ("fox", "wolf", "hen"))
    for model, meant in ((wolf, wolf), (fox, fox), (hen, fox)):
        registry.add(model)
        assert registry.find(None) is meant
    registry.remove(fox)
    assert registry.find(None) is None
    registry.remove(wolf)
    assert registry.find(None) is hen


# -- The adapters of a model.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("dutch", "french"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
        (tmp_path / "adapters" / name / "adapter_config.json").write_text("{}")
    (tmp_path / "adapters" / "notes").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "adapter_config.json").write_text("{}")
    return tmp_path / "adapters"


def test_an_unknown_adapter_is_reported_with_those_that_are_there(folder: Path) -> None:
    with pytest.raises(UnknownAdapterError, match=r"'german': registered are dutch, french$"):
        Adapters(folder).find("german")
    with pytest.raises(UnknownAdapterError, match="registered are none"):
        Adapters(folder / "notes").find("german")
    assert list(Adapters(folder / "missing")) == []


@pytest.mark.parametrize(("count", "told"), [(10, "a8, a9$"), (11, "a8, a9, …$")])
def test_ten_adapters_are_reported_at_most(folder: Path, count: int, told: str) -> None:
    adapters = Adapters(folder / "notes")
    (folder / "notes" / "one").mkdir()
    (folder / "notes" / "one" / CONFIG_FILE).write_text("{}")
    for number in range(count):
        adapters.register(f"a{number}", "one")
    with pytest.raises(UnknownAdapterError, match=told):
        adapters.find("german")


def test_an_adapter_is_registered_and_taken_away(folder: Path) -> None:
    adapters = Adapters(folder)
    own = [Adapter(name, id_, str(folder / name)) for id_, name in enumerate(("dutch", "french"), 1)]
    assert list(adapters) == own
    (folder / "notes" / "nested").mkdir()
    (folder / "notes" / "nested" / CONFIG_FILE).write_text("{}")
    for id_ in (3, 4):  # an id is never used again
        added = adapters.register("new", "notes/nested")
        assert added == adapters.find("new") == Adapter("new", id_, str((folder / "notes" / "nested").resolve()))
        adapters.unregister("new")
    assert list(adapters) == own
    with pytest.raises(UnknownAdapterError):
        adapters.unregister("new")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        *((source, re.escape(f"the adapter's src is {source!r}")) for source in ("../outside", "/etc", "", ".")),
        *((name, f"adapters/{name} holds no adapter: adapter_config.json is") for name in ("notes", "missing")),
        ("link", "own folder only"),
    ],
)
def test_only_adapters_of_the_models_own_folder_are_registered(folder: Path, source: str, told: str) -> None:
    (folder / CONFIG_FILE).write_text("{}")
    (folder / "link").symlink_to(folder.parent / "outside")
    with pytest.raises(InvalidRequestError, match=told):
        Adapters(folder).register("new", source)


def test_an_adapter_of_another_root_is_registered_by_its_path(folder: Path) -> None:
    adapters = Adapters(folder, [folder.parent / "outside"])
    (folder.parent / "outside" / "greek").mkdir()
    (folder.parent / "outside" / "greek" / CONFIG_FILE).write_text("{}")
    (folder.parent / "outside" / "link").symlink_to(folder.parent)
    source = str(folder.parent / "outside" / "greek")
    assert adapters.register("greek", source) == Adapter("greek", 3, source)
    refused = {
        str(folder.parent / "outside"): "model's own folder, .*outside only",
        "../outside/../outside": "only",
        f"{source}/../link": "SERVING_ADAPTER_ROOTS",
        f"{source}/missing": "outside/greek/missing holds no adapter",
    }
    for src, told in refused.items():
        with pytest.raises(InvalidRequestError, match=told):
            adapters.register("new", src)


def test_an_adapter_may_be_registered_while_they_are_listed(folder: Path) -> None:
    adapters = Adapters(folder)
    for adapter in adapters:
        adapters.register(f"{adapter.name}-again", adapter.name)
    assert len(list(adapters)) == 4


LIMITS = AdapterLimits(max_rank=8, rank_setting="option.max_lora_rank=8")


def test_an_adapter_that_the_engine_could_not_load_is_refused(folder: Path) -> None:
    adapters = Adapters(folder / "notes", limits=LIMITS)
    write_adapter(folder / "notes" / "wide", r=9)
    with pytest.raises(InvalidRequestError, match=r"the adapter 'new' cannot be used: .*adapter_config.json: r is 9"):
        adapters.register("new", "wide")
    write_adapter(folder / "notes" / "wide")
    assert adapters.register("new", "wide").id == 1


def test_a_large_adapter_is_read_in_another_process(folder: Path) -> None:
    """Reading it holds the GIL, and so the event loop."""
    pair = {"A": [8, 8], "B": [8, 8]}
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    entries = ((name.format(layer, side), shape) for layer in range(20_000) for side, shape in pair.items())
    tensors = {name: {"dtype": "F16", "shape": shape, "data_offsets": [0, 128]} for name, shape in entries}
    header = json.dumps(tensors).encode()
    weights = write_adapter(folder / "notes" / "large") / "adapter_model.safetensors"
    weights.write_bytes(struct.pack("<Q", len(header)) + header + bytes(128))
    began = time.process_time()
    check_adapter(weights.parent, LIMITS)
    read = time.process_time()
    assert Adapters(folder / "notes", limits=LIMITS).find("large")
    assert time.process_time() - read < (read - began) / 2


def test_what_the_engine_could_not_load_of_the_models_folder_is_left_out(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_adapter(folder / "french")
    adapters = Adapters(folder, limits=LIMITS)
    assert [adapter.name for adapter in adapters] == ["french"]
    assert "the adapter dutch is left out: " in caplog.text
    with pytest.raises(UnknownAdapterError, match=r"the adapter 'dutch' was not registered: .*: r is None"):
        adapters.find("dutch")
    write_adapter(folder / "dutch")
    assert adapters.register("dutch", "dutch") == adapters.find("dutch")
    adapters.unregister("dutch")
    with pytest.raises(UnknownAdapterError, match="there is no adapter 'dutch'"):
        adapters.find("dutch")


def test_roots_are_the_operators_or_sagemakers() -> None:
    named = Options(adapter_roots=("/a", "/b"))
    assert adapter_roots(named, {"SAGEMAKER_REGION": "x"}) == (Path("/a"), Path("/b"))
    assert adapter_roots(Options(), {"HOME": "/", "SAGEMAKER_REGION": "x"}) == (Path("/opt/ml"),)
    assert adapter_roots(Options(), {"HOME": "/"}) == ()


def test_of_two_that_register_a_name_at_the_same_time_one_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_adapter(folder / "notes" / "wide")
    adapters = Adapters(folder / "notes", limits=LIMITS)
    reading = threading.Barrier(2)
    monkeypatch.setattr("djl_trtllm.service.adapters.check_adapter", lambda *_: reading.wait(10))

    def register() -> str:
        try:
            return adapters.register("new", "wide").name
        except InvalidRequestError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        answers = [each.result() for each in [pool.submit(register), pool.submit(register)]]
    assert sorted(answers) == ["new", "there is an adapter 'new' already: unregister it first"]


GOOD = ["a", "my-adapter_2.1", "ü 3", "a" * 4096]
BAD = ["", "a/b", "/", ".", "..", "a\nb", "a\0", "\x1b[31m", "a" * 4097]


def test_a_name_that_is_none_is_refused_in_a_line() -> None:
    assert [problem_of_name(name, "a model") for name in GOOD] == [None] * len(GOOD)
    assert problem_of_text("a/b", "src") is None
    for name in BAD:
        problem = problem_of_name(name, "a model")
        assert problem is not None and "a model" in problem and problem.isprintable() and len(problem) < 200


@pytest.mark.parametrize(
    ("name", "source"), [("a/b", "x"), ("a", "x\0y"), ("a", "x\ny"), ("a", "x" * 5000), ("a", "x" * 300)]
)
def test_an_adapter_of_such_a_name_or_path_is_refused(tmp_path: Path, name: str, source: str) -> None:
    (tmp_path / "adapters").mkdir()
    with pytest.raises(InvalidRequestError):
        Adapters(tmp_path / "adapters").register(name, source)
