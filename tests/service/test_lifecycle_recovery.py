"""A model whose engine process dies."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from djl_trtllm.errors import DjlTrtllmError, ExecutorStartError, GenerationError, NotReadyError
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason
from djl_trtllm.service import ModelService, State
from tests.support.in_process import Hosts, ask, loaded, played_model, state_of
from tests.support.virtual_time import in_virtual_time

LONG_ENOUGH = 60.0
"""Seconds after which any replacement has started."""


async def sleep_until(when: float) -> None:
    await asyncio.sleep(when - asyncio.get_running_loop().time())


@in_virtual_time
async def test_a_lost_engine_process_is_replaced_and_every_request_answered(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = await loaded(tokenizer, max_rolling_batch_size=1, resume_after_restart=False)
    asked = [await ask(service) for _ in range(3)]
    hosts.last.step()
    hosts.last.die("it was killed by SIGKILL\nits last output:\n  | secrets")
    assert [one.reason for one in asked] == [FinishReason.ERROR, None, None]
    assert isinstance(asked[0].error, GenerationError)
    assert str(asked[0].error).endswith("it was killed by SIGKILL); the request may be repeated")
    assert (state_of(service), service.load_now, service.pid) == (State.RECOVERING, 2, None)
    await asyncio.sleep(LONG_ENOUGH)
    assert (state_of(service), service.restarts, len(hosts.made)) == (State.READY, 1, 2)
    hosts.last.step(8)
    assert [one.reason for one in asked[1:]] == [FinishReason.LENGTH] * 2
    await service.close()


@in_virtual_time
async def test_requests_go_on_in_the_next_engine_process_with_the_same_output(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    service = await loaded(tokenizer, max_rolling_batch_size=2)
    undisturbed = await ask(service, tokens=20)
    hosts.last.step(20)
    asked = [await ask(service, tokens=20) for _ in range(3)]
    for _ in range(3):
        hosts.last.step(4)
        hosts.last.die()
        assert state_of(service) is State.RECOVERING
        await asyncio.sleep(LONG_ENOUGH)
        assert state_of(service) is State.READY
    hosts.last.step(8)
    assert asked[2].updates == []
    hosts.last.step(20)
    for one in asked:
        assert (one.text, one.reason) == (undisturbed.text, FinishReason.LENGTH)
        assert one.finished is not None
        assert one.finished.generated_tokens == 20
    assert (service.statistics.resumed, service.restarts) == (6, 3)
    await service.close()


@in_virtual_time
async def test_a_request_that_comes_while_there_is_no_engine_process_waits_for_the_next(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    service = await loaded(tokenizer)
    hosts.last.die()
    asked = await ask(service, tokens=2)
    assert (state_of(service), asked.updates, service.load_now) == (State.RECOVERING, [], 1)
    await asyncio.sleep(LONG_ENOUGH)
    hosts.last.step(2)
    assert asked.reason is FinishReason.LENGTH
    await service.close()


@in_virtual_time
async def test_a_request_is_cancelled_at_once_while_there_is_no_engine_process(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    service = await loaded(tokenizer)
    asked = await ask(service)
    hosts.last.step()
    hosts.last.die()
    service.cancel(asked.generations)
    assert (asked.reason, service.load_now) == (FinishReason.CANCELLED, 0)
    await asyncio.sleep(LONG_ENOUGH)
    assert hosts.last.submitted == []
    await service.close()


@in_virtual_time
async def test_when_the_model_fails_everything_that_waits_gets_its_end(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = await loaded(tokenizer, max_rolling_batch_size=1, retry_threshold=1)
    asked = [await ask(service) for _ in range(2)]
    hosts.last.step()
    hosts.failures = [ExecutorStartError("no such engine")]
    hosts.last.die()
    assert [one.finished for one in asked] == [None, None]
    await asyncio.sleep(LONG_ENOUGH)
    assert state_of(service) is State.FAILED
    for one in asked:
        assert isinstance(one.error, GenerationError)
        assert "could not be replaced (no such engine)" in str(one.error)
    await service.close()


@in_virtual_time
async def test_a_request_that_kills_engine_processes_ends_and_the_model_does_not_fail(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    service = await loaded(tokenizer, retry_threshold=2)
    asked = await ask(service)
    for deaths in (1, 2, 3):
        assert (asked.finished, len(hosts.made)) == (None, deaths)
        hosts.last.die()
        await asyncio.sleep(LONG_ENOUGH)
    assert isinstance(asked.error, GenerationError)
    assert (state_of(service), service.load_now) == (State.READY, 0)
    # It was one more than the model may lose by itself.
    hosts.last.die()
    await asyncio.sleep(LONG_ENOUGH)
    assert state_of(service) is State.FAILED
    await service.close()


@in_virtual_time
async def test_a_client_of_the_lost_engine_process_that_leaves_late_ends_nobody_elses_request(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    service = await loaded(tokenizer, resume_after_restart=False)
    lost = await ask(service)
    hosts.last.die()
    await asyncio.sleep(LONG_ENOUGH)
    asked = await ask(service, tokens=1)
    service.cancel(lost.generations)
    hosts.last.step()
    assert asked.reason is FinishReason.LENGTH
    await service.close()


@in_virtual_time
async def test_news_of_a_lost_engine_process_are_dropped(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = await loaded(tokenizer)
    asked = await ask(service)
    hosts.last.die()
    hosts.last.step()
    assert asked.text == ""
    await service.close()


@in_virtual_time
async def test_replacements_come_later_and_later(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = await loaded(tokenizer, retry_threshold=10)
    hosts.failures = [ExecutorStartError(f"start {number}") for number in range(1, 10)]
    hosts.last.die()
    await asyncio.sleep(LONG_ENOUGH)
    starts = [host.started_at for host in hosts.made]
    waits = [round(later - sooner, 6) for sooner, later in itertools.pairwise(starts)]
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10, 10]
    assert (state_of(service), service.restarts) == (State.READY, 1)
    await service.close()


@in_virtual_time
async def test_an_engine_process_that_dies_too_often_fails_the_model(hosts: Hosts, tokenizer: Tokenizer) -> None:
    told: list[DjlTrtllmError] = []
    service = ModelService("story", on_failed=told.append)
    await service.load(played_model(tokenizer, retry_threshold=2))
    for state in (State.READY, State.READY, State.FAILED):
        hosts.last.die("it was killed by SIGKILL")
        await asyncio.sleep(LONG_ENOUGH)
        assert state_of(service) is state
    assert told == [service.failure]
    assert "SIGKILL" in str(service.failure)
    assert len(hosts.made) == 3
    with pytest.raises(NotReadyError, match="model story has failed; the server's log says why") as refused:
        await ask(service)
    assert refused.value.retry_after is None
    await service.close()
    assert state_of(service) is State.FAILED


@in_virtual_time
async def test_a_replacement_that_does_not_start_counts_and_its_error_is_reported(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    service = await loaded(tokenizer, retry_threshold=2)
    hosts.failures = [ExecutorStartError("first"), last := ExecutorStartError("second")]
    hosts.last.die()
    await asyncio.sleep(LONG_ENOUGH)
    assert (state_of(service), service.failure, service.restarts) == (State.FAILED, last, 0)
    await service.close()


@pytest.mark.parametrize(("when", "state"), [(599.9, State.FAILED), (600.0, State.READY), (700.0, State.READY)])
@in_virtual_time
async def test_deaths_are_forgiven_after_ten_minutes(
    hosts: Hosts, tokenizer: Tokenizer, when: float, state: State
) -> None:
    service = await loaded(tokenizer, retry_threshold=1)
    await sleep_until(1)
    hosts.last.die()
    await sleep_until(1 + when)
    hosts.last.die()
    await asyncio.sleep(LONG_ENOUGH)
    assert state_of(service) is state
    await service.close()


@in_virtual_time
async def test_forgiven_deaths_do_not_make_the_next_replacement_later(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = await loaded(tokenizer)
    for _ in range(2):
        await asyncio.sleep(1000)
        died = asyncio.get_running_loop().time()
        hosts.last.die()
        await asyncio.sleep(LONG_ENOUGH)
        assert hosts.last.started_at - died == pytest.approx(0.1)
    await service.close()


@in_virtual_time
async def test_an_engine_process_that_dies_while_draining_is_replaced_for_what_still_runs(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    service = await loaded(tokenizer)
    asked = await ask(service, tokens=2)
    hosts.last.step()
    draining = asyncio.ensure_future(service.drain(LONG_ENOUGH))
    await asyncio.sleep(1)
    hosts.last.die()
    await asyncio.sleep(1)
    assert (state_of(service), len(hosts.made)) == (State.DRAINING, 2)
    hosts.last.step()
    assert asked.reason is FinishReason.LENGTH
    await draining
    await service.close()
    assert state_of(service) is State.STOPPED


@in_virtual_time
async def test_an_engine_process_that_dies_while_draining_and_with_nothing_to_do_is_not_replaced(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    service = await loaded(tokenizer, resume_after_restart=False)
    asked = await ask(service)
    service.refuse_new()
    hosts.last.die()
    assert asked.reason is FinishReason.ERROR
    await service.drain(LONG_ENOUGH)
    assert asyncio.get_running_loop().time() == 0
    await asyncio.sleep(LONG_ENOUGH)
    assert (state_of(service), len(hosts.made)) == (State.DRAINING, 1)
    await service.close()
    assert state_of(service) is State.STOPPED


@in_virtual_time
async def test_a_model_that_is_closed_while_it_recovers_ends_what_waits(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.load_seconds = 30
    service = await loaded(tokenizer)
    asked = await ask(service)
    hosts.last.die()
    await service.drain(5)
    assert asked.finished is None
    await service.close()
    assert isinstance(asked.error, NotReadyError)
    assert state_of(service) is State.STOPPED


@pytest.mark.parametrize("load_seconds", [0.0, 30.0], ids=["while it waits", "while a host starts"])
@in_virtual_time
async def test_a_recovery_ends_with_the_model(hosts: Hosts, tokenizer: Tokenizer, load_seconds: float) -> None:
    told: list[DjlTrtllmError] = []
    service = ModelService("story", on_failed=told.append)
    await service.load(played_model(tokenizer))
    hosts.load_seconds = load_seconds
    hosts.last.die()
    await asyncio.sleep(0.05 if not load_seconds else 5)
    await service.close()
    assert asyncio.get_running_loop().time() < LONG_ENOUGH / 2
    assert hosts.last.closed or not load_seconds
    assert (state_of(service), told) == (State.STOPPED, [])
    await asyncio.sleep(LONG_ENOUGH)
    assert len(hosts.made) == (1 if not load_seconds else 2)
    assert service.batch is None


@in_virtual_time
async def test_no_recovery_goes_on_once_new_requests_are_refused(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = await loaded(tokenizer)
    hosts.last.die()
    service.refuse_new()
    await asyncio.sleep(LONG_ENOUGH)
    assert (state_of(service), len(hosts.made)) == (State.DRAINING, 1)
    await service.close()
