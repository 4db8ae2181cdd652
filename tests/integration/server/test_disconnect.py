from __future__ import annotations

import concurrent.futures
import contextlib
import json
import socket
import struct
import time

import pytest

from tests.support.serving_process import ServingProcess, body, raw_post, read_until, wait_until

from .conftest import Start

CANCELLED = 'finished_total{reason="cancelled"}'


def reset(connection: socket.socket) -> None:
    """Close with RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def wordy(tokens: int) -> bytes:
    """A streaming request whose tokens take some 200 bytes each: the kernel takes in megabytes for a client."""
    request = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": tokens, "stream": True}
    return raw_post(json.dumps(request).encode())


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_goes_is_cancelled_within_one_iteration(server: ServingProcess, stream: bool, how: str) -> None:
    before = server.metric(CANCELLED)
    with server.connect() as connection:
        connection.sendall(raw_post(body(4000, stream=stream)))
        if stream:
            read_until(connection, b"token")
        wait_until(lambda: server.metric("running") == 1)
        if how == "reset":
            reset(connection)
    wait_until(lambda: server.metric("running") == 0, timeout=2)
    assert server.metric(CANCELLED) == before + 1


def test_a_client_that_goes_while_it_waits_never_runs(server: ServingProcess) -> None:
    generated, cancelled = server.metric("generated_tokens_total"), server.metric(CANCELLED)
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(server.connect()) for _ in range(2)]
        for connection in running:
            connection.sendall(raw_post(body(100)))
        wait_until(lambda: server.metric("running") == 2)
        with server.connect() as waiting:
            waiting.sendall(raw_post(body(100)))
            wait_until(lambda: server.metric("waiting") == 1)
        wait_until(lambda: server.metric("waiting") == 0)
        assert server.metric(CANCELLED) == cancelled + 1
        for connection in running:
            read_until(connection, b"generated_text")
    assert server.metric("generated_tokens_total") == generated + 200


def test_after_a_burst_of_disconnects_a_new_request_starts_at_once(start: Start) -> None:
    server = start({"steps_per_second": 50})
    connections = [server.connect() for _ in range(30)]
    for connection in connections:
        connection.sendall(raw_post(body(100_000, stream=True)))
    wait_until(lambda: server.metric("running") == 30)
    for connection in connections:
        connection.close()
    started = time.monotonic()
    assert server.generate(2).status_code == 200
    assert time.monotonic() - started < 2
    assert server.metric(CANCELLED) == 30


def test_a_stream_of_which_nothing_was_read_is_cancelled_on_close(server: ServingProcess) -> None:
    connection = server.connect()
    connection.sendall(raw_post(body(4000, stream=True)))
    wait_until(lambda: server.metric("running") == 1)
    time.sleep(0.2)
    connection.close()
    wait_until(lambda: server.metric("running") == 0, timeout=2)


def test_a_client_that_does_not_read_holds_up_nobody_and_is_dropped(start: Start) -> None:
    server = start({}, **{"option.stream_write_timeout": 1.5})
    slow = server.connect(receive_buffer=4096)
    slow.sendall(wordy(1_000_000))
    read_until(slow, b"content")
    for _ in range(5):
        answer = server.generate(50, stream=True)
        assert len(answer.text.splitlines()) == 50
    wait_until(lambda: any("did not read for 1.5 seconds" in line for line in server.log), timeout=60)
    wait_until(lambda: server.metric("running") == 0, timeout=5)
    assert server.metric(CANCELLED) == 1
    # Its connection is gone although it has neither read nor closed.
    port = slow.getsockname()[1]
    wait_until(lambda: all(not peer.raddr or peer.raddr.port != port for peer in server.info.net_connections()))
    # Nor does the kernel keep what it had accepted for it.
    received = 0
    with pytest.raises(ConnectionResetError):
        while part := slow.recv(1 << 16):
            received += len(part)
    assert received < 1 << 16
    slow.close()


def test_a_client_that_reads_late_gets_everything(start: Start) -> None:
    tokens = 25_000  # more than the buffers between server and client hold
    server = start({})
    with server.connect(receive_buffer=4096) as late:
        late.sendall(wordy(tokens))
        received = read_until(late, b"content")
        wait_until(lambda: server.metric("running") == 0, timeout=60)
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
