"""The host's end of the socket."""

from __future__ import annotations

import fcntl
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from djl_trtllm.executor import channel as channel_module
from djl_trtllm.executor.channel import Channel, Disconnected
from djl_trtllm.executor.protocol import Cancel, Delta, Failed, Ping, Pong, Shutdown, Stats, Step, ToEngine, frame
from tests.executor.host_server import Server


class Noted:
    """A poll object whose waits are noted, and end after a minute."""

    def __init__(self, polled: Any, note: Callable[[float | None], None]) -> None:
        self._polled = polled
        self._note = note

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        self._note(timeout)
        found: list[tuple[int, int]] = self._polled.poll(60_000 if timeout is None else timeout)
        return found


class Ends:
    """Both ends of a socket, and the times for which the host's end was waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ours, self.theirs = socket.socketpair()
        self.server = Server(ours)
        self.channel = Channel(self.theirs)
        self.waits: list[float | None] = []
        self.waits_for_room = 0
        self.is_full = threading.Event()
        monkeypatch.setattr(self.channel, "_readable", Noted(self.channel._readable, self.waits.append))
        monkeypatch.setattr(self.channel, "_writable", Noted(self.channel._writable, self._full))

    def _full(self, _: float | None) -> None:
        self.waits_for_room += 1
        self.is_full.set()

    def close(self) -> None:
        self.server.connection.close()
        self.theirs.close()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    made = Ends(monkeypatch)
    yield made
    made.close()


# -- receiving ---------------------------------------------------------------------------------------------------------


def test_all_messages_that_have_arrived_are_given_and_nothing_is_waited_for(ends: Ends) -> None:
    assert list(ends.channel.receive(block=False)) == []
    ends.server.send(Ping(), Cancel(3))
    ends.server.send(Ping())
    assert list(ends.channel.receive(block=False)) == [Ping(), Cancel(3), Ping()]
    assert set(ends.waits) == {0}


def test_descriptors_may_be_above_those_that_select_takes() -> None:
    ours, theirs = socket.socketpair()
    try:
        high = socket.socket(fileno=fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 1024))
    except OSError:
        pytest.skip("the limit of descriptors is 1,024")
    with ours, theirs, high:
        ours.sendall(frame(Ping()))
        assert list(Channel(high).receive(block=True)) == [Ping()]


def test_with_block_it_waits_for_a_message_and_for_no_other(ends: Ends) -> None:
    ends.server.send(Ping())
    assert list(ends.channel.receive(block=True)) == [Ping()]
    assert ends.waits == [None, 0]


def test_with_block_a_part_of_a_message_is_not_enough(ends: Ends) -> None:
    sent = frame(Cancel(3))
    ends.server.connection.sendall(sent[:5])
    messages = ends.channel.receive(block=True)
    rest = threading.Timer(0.05, ends.server.connection.sendall, [sent[5:]])
    rest.start()
    assert list(messages) == [Cancel(3)]
    rest.join()
    assert ends.waits == [None, None, 0]


def test_without_block_a_part_of_a_message_is_left_for_the_next_time(ends: Ends) -> None:
    sent = frame(Cancel(3))
    ends.server.connection.sendall(sent[:5])
    assert list(ends.channel.receive(block=False)) == []
    assert ends.waits == [0, 0]
    ends.server.connection.sendall(sent[5:])
    assert list(ends.channel.receive(block=False)) == [Cancel(3)]


def test_with_rest_a_message_that_a_socket_does_not_hold_is_waited_for(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = frame(Cancel(3)) + frame(Cancel(4))
    ends.server.connection.sendall(sent[:5])

    def note(timeout: float | None) -> None:
        if timeout:
            ends.server.connection.sendall(sent[5:])

    monkeypatch.setattr(channel_module, "_REST_SECONDS", 60)
    monkeypatch.setattr(ends.channel, "_readable", Noted(ends.channel._readable, note))
    assert list(ends.channel.receive(block=False, rest=True)) == [Cancel(3), Cancel(4)]
    assert ends.waits == [0, 60_000, 0]


def test_the_rest_of_a_message_is_waited_for_a_moment_only(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "_REST_SECONDS", 0.001)
    ends.server.connection.sendall(frame(Cancel(3))[:5])
    assert list(ends.channel.receive(block=False, rest=True)) == []


@pytest.mark.parametrize("block", [False, True])
def test_messages_that_were_not_taken_come_the_next_time(ends: Ends, block: bool) -> None:
    ends.server.send(Cancel(1), Cancel(2))
    assert next(ends.channel.receive(block=True)) == Cancel(1)
    ends.server.send(Shutdown())
    assert list(ends.channel.receive(block=block)) == [Cancel(2), Shutdown()]


def test_the_end_of_the_connection_comes_after_what_was_sent_before(ends: Ends) -> None:
    ends.server.send(Ping())
    ends.server.connection.close()
    got: list[ToEngine] = []
    with pytest.raises(Disconnected):
        got.extend(ends.channel.receive(block=True))
    with pytest.raises(Disconnected):
        list(ends.channel.receive(block=False))
    assert got == [Ping()] or got == []


def test_a_connection_that_is_reset_has_ended(ends: Ends) -> None:
    ends.channel.send(Pong())
    ends.server.connection.close()  # with the pong unread
    with pytest.raises(Disconnected) as caught:
        list(ends.channel.receive(block=True))
    assert isinstance(caught.value.__cause__, ConnectionResetError)


# -- sending -----------------------------------------------------------------------------------------------------------


def big(number: int) -> Step:
    """A message larger than what lies in a socket."""
    return Step([Delta(number, [1 << 30] * 200_000)], Stats())


def test_a_message_arrives_as_it_is(ends: Ends) -> None:
    ends.channel.send(Pong())
    assert ends.server.receive() == Pong()
    assert ends.channel.fileno() == ends.theirs.fileno()


@pytest.mark.parametrize("blocking", [False, True])
def test_a_message_is_sent_whole_however_slow_the_server_is(ends: Ends, blocking: bool) -> None:
    """Where an event loop reads from the socket it does not block, and room is waited for."""
    ends.theirs.setblocking(blocking)
    sending = threading.Thread(target=ends.channel.send, args=[big(1)], daemon=True)
    sending.start()
    assert blocking or ends.is_full.wait(60)
    assert ends.server.receive() == big(1)
    sending.join(60)
    assert not sending.is_alive()
    if not blocking:
        # As often as there was room again, and not all the time.
        assert 0 < ends.waits_for_room < 1000


def test_messages_of_several_threads_are_not_mixed(ends: Ends) -> None:
    threads = [threading.Thread(target=ends.channel.send, args=[big(number)], daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    messages = [ends.server.receive() for _ in threads]
    assert sorted(message.deltas[0].request_id for message in messages if isinstance(message, Step)) == [0, 1, 2, 3]
    assert all(message in [big(number) for number in range(4)] for message in messages)


def test_sending_to_a_server_that_is_gone_says_so(ends: Ends) -> None:
    ends.server.connection.close()
    with pytest.raises(Disconnected) as caught:
        ends.channel.send(Pong())
    assert isinstance(caught.value.__cause__, OSError)


# -- the last word -----------------------------------------------------------------------------------------------------


def test_the_last_word_arrives(ends: Ends) -> None:
    ends.theirs.setblocking(False)
    ends.channel.send_last(Failed("lost"))
    assert ends.server.receive() == Failed("lost")
    assert ends.theirs.gettimeout() == 1.0


def test_the_last_word_is_given_up_where_the_server_does_not_read(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "_LAST_WORD_SECONDS", 0.01)
    ends.channel.send_last(Failed("x" * 1_000_000))


def test_the_last_word_is_given_up_where_another_message_is_stuck(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "_LAST_WORD_SECONDS", 0.01)
    ends.theirs.setblocking(False)
    stuck = threading.Thread(target=ends.channel.send, args=[big(1)], daemon=True)
    stuck.start()
    assert ends.is_full.wait(60)
    ends.channel.send_last(Failed("lost"))
    assert ends.server.receive() == big(1)
    stuck.join(60)
    ends.channel.send(Pong())
    assert ends.server.receive() == Pong()  # and nothing was between


def test_the_last_word_to_a_server_that_is_gone_is_no_error(ends: Ends) -> None:
    ends.server.connection.close()
    ends.channel.send_last(Failed("lost"))
