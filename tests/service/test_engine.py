"""An engine process that is recycled by plan."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from djl_trtllm.errors import ExecutorStartError, InvalidRequestError
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason
from djl_trtllm.service import ModelService, State, Texts
from tests.support.in_process import Hosts, ask, loaded, played_model, state_of
from tests.support.virtual_time import in_virtual_time

CHECK = 5.1
"""Seconds until somebody looks at the engine process."""
GB = 10**9


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What this machine has available; the test may change it."""
    available = [100 * GB]
    monkeypatch.setattr("djl_trtllm.service.engine.available_memory", lambda: available[0])
    return available


@in_virtual_time
async def test_a_process_that_has_grown_is_replaced_beside_its_requests(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.load_seconds = 3
    service = await loaded(tokenizer, executor_memory_limit=2)
    old = hosts.last
    running = await ask(service, tokens=3)
    old.step()
    await asyncio.sleep(CHECK)
    assert len(hosts.made) == 1
    old.resident = 2 * GB
    await asyncio.sleep(CHECK)
    assert (len(hosts.made), state_of(service), service.pid) == (2, State.READY, old.pid)
    while_it_loads = await ask(service, tokens=2)
    await asyncio.sleep(3)
    new = hosts.last
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
@in_virtual_time
async def test_without_memory_for_two_it_is_replaced_when_its_requests_have_ended(
    hosts: Hosts, tokenizer: Tokenizer, memory: list[int], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    model = played_model(tokenizer, executor_max_requests=2, max_rolling_batch_size=4)
    if where == "GPU":
        model = type(model)(**{**vars(model), "gpus": 1})
    else:
        memory[0] = GB
    service = ModelService("story")
    await service.load(model)
    old = hosts.last
    running = [await ask(service, tokens=2) for _ in range(2)]
    await asyncio.sleep(CHECK)
    waiting = await ask(service, tokens=1)
    assert (len(old.submitted), state_of(service), service.load_now) == (2, State.READY, 3)
    old.step(2)
    assert [one.reason for one in running] == [FinishReason.LENGTH] * 2
    assert waiting.finished is None
    await asyncio.sleep(0.1)
    assert (old.closed, len(hosts.made)) == (True, 2)
    hosts.last.step()
    assert (waiting.reason, state_of(service)) == (FinishReason.LENGTH, State.READY)
    await service.close()


@in_virtual_time
async def test_a_process_has_its_number_of_requests_before_it_is_replaced(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = await loaded(tokenizer, executor_max_requests=3)
    for _ in range(2):
        await ask(service, tokens=1)
    hosts.last.step()
    await asyncio.sleep(CHECK)
    assert len(hosts.made) == 1
    await ask(service, tokens=1)
    hosts.last.step()
    await asyncio.sleep(CHECK)
    assert (len(hosts.made), hosts.made[0].closed) == (2, True)
    # The next one begins to count anew, and a minute passes between two.
    for _ in range(3):
        await ask(service, tokens=1)
    hosts.last.step()
    await asyncio.sleep(CHECK)
    assert len(hosts.made) == 2
    await asyncio.sleep(60)
    assert len(hosts.made) == 3
    await service.close()


@in_virtual_time
async def test_a_replacement_that_does_not_start_leaves_the_old_one(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = await loaded(tokenizer, executor_max_requests=1)
    asked = await ask(service, tokens=1)
    hosts.failures = [ExecutorStartError("no room")]
    await asyncio.sleep(CHECK)
    assert (len(hosts.made), state_of(service), service.pid) == (2, State.READY, hosts.made[0].pid)
    hosts.made[0].step()
    assert asked.reason is FinishReason.LENGTH
    await asyncio.sleep(65)
    assert (len(hosts.made), service.pid) == (3, hosts.last.pid)
    await service.close()


@in_virtual_time
async def test_one_that_does_not_start_in_place_of_the_old_one_is_tried_again(
    hosts: Hosts, tokenizer: Tokenizer, memory: list[int]
) -> None:
    memory[0] = 0
    service = await loaded(tokenizer, executor_max_requests=1)
    await ask(service, tokens=1)
    hosts.last.step()
    hosts.failures = [ExecutorStartError("no room")]
    await asyncio.sleep(CHECK + 1)
    assert (len(hosts.made), state_of(service), service.restarts) == (3, State.READY, 1)
    await service.close()


@in_virtual_time
async def test_an_old_process_that_dies_while_the_new_one_starts_costs_nothing(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    hosts.load_seconds = 3
    service = await loaded(tokenizer, executor_max_requests=1)
    asked = await ask(service, tokens=2)
    hosts.last.step()
    await asyncio.sleep(CHECK)
    hosts.made[0].die()
    assert state_of(service) is State.RECOVERING
    await asyncio.sleep(4)
    assert (len(hosts.made), state_of(service)) == (2, State.READY)
    hosts.last.step()
    assert asked.reason is FinishReason.LENGTH
    await service.close()


@in_virtual_time
async def test_an_old_process_that_dies_with_its_last_requests_costs_nothing(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    service = await loaded(tokenizer, executor_max_requests=1)
    asked = await ask(service, tokens=2)
    hosts.last.step()
    await asyncio.sleep(CHECK)
    hosts.made[0].die()
    assert (len(hosts.made), state_of(service), service.pid) == (2, State.READY, hosts.last.pid)
    hosts.last.step()
    assert (asked.reason, service.restarts) == (FinishReason.LENGTH, 0)
    await service.close()


@in_virtual_time
async def test_a_new_process_that_dies_while_the_old_one_ends_its_requests_is_replaced(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    service = await loaded(tokenizer, executor_max_requests=1)
    old = await ask(service, tokens=2)
    await asyncio.sleep(CHECK)
    new = await ask(service, tokens=1)
    hosts.made[1].die()
    assert state_of(service) is State.RECOVERING
    await asyncio.sleep(1)
    hosts.last.step()
    hosts.made[0].step(2)
    assert (old.reason, new.reason, len(hosts.made)) == (FinishReason.LENGTH, FinishReason.LENGTH, 3)
    await asyncio.sleep(0.1)
    assert hosts.made[0].closed
    await service.close()


@in_virtual_time
async def test_a_model_that_is_closed_in_the_middle_leaves_no_process(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = await loaded(tokenizer, executor_max_requests=1)
    asked = await ask(service)
    await asyncio.sleep(CHECK)
    assert len(hosts.made) == 2
    await service.close()
    assert all(host.closed for host in hosts.made)
    assert asked.reason is FinishReason.ERROR


@in_virtual_time
async def test_a_model_that_drains_is_not_recycled(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = await loaded(tokenizer, executor_max_requests=1)
    await ask(service, tokens=1)
    draining = asyncio.ensure_future(service.drain(60))
    await asyncio.sleep(CHECK)
    assert len(hosts.made) == 1
    hosts.last.step()
    await draining
    await service.close()


@in_virtual_time
async def test_what_the_newest_process_can_do_counts_while_there_is_none(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = await loaded(tokenizer)
    hosts.last.limits = replace(hosts.last.limits, beams=3)
    hosts.last.features |= {"beam_width"}
    hosts.last.die()
    await ask(service)
    assert service.load_now == 3
    await service.close()


@in_virtual_time
async def test_the_log_says_why_and_what_becomes_of_requests(
    hosts: Hosts, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    service = await loaded(tokenizer, executor_max_requests=1)
    await ask(service, presence_penalty=0.5)
    await ask(service)
    hosts.last.step()
    await asyncio.sleep(CHECK)
    assert any(
        "it has had 2 requests (option.executor_max_requests=1); another one is started beside it" in message
        for message in caplog.messages
    )
    hosts.made[0].die()
    assert any("1 go on in the next engine process and 1 have ended" in message for message in caplog.messages)
    await service.close()


@in_virtual_time
async def test_ids_that_the_tokenizer_has_and_the_model_does_not_are_refused(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    model = played_model(tokenizer)
    model = type(model)(**{**vars(model), "texts": lambda: Texts(tokenizer, vocab_size=5)})
    service = ModelService("story")
    await service.load(model)
    with pytest.raises(InvalidRequestError, match="its ids end at 4"):
        await ask(service)
    assert not hosts.last.submitted
    await service.close()
