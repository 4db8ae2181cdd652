"""What the server does while an engine process loads: a failure on either side ends both. The process is played."""

from __future__ import annotations

import asyncio

import pytest

from djl_trtllm.errors import ExecutorStartError, TokenizerError
from djl_trtllm.executor.protocol import Start, ToEngine
from tests.executor.conftest import Play
from tests.executor.played_host import READY, PlayedHost
from tests.support import executors


def test_what_is_done_meanwhile_begins_when_the_process_has_what_to_load(play: Play) -> None:
    async def body(host: PlayedHost) -> None:
        heard: list[ToEngine] = []

        async def meanwhile() -> None:
            heard.extend(host.process.heard())
            host.process.say(READY)
            await asyncio.sleep(5)

        began = host.loop.now
        await host.client.start(Start(executors.SCRIPTED, {}), 3, meanwhile=meanwhile)
        assert heard == [Start(executors.SCRIPTED, {})]
        assert host.loop.now - began == pytest.approx(5)
        await host.client.kill()

    play(body)


@pytest.mark.parametrize("error", [TokenizerError("no tokenizer"), TimeoutError("no tokenizer")])
def test_what_fails_meanwhile_ends_the_process(play: Play, error: Exception) -> None:
    async def meanwhile() -> None:
        raise error

    async def body(host: PlayedHost) -> None:
        with pytest.raises(type(error), match="no tokenizer"):
            await host.client.start(Start(executors.SCRIPTED, {}), 30, meanwhile=meanwhile)
        assert (host.process.kills, host.environment.cleared, host.probe.deaths) == (1, 1, [])

    play(body)


def test_a_process_that_ends_meanwhile_fails_the_start(play: Play) -> None:
    async def body(host: PlayedHost) -> None:
        async def meanwhile() -> None:
            host.process.end(3)
            await asyncio.sleep(5)

        with pytest.raises(ExecutorStartError, match="exited with status 3"):
            await host.client.start(Start(executors.SCRIPTED, {}), 30, meanwhile=meanwhile)

    play(body)
