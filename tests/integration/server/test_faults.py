"""The engine process dies, raises, hangs or is stopped, at one of the first tokens; the server itself is stopped."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.integration.server.conftest import Start
from tests.serving.test_kubernetes import PICKER, container, environment, triggers
from tests.support.client import JSON, body, raw_post, read_all, read_until
from tests.support.hostile import Pinging
from tests.support.models import PROMPT, scripted_model
from tests.support.processes import wait_until
from tests.support.server import Server

pytestmark = pytest.mark.slow

HANG_TIMEOUT = 2.0


@dataclass
class Outcome:
    """What a request that may fail came to, and when."""

    status: int
    text: str
    ended: float


def outcome(server: Server, tokens: int, stream: bool) -> Outcome:
    content = body(tokens, stream=stream)
    answer = httpx.post(server.url + "/invocations", content=content, headers=JSON, timeout=300, trust_env=False)
    return Outcome(answer.status_code, answer.text, time.monotonic())


def message_of(answer: Outcome) -> str:
    """The error of a stream's last line, or of an error's body."""
    if answer.status == 200:
        last = json.loads(answer.text.splitlines()[-1])
        assert last["details"]["finish_reason"] == "error"
        return str(last["token"]["error_msg"])
    content = json.loads(answer.text)
    assert (answer.status, set(content)) == (424, {"error", "code"})
    return str(content["error"])


@pytest.mark.parametrize(
    ("executor", "timeout", "ends"),
    [
        ("scripted", 600, [(action, at) for action in ("die", "raise", "exit") for at in (0, 2)]),
        ("scripted", HANG_TIMEOUT, [("hang", 2), ("stop", 2)]),
        # The server sees of an engine process that it ends, or that it is silent.
        ("tensorrt_llm", 600, [("die", 0), ("die", 2)]),
        ("tensorrt_llm", HANG_TIMEOUT, [("hang", 2)]),
    ],
    indirect=["executor"],
    scope="session",
)
def test_without_resuming_every_client_is_answered_and_the_next_request_works(
    start: Start, timeout: float, ends: list[tuple[str, int]]
) -> None:
    # The number of tokens asked for picks the fault.
    faults = [
        {"action": action, "at_token": at, "max_new_tokens": 100 + number} for number, (action, at) in enumerate(ends)
    ]
    server = start(
        {"steps_per_second": 50, "faults": faults},
        **{"option.executor_hang_timeout": timeout, "retry_threshold": 10, "option.resume_after_restart": "false"},
    )
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for number, (_, at) in enumerate(ends):
            bystanders = [pool.submit(outcome, server, 1_000_000, stream) for stream in (False, True)]
            wait_until(lambda: server.metric("running") == 2)
            with Pinging(server) as pinging:
                # A second one would wait for the next host, and end that too.
                faulty = pool.submit(outcome, server, 100 + number, at > 0)
                answers = [future.result() for future in (*bystanders, faulty)]
                recovered = pinging.recovered()
            assert set(pinging.statuses) <= {200, 503}
            # Nobody waits for the new host to hear of the old one's end.
            assert min(answer.ended for answer in answers) < recovered
            for answer, is_stream in zip(answers, (False, True, at > 0), strict=True):
                assert answer.status == 424 or is_stream  # before its first token, a stream is an answer like any other
                assert "the engine failed while it was generating" in message_of(answer)
            assert server.generate(3).status_code == 200
    assert server.metric("executor_restarts_total") == len(ends)
    assert len(server.hosts()) == 1


@pytest.mark.parametrize("executor", ["tensorrt_llm"], indirect=True, scope="session")
def test_a_server_that_is_killed_takes_its_engine_process_along(start: Start) -> None:
    server = start({"steps_per_second": 100})
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(outcome, server, 1_000_000, True)
        wait_until(lambda: server.metric("running") == 1)
        server.descendants()
        server.process.kill()
        assert server.wait() == -signal.SIGKILL
        with contextlib.suppress(httpx.TransportError):
            running.result()


AT_ONCE = {"SERVING_SHUTDOWN_TIMEOUT": "3600"}
"""A server that waited for what it must not wait for would be waited for in vain."""


@pytest.mark.parametrize("numbers", [[signal.SIGTERM] * 2, [signal.SIGINT]])
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


def _settings() -> dict[str, str]:
    return {name: value for name, value in environment().items() if name.startswith(("OPTION_", "SERVING_"))}


def _probe(server: Server, name: str) -> int:
    return server.http.get(container()[name]["httpGet"]["path"]).status_code


def test_a_server_that_loads_is_alive_and_not_ready_and_ends_at_once(tmp_path: Path) -> None:
    model = scripted_model(tmp_path / "model", {"start_seconds": 3600})
    with Server(model, _settings() | AT_ONCE, tmp_path) as server:
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
    with Server(model, _settings(), tmp_path) as server:
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
