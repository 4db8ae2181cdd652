from __future__ import annotations

import concurrent.futures
import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serving_process import (
    JSON,
    ServingProcess,
    body,
    raw_post,
    read_all,
    read_until,
    scripted_model,
    wait_until,
)

from .conftest import Start

IN_TIME = 6.0
"""Seconds for a shutdown that has nothing to wait for; generous, the machine may be busy."""


@contextlib.contextmanager
def not_ready(model: Path, **environ: str) -> Iterator[ServingProcess]:
    """A server that is not waited for."""
    server = ServingProcess(model, environ)
    try:
        yield server
        assert server.hosts() == []
    finally:
        server.close()


def test_sigterm_when_idle_ends_it_at_once(start: Start) -> None:
    server = start({})
    started = time.monotonic()
    server.terminate()
    assert server.wait() == 0
    assert time.monotonic() - started < IN_TIME


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGTERM] * 2, [signal.SIGINT]])
def test_running_answers_are_finished_and_new_requests_refused(start: Start, numbers: list[signal.Signals]) -> None:
    server = start({"steps_per_second": 50})
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        whole = pool.submit(server.generate, 150)
        with server.connect() as connection, server.connect() as kept_alive:
            connection.sendall(raw_post(body(150, stream=True)))
            received = read_until(connection, b"token")
            wait_until(lambda: server.metric("running") == 2)
            for number in numbers:
                server.process.send_signal(number)
                time.sleep(0.2)
            assert server.client.get("/ping").status_code == 503
            kept_alive.sendall(raw_post(body(2)))
            refused = read_all(kept_alive)
            assert refused.startswith(b"HTTP/1.1 503")
            assert b"connection: close" in refused
            assert b"is shutting down" in refused
            received += read_all(connection)
        assert received.count(b'"token"') == 150
        assert received.endswith(b"\r\n0\r\n\r\n")
        assert whole.result().status_code == 200
    assert server.wait() == 0


def test_what_does_not_end_in_time_is_told_so(start: Start) -> None:
    server = start({"steps_per_second": 50}, {"SERVING_SHUTDOWN_TIMEOUT": "0.5"})
    with server.connect() as connection, concurrent.futures.ThreadPoolExecutor(1) as pool:
        whole = pool.submit(server.client.post, "/invocations", content=body(100_000), headers=JSON)
        connection.sendall(raw_post(body(100_000, stream=True)))
        received = read_until(connection, b"token")
        wait_until(lambda: server.info.children() != [])
        server.terminate()
        started = time.monotonic()
        received += read_all(connection)
        assert server.wait() == 0
        assert time.monotonic() - started < IN_TIME
        assert b"shut down while it was answering" in received[-1000:]
        assert received.endswith(b"\r\n0\r\n\r\n")
        assert whole.result().status_code == 503


def test_a_client_that_does_not_read_does_not_hold_up_the_end(start: Start) -> None:
    server = start({}, {"SERVING_SHUTDOWN_TIMEOUT": "0.5"})
    with server.connect(receive_buffer=4096) as slow:
        slow.sendall(raw_post(body(1_000_000, stream=True)))
        read_until(slow, b"token")
        time.sleep(0.5)
        started = time.monotonic()
        server.terminate()
        assert server.wait() == 0
        assert time.monotonic() - started < 2 * IN_TIME


def test_an_idle_keep_alive_connection_does_not_hold_up_the_end(start: Start) -> None:
    server = start({})
    with server.connect() as connection:
        connection.sendall(raw_post(body(2)))
        read_until(connection, b"generated_text")
        started = time.monotonic()
        server.terminate()
        assert server.wait() == 0
        assert time.monotonic() - started < IN_TIME


def test_two_interrupts_end_it_without_waiting(start: Start) -> None:
    server = start({"steps_per_second": 50})
    hosts = server.hosts()
    with server.connect() as connection:
        connection.sendall(raw_post(body(100_000, stream=True)))
        read_until(connection, b"token")
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: server.ping() == 503)
        assert server.process.poll() is None
        started = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        server.wait()
        assert time.monotonic() - started < IN_TIME
    for host in hosts:
        host.wait(10)


def test_sigterm_while_the_host_loads(tmp_path: Path) -> None:
    with not_ready(scripted_model(tmp_path / "model", {"start_seconds": 60})) as server:
        wait_until(lambda: server.hosts() != [])
        server.wait_for_ping(503)
        refused = server.generate()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        started = time.monotonic()
        server.terminate()
        assert server.wait() == 0
        assert time.monotonic() - started < IN_TIME


def test_sigterm_while_files_are_prepared(tmp_path: Path) -> None:
    model = scripted_model(tmp_path / "model")
    (model / "model.py").write_text(FORMATTER)
    with not_ready(model) as server:
        wait_until(lambda: any("preparing" in line for line in server.log), timeout=60)
        server.wait_for_ping(503)
        started = time.monotonic()
        server.terminate()
        assert server.wait() == 0
        assert time.monotonic() - started < IN_TIME


FORMATTER = """
import time

from djl_python.output_formatter import output_formatter

print("preparing", flush=True)
time.sleep(60)


@output_formatter
def unchanged(response: dict) -> dict:
    return response
"""


def test_sigterm_while_it_recovers(start: Start) -> None:
    server = start({"start_seconds": 2.0})
    server.hosts()[0].kill()
    server.wait_for_ping(503, timeout=5)
    time.sleep(0.3)
    started = time.monotonic()
    server.terminate()
    assert server.wait() == 0
    assert time.monotonic() - started < IN_TIME
    assert server.hosts() == []


def test_a_model_that_cannot_be_loaded_ends_the_process(tmp_path: Path) -> None:
    with not_ready(scripted_model(tmp_path / "model", {"start_error": "no such engine"})) as server:
        assert server.wait() == 1
        assert any("no such engine" in line for line in server.log)


def test_loading_that_takes_too_long_ends_the_process(tmp_path: Path) -> None:
    model = scripted_model(tmp_path / "model", {"start_seconds": 60}, **{"option.model_loading_timeout": 1})
    with not_ready(model) as server:
        assert server.wait() == 1
        assert any("option.model_loading_timeout" in line for line in server.log)
