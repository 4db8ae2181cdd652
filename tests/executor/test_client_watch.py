"""A host that is silent. The host is played, and time is virtual."""

from __future__ import annotations

import asyncio

import pytest

from djl_trtllm.executor.protocol import Ping, Pong, Stats, Step
from tests.executor.conftest import Play
from tests.executor.played_host import PlayedHost, settled

SILENT = "silent for {} seconds (option.executor_hang_timeout)"


@pytest.mark.parametrize(("hang_timeout", "tick"), [(60.0, 1.0), (8.0, 1.0), (4.0, 0.5), (1.0, 0.125)])
def test_a_busy_engine_process_is_killed_when_it_was_silent_for_the_timeout(
    play: Play, hang_timeout: float, tick: float
) -> None:
    """It is looked at every second, or eight times per timeout where that is more often."""

    async def body(host: PlayedHost) -> None:
        await host.start()
        await asyncio.sleep(1.75 * tick)
        host.probe.busy, began = True, host.loop.now
        assert SILENT.format(f"{hang_timeout:g}") in await host.probe.death(timeout=1000)
        assert host.process.kills == 1
        assert host.process.killed_at - began == pytest.approx(hang_timeout + tick / 4)
        await host.client.kill()

    play(body, hang_timeout)


def test_an_engine_process_whose_processes_hold_the_connection_open_is_dead_all_the_same(play: Play) -> None:
    async def body(host: PlayedHost) -> None:
        await host.start()
        host.probe.busy = host.process.holds_on = True
        assert SILENT.format("8") in await host.probe.death(timeout=1000)
        await host.client.kill()

    play(body, 8.0)


def test_a_busy_engine_process_that_sends_is_never_taken_for_hung(play: Play) -> None:
    async def body(host: PlayedHost) -> None:
        await host.start()
        host.probe.busy = True
        for _ in range(20):
            await asyncio.sleep(7.5)
            host.process.say(Step([], Stats()))
        await settled()
        assert (host.process.kills, host.probe.deaths) == (0, [])
        await host.client.kill()

    play(body, 8.0)


def test_silence_without_requests_is_no_silence(play: Play) -> None:
    async def body(host: PlayedHost) -> None:
        await host.start()
        host.probe.busy = True
        await asyncio.sleep(7.5)
        host.probe.busy = False
        await asyncio.sleep(2)
        host.probe.busy = True
        await asyncio.sleep(7.5)
        assert host.process.kills == 0
        assert "silent" in await host.probe.death(timeout=1.5)
        await host.client.kill()

    play(body, 8.0)


def test_a_pause_of_the_server_is_not_held_against_the_engine_process(play: Play) -> None:
    async def body(host: PlayedHost) -> None:
        await host.start()
        host.probe.busy = True
        await asyncio.sleep(4)
        host.loop.now += 1000
        await asyncio.sleep(3)
        assert host.process.kills == 0
        await host.client.kill()

    play(body, 8.0)


def test_an_idle_engine_process_is_asked_for_a_sign_of_life_every_few_seconds(play: Play) -> None:
    async def body(host: PlayedHost) -> None:
        await host.start()
        asked = []
        for second in range(1, 22):
            await asyncio.sleep(1)
            await settled()
            for message in host.process.heard():
                assert message == Ping()
                asked.append(second)
                host.process.say(Pong())
                await settled()
        assert asked == [5, 11, 17]
        await host.client.kill()

    play(body)


def test_a_busy_engine_process_is_not_asked_and_the_time_until_it_is_begins_anew(play: Play) -> None:
    async def body(host: PlayedHost) -> None:
        await host.start()
        await asyncio.sleep(4.5)
        host.probe.busy = True
        await asyncio.sleep(10)
        host.probe.busy = False
        await asyncio.sleep(5)
        assert host.process.heard() == []
        await asyncio.sleep(1)
        assert host.process.heard() == [Ping()]
        await host.client.kill()

    play(body)


def test_an_idle_engine_process_that_does_not_answer_is_killed(play: Play) -> None:
    async def body(host: PlayedHost) -> None:
        await host.start()
        ready = host.loop.now
        assert SILENT.format("60") in await host.probe.death(timeout=1000)
        assert host.process.killed_at - ready == pytest.approx(5 + 61)
        await host.client.kill()

    play(body)


@pytest.mark.parametrize("way", ["kill", "death"])
def test_an_engine_process_that_is_gone_is_watched_no_more(play: Play, way: str) -> None:
    async def body(host: PlayedHost) -> None:
        await host.start()
        await asyncio.sleep(3.5)
        assert host.probe.looked > 0
        if way == "kill":
            host.process.immortal = True
            killing = asyncio.ensure_future(host.client.kill())
        else:
            host.process.connection.close()
        await settled()
        looked = host.probe.looked
        await asyncio.sleep(10)
        assert host.probe.looked == looked
        if way == "kill":
            host.process.end(-9)
            await killing
        await host.client.kill()

    play(body)
