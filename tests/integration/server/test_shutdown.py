from __future__ import annotations

import concurrent.futures
import re
import signal
from pathlib import Path

import pytest

from tests.integration.server.conftest import Start
from tests.serving.test_kubernetes import PICKER, container, environment, triggers
from tests.support.client import body, raw_post, read_all, read_until
from tests.support.models import PROMPT, scripted_model
from tests.support.processes import wait_until
from tests.support.server import Server

AT_ONCE = {"SERVING_SHUTDOWN_TIMEOUT": "3600"}
"""A server that waited for what it must not wait for would be waited for in vain."""


@pytest.mark.parametrize(
    "numbers",
    [
        [signal.SIGTERM],
        pytest.param([signal.SIGTERM] * 2, marks=pytest.mark.slow),
        pytest.param([signal.SIGINT], marks=pytest.mark.slow),
    ],
)
def test_running_answers_are_finished_and_new_requests_refused(start: Start, numbers: list[signal.Signals]) -> None:
    fault = {"action": "stop", "at_token": 3, "max_new_tokens": 150}
    server = start({"faults": [fault]}, AT_ONCE, **{"option.executor_hang_timeout": 600})
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        with server.connect() as connection, server.connect() as kept_alive:
            connection.sendall(raw_post(body(150, stream=True)))
            received = read_until(connection, b"token")
            server.wait_until_stopped()
            whole = pool.submit(server.generate, 100)
            wait_until(lambda: server.metric("running") == 2)
            for number in numbers:
                server.process.send_signal(number)
                wait_until(lambda: server.ping() == 503)
            kept_alive.sendall(raw_post(body(2)))
            refused = read_all(kept_alive)
            assert refused.startswith(b"HTTP/1.1 503")
            assert b"connection: close" in refused
            assert b"is shutting down" in refused
            server.resume()
            received += read_all(connection)
        assert received.count(b'"token"') == 150
        assert received.endswith(b"\r\n0\r\n\r\n")
        assert whole.result().status_code == 200
    assert server.wait() == 0


def test_sigterm_while_it_recovers(start: Start) -> None:
    server = start({"start_seconds": 2.0}, AT_ONCE)
    (dead,) = server.hosts()
    dead.kill()
    wait_until(lambda: server.hosts() not in ([], [dead]), what="a host that is being started")
    server.terminate()
    assert server.wait() == 0
    assert server.hosts() == []


# -- as Kubernetes asks and ends --------------------------------------------------------------------------------------


_NOT_SCRIPTED = {"djl_trtllm_engine_queued", "trtllm_kv_cache_max_blocks", "trtllm_kv_cache_tokens_per_block"}
"""Metrics that only real engines report."""
_SETTINGS = {name: value for name, value in environment().items() if name.startswith(("OPTION_", "SERVING_"))}


def _probe(server: Server, name: str) -> int:
    return server.http.get(container()[name]["httpGet"]["path"]).status_code


def test_a_server_that_loads_is_alive_and_not_ready_and_ends_at_once(tmp_path: Path) -> None:
    model = scripted_model(tmp_path / "model", {"start_seconds": 3600})
    with Server(model, _SETTINGS | AT_ONCE, tmp_path) as server:
        wait_until(lambda: server.hosts() != [])
        server.wait_for_ping(503)
        probes = [_probe(server, name) for name in ("startupProbe", "livenessProbe", "readinessProbe")]
        assert probes == [200, 200, 503]
        refused = server.generate()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        server.terminate()
        assert server.wait() == 0
        assert server.hosts() == []


def test_a_ready_server_has_the_metrics_and_one_that_drains_ends_its_streams(tmp_path: Path) -> None:
    model = scripted_model(tmp_path / "model", {"steps_per_second": 50})
    with Server(model, _SETTINGS, tmp_path) as server:
        server.wait_for_ping()
        assert [_probe(server, name) for name in ("startupProbe", "livenessProbe", "readinessProbe")] == [200] * 3
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 100}, "stream": True}
        with server.http.stream("POST", "/invocations", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            page = server.http.get("/metrics").text
            server.terminate()
            wait_until(lambda: _probe(server, "readinessProbe") != 200, what="a server that is not ready")
            assert _probe(server, "livenessProbe") == 200
            assert len(list(lines)) == 99
        assert server.wait() == 0
    queried = {name for each in triggers().values() for name in re.findall(r"\bdjl_trtllm_\w+", each["query"])}
    there = set(re.findall(r"^(\w+)(?:\{.*\})? ", page, re.MULTILINE))
    assert (queried | PICKER) - there <= _NOT_SCRIPTED
