"""An engine process that is recycled by plan."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import weakref

import pytest
from msgspec.structs import replace

from djl_trtllm.errors import ExecutorStartError, InvalidRequestError
from djl_trtllm.request import FinishReason
from djl_trtllm.service.engine import MemoryWatch, settle_garbage_collector
from djl_trtllm.service.lifecycle import State
from djl_trtllm.service.model import Texts
from tests.service.conftest import TOKENIZER, Stage
from tests.support.in_process import ask, state_of
from tests.support.tables import by_rows, table

GB = 10**9


def watch(limit: float | None = None, at_start: int = 2 * GB) -> MemoryWatch:
    made = MemoryWatch("story", limit)
    made.begin(4000, at_start)
    return made


@by_rows(
    ("at_start", "looks", "grown"),
    table(__file__, "growth_by_a_quarter_and_250_megabytes_is_said"),
)
def test_growth_by_a_quarter_and_250_megabytes_is_said(
    at_start: float, looks: tuple[float, ...], grown: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    one = watch(at_start=int(at_start * GB))
    for resident in looks:
        assert one.look(int(resident * GB)) is None
    assert one.resident == int(looks[-1] * GB)
    said = [f"(pid 4000) has grown to {size} GB, from {at_start:.2f} GB after loading" for size in grown]
    assert all(text in message for text, message in zip(said, caplog.messages, strict=True))


def test_a_process_at_its_limit_is_recycled() -> None:
    one = watch(3)
    assert one.look(3 * GB - 1) is None
    assert one.look(3 * GB) == "it takes 3.00 GB (option.executor_memory_limit=3)"
    assert one.resident == 3 * GB


def test_a_limit_below_what_an_engine_takes_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    one = watch(1.5)
    assert one.look(4 * GB) is None
    assert "option.executor_memory_limit=1.5 has no effect" in caplog.messages[0]
    assert "takes 2.00 GB as soon as it is loaded" in caplog.messages[0]
    one.begin(4001, GB)
    assert one.look(2 * GB) is not None


async def test_recyclings_are_a_minute_apart() -> None:
    one = watch()
    assert one.may_recycle()
    await asyncio.sleep(59)
    assert not one.may_recycle()
    await asyncio.sleep(1.1)
    assert one.may_recycle()
    assert not one.may_recycle()


CHECK = 5.1
"""Seconds until somebody looks at the engine process."""


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What this machine has available; the test may change it."""
    available = [100 * GB]
    monkeypatch.setattr("djl_trtllm.service.engine.available_memory", lambda: available[0])
    return available


async def test_a_process_that_has_grown_is_replaced_beside_its_requests(stage: Stage) -> None:
    stage.load_seconds = 3
    service = await stage.load(executor_memory_limit=2)
    old = stage.last
    running = await ask(service, tokens=3)
    old.step()
    await asyncio.sleep(CHECK)
    assert len(stage.made) == 1
    old.resident = 2 * GB
    await asyncio.sleep(CHECK)
    assert (len(stage.made), state_of(service), service.pid) == (2, State.READY, old.pid)
    while_it_loads = await ask(service, tokens=2)
    await asyncio.sleep(3)
    new = stage.last
    later = await ask(service, tokens=1)
    assert (len(old.submitted), len(new.submitted), service.pid) == (2, 1, new.pid)
    new.step()
    assert (later.reason, old.closed) == (FinishReason.LENGTH, False)
    old.step(2)
    assert (running.reason, while_it_loads.reason) == (FinishReason.LENGTH, FinishReason.LENGTH)
    await asyncio.sleep(0.1)
    assert (old.closed, new.closed, state_of(service), service.restarts) == (True, False, State.READY, 0)
    await service.close()
    assert new.closed


