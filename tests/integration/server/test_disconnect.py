from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import struct
import time

import pytest

from tests.integration.server.conftest import Start
from tests.support.client import body, raw_post, read_until, wordy
from tests.support.server import Server
from tests.support.waiting import wait_until

ENDLESS = 1_000_000
"""Tokens: more than any test waits for."""


def reset(connection: socket.socket) -> None:
    """Close with RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_the_request_of_a_client_that_goes_is_cancelled(server: Server, stream: bool, how: str) -> None:
    before = server.finished("cancelled")
    with server.connect() as connection:
        connection.sendall(raw_post(body(ENDLESS, stream=stream)))
        if stream:
            read_until(connection, b"token")
        wait_until(lambda: server.metric("running") == 1)
        if how == "reset":
            reset(connection)
    wait_until(lambda: server.metric("running") == 0)
    assert server.finished("cancelled") == before + 1


def test_a_client_that_goes_while_it_waits_never_runs(server: Server) -> None:
    cancelled = server.finished("cancelled")
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(server.connect()) for _ in range(2)]
        for connection in running:
            connection.sendall(raw_post(body(ENDLESS, stream=True)))
            read_until(connection, b"token")
        with server.connect() as waiting:
            waiting.sendall(raw_post(body(ENDLESS)))
            wait_until(lambda: server.metric("waiting") == 1)
        wait_until(lambda: server.metric("waiting") == 0)
        assert server.finished("cancelled") == cancelled + 1
        assert server.metric("running") == 2
    wait_until(server.idle)
    assert server.finished("cancelled") == cancelled + 3


def test_after_a_burst_of_disconnects_there_is_room_for_a_new_request(start: Start) -> None:
    server = start({"steps_per_second": 50}, **{"option.max_rolling_batch_size": 30})
    connections = [server.connect() for _ in range(30)]
    for connection in connections:
        connection.sendall(raw_post(body(ENDLESS, stream=True)))
    wait_until(lambda: server.metric("running") == 30)
    for connection in connections:
        connection.close()
    assert server.generate(2).status_code == 200
    assert server.finished("cancelled") == 30


def test_a_stream_of_which_nothing_was_read_is_cancelled_on_close(server: Server) -> None:
    before = server.metric("generated_tokens_total")
    with server.connect() as connection:
        connection.sendall(raw_post(body(ENDLESS, stream=True)))
        wait_until(lambda: server.metric("generated_tokens_total") > before + 20)
    wait_until(lambda: server.metric("running") == 0)


def test_a_client_that_does_not_read_holds_up_nobody_and_is_dropped(start: Start) -> None:
    server = start({}, **{"option.stream_write_timeout": 1.5})
    slow = server.connect(receive_buffer=4096)
    slow.sendall(wordy(ENDLESS))
    read_until(slow, b"content")
    for _ in range(5):
        answer = server.generate(50, stream=True)
        assert len(answer.text.splitlines()) == 50
    wait_until(lambda: server.says("did not read for 1.5 seconds"))
    wait_until(lambda: server.metric("running") == 0)
    assert server.finished("cancelled") == 1
    # Its connection is gone although it has neither read nor closed.
    port = slow.getsockname()[1]
    wait_until(lambda: all(not peer.raddr or peer.raddr.port != port for peer in server.process.net_connections()))
    # Nor does the kernel keep what it had accepted for it.
    received = 0
    with pytest.raises(ConnectionResetError):
        while part := slow.recv(1 << 16):
            received += len(part)
    assert received < 1 << 16
    slow.close()


def test_a_client_that_reads_late_gets_everything(start: Start) -> None:
    tokens = 25_000  # more than the buffers between server and client hold
    server = start({}, **{"option.stream_write_timeout": 600})
    with server.connect(receive_buffer=4096) as late:
        late.sendall(wordy(tokens))
        received = read_until(late, b"content")
        wait_until(lambda: server.metric("running") == 0)
        # The small buffer has done its part; through it the rest would come a few hundred bytes at a time.
        late.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        received += read_until(late, b"\r\n0\r\n\r\n")
    assert received.count(b'"content"') == tokens
    assert received.count(b'"finish_reason":"length"') == 1


def test_random_disconnects_disturb_no_other_stream(start: Start) -> None:
    server = start({"steps_per_second": 100}, **{"option.max_rolling_batch_size": 8})
    expected = server.generate(60).json()["generated_text"]

    def whole(_: int) -> str:
        with server.connect() as connection:
            connection.sendall(raw_post(body(60), "Connection: close"))
            answer = read_until(connection, b'"}')
        return answer.rpartition(b"\r\n\r\n")[2].decode()

    def broken(number: int) -> None:
        with server.connect() as connection:
            connection.sendall(raw_post(body(60, stream=True)))
            time.sleep(0.01 * (number % 40))

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        answers = [pool.submit(whole, number) for number in range(24)]
        leavers = [pool.submit(broken, number) for number in range(24)]
        assert {future.result() for future in answers} == {f'{{"generated_text":"{expected}"}}'}
        for leaver in leavers:
            leaver.result()
