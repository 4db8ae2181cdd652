"""What is sent to an engine process: together, and only while there is one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import uvloop

from djl_trtllm.executor.protocol import Cancel, ToEngine, frame
from tests.executor.conftest import Play
from tests.executor.played_host import PlayedHost, PlayedProcess, settled
from tests.executor.probe import Probe

BUFFER = 64 * 1024


def test_messages_for_which_there_was_no_room_arrive_together() -> None:
    """Each write takes some room of a socket, however short it is, and an engine may read once in an iteration."""
    count = 5000

    async def socketfuls() -> list[list[ToEngine]]:
        client, (ours, theirs) = Probe(60).client, socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        client._closing = True  # its end is not looked into
        await asyncio.get_running_loop().create_connection(lambda: client, sock=ours)
        with theirs:
            engine = PlayedProcess(theirs)
            found: list[list[ToEngine]] = []
            for number in range(count):
                client.cancel(number)
                await asyncio.sleep(0)
            while sum(map(len, found)) < count:
                found.append(engine.heard())
                await settled()
        await client._gone
        return found

    # The loop of a server: asyncio's own puts together what waits.
    with contextlib.closing(uvloop.new_event_loop()) as loop:
        found = loop.run_until_complete(socketfuls())
    assert [message for each in found for message in each] == [Cancel(number) for number in range(count)]
    assert len([each for each in found if each]) < 5


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_nothing_is_kept_for_a_process_that_ends_while_its_socket_is_full(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def body() -> None:
        client, (ours, theirs) = Probe(60).client, socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        client._closing = True  # its end is not looked into
        await asyncio.get_running_loop().create_connection(lambda: client, sock=ours)
        with theirs:
            while not client._full:
                client.cancel(1)
                await asyncio.sleep(0)
            client.cancel(2)
            assert client._unsent
        await client._gone
        assert not client._unsent
        client.cancel(3)
        await settled()
        assert not client._unsent

    with contextlib.closing(new_loop()) as loop:
        loop.run_until_complete(body())


def test_messages_of_one_turn_of_the_event_loop_arrive_together(play: Play) -> None:
    """An engine that waits begins with all of them."""

    async def body(host: PlayedHost) -> None:
        await host.start()
        written: list[bytes] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host.client, "_transport", SimpleNamespace(write=written.append, is_closing=lambda: False))
            host.client.cancel(1)
            host.client.cancel(2)
            await settled()
            host.client.cancel(3)
            await settled()
        assert written == [frame(Cancel(1)) + frame(Cancel(2)), frame(Cancel(3))]
        await host.client.kill()

    play(body)