@pytest.mark.parametrize("where", ["small machine", "GPU"])
async def test_without_memory_for_two_it_is_replaced_when_its_requests_have_ended(
    stage: Stage, memory: list[int], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    model = stage.model(executor_max_requests=2, max_rolling_batch_size=4)
    if where == "GPU":
        model = dataclasses.replace(model, gpus=1)
    else:
        memory[0] = stage.resident + stage.resident // 4  # as much as the new one takes, and none to spare
    service = await stage.load(model)
    old = stage.last
    running = [await ask(service, tokens=2) for _ in range(2)]
    await asyncio.sleep(CHECK)
    waiting = await ask(service, tokens=1)
    assert (len(stage.made), len(old.submitted), state_of(service), service.load_now) == (1, 2, State.READY, 3)
    old.step(2)
    assert [one.reason for one in running] == [FinishReason.LENGTH] * 2
    assert waiting.finished is None
    await asyncio.sleep(0.1)
    assert (old.closed, len(stage.made)) == (True, 2)
    stage.last.step()
    assert (waiting.reason, state_of(service)) == (FinishReason.LENGTH, State.READY)


async def test_a_process_has_its_number_of_requests_before_it_is_replaced(stage: Stage) -> None:
    service = await stage.load(executor_max_requests=3)
    for _ in range(2):
        await ask(service, tokens=1)
    stage.last.step()
    await asyncio.sleep(CHECK)
    assert len(stage.made) == 1
    await ask(service, tokens=1)
    stage.last.step()
    await asyncio.sleep(CHECK)
    assert (len(stage.made), stage.made[0].closed) == (2, True)
    # The next one begins to count anew, and a minute passes between two.
    for _ in range(3):
        await ask(service, tokens=1)
    stage.last.step()
    await asyncio.sleep(CHECK)
    assert len(stage.made) == 2
    await asyncio.sleep(60)
    assert len(stage.made) == 3


async def test_a_replacement_that_does_not_start_leaves_the_old_one(stage: Stage) -> None:
    service = await stage.load(executor_max_requests=1)
    asked = await ask(service, tokens=1)
    stage.failures = [ExecutorStartError("no room")]
    await asyncio.sleep(CHECK)
    assert (len(stage.made), state_of(service), service.pid) == (2, State.READY, stage.made[0].pid)
    stage.made[0].step()
    assert asked.reason is FinishReason.LENGTH
    await asyncio.sleep(65)
    assert (len(stage.made), service.pid) == (3, stage.last.pid)


async def test_one_that_does_not_start_in_place_of_the_old_one_is_tried_again(stage: Stage, memory: list[int]) -> None:
    memory[0] = 0
    service = await stage.load(executor_max_requests=1)
    await ask(service, tokens=1)
    stage.last.step()
    stage.failures = [ExecutorStartError("no room")]
    await asyncio.sleep(CHECK + 1)
    assert (len(stage.made), state_of(service), service.restarts) == (3, State.READY, 1)


async def test_an_old_process_that_dies_while_the_new_one_starts_costs_nothing(stage: Stage) -> None:
    stage.load_seconds = 3
    service = await stage.load(executor_max_requests=1)
    asked = await ask(service, tokens=2)
    stage.last.step()
    await asyncio.sleep(CHECK)
    stage.made[0].die()
    assert state_of(service) is State.RECOVERING
    await asyncio.sleep(4)
    assert (len(stage.made), state_of(service)) == (2, State.READY)
    stage.last.step()
    assert asked.reason is FinishReason.LENGTH


async def test_a_new_process_that_dies_while_the_old_one_ends_its_requests_is_replaced(stage: Stage) -> None:
    service = await stage.load(executor_max_requests=1)
    old = await ask(service, tokens=2)
    await asyncio.sleep(CHECK)
    new = await ask(service, tokens=1)
    stage.made[1].die()
    assert state_of(service) is State.RECOVERING
    await asyncio.sleep(1)
    stage.last.step()
    stage.made[0].step(2)
    assert (old.reason, new.reason, len(stage.made)) == (FinishReason.LENGTH, FinishReason.LENGTH, 3)
    await asyncio.sleep(0.1)
    assert stage.made[0].closed


async def test_a_model_that_is_closed_in_the_middle_leaves_no_process(stage: Stage) -> None:
    service = await stage.load(executor_max_requests=1)
    asked = await ask(service)
    await asyncio.sleep(CHECK)
    assert len(stage.made) == 2
    await service.close()
    assert all(host.closed for host in stage.made)
    assert asked.reason is FinishReason.ERROR


async def test_a_model_that_drains_is_not_recycled(stage: Stage) -> None:
    service = await stage.load(executor_max_requests=1)
    await ask(service, tokens=1)
    draining = asyncio.ensure_future(service.drain(60))
    await asyncio.sleep(CHECK)
    assert len(stage.made) == 1
    stage.last.step()
    await draining


async def test_what_the_newest_process_can_do_counts_while_there_is_none(stage: Stage) -> None:
    service = await stage.load()
    stage.last.limits = replace(stage.last.limits, beams=3)
    stage.last.features |= {"beam_width"}
    stage.last.die()
    await ask(service)
    assert service.load_now == 3


async def test_the_log_says_why_and_what_becomes_of_requests(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    service = await stage.load(executor_max_requests=1)
    await ask(service, presence_penalty=0.5)
    await ask(service)
    stage.last.step()
    await asyncio.sleep(CHECK)
    assert any(
        "it has had 2 requests (option.executor_max_requests=1); another one is started beside it" in message
        for message in caplog.messages
    )
    stage.made[0].die()
    assert any("1 go on in the next engine process and 1 have ended" in message for message in caplog.messages)


async def test_ids_that_the_tokenizer_has_and_the_model_does_not_are_refused(stage: Stage) -> None:
    model = stage.model()
    model = dataclasses.replace(model, texts=lambda: Texts(TOKENIZER, vocab_size=5))
    service = await stage.load(model)
    with pytest.raises(InvalidRequestError, match="its ids end at 4"):
        await ask(service)
    assert not stage.last.submitted


class Cyclic:
    def __init__(self) -> None:
        self.itself = self


def test_what_is_loaded_is_never_looked_at_again_and_little_of_what_comes_is_looked_at_at_once() -> None:
    before, garbage = gc.get_threshold(), weakref.ref(Cyclic())
    looked_at: list[int] = []

    def count(phase: str, collection: dict[str, int]) -> None:
        if phase == "start":
            looked_at.append(sum(len(gc.get_objects(each)) for each in range(collection["generation"] + 1)))

    gc.unfreeze()
    gc.callbacks.append(count)
    try:
        settle_garbage_collector()
        assert garbage() is None
        assert gc.get_freeze_count() > max(1000, len(gc.get_objects()))
        looked_at.clear()
        kept: list[list[None]] = [[] for _ in range(1_100_000)]
        assert len(kept) > 20 * max(looked_at) and len(looked_at) > 500
    finally:
        gc.callbacks.remove(count)
        gc.set_threshold(*before)
        gc.unfreeze()
