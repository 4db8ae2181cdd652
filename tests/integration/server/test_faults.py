"""The engine process dies, raises, hangs or is stopped, at one of the first tokens."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass

import httpx
import pytest

from tests.integration.server.conftest import Start
from tests.support.client import JSON, body
from tests.support.pinging import Pinging
from tests.support.server import Server
from tests.support.waiting import wait_until

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
    ("action", "positions"),
    [
        ("die", (0, 2)),
        *(pytest.param(action, (0, 2), marks=pytest.mark.slow) for action in ("raise", "exit")),
        ("hang", (2,)),
        pytest.param("stop", (2,), marks=pytest.mark.slow),
    ],
)
def test_every_client_is_answered_and_the_next_request_works(
    start: Start, action: str, positions: tuple[int, ...]
) -> None:
    # The number of tokens asked for picks the token that the fault comes at.
    faults = [{"action": action, "at_token": at, "max_new_tokens": 100 + at} for at in positions]
    timeout = HANG_TIMEOUT if action in ("hang", "stop") else 600
    server = start(
        {"steps_per_second": 50, "faults": faults}, **{"option.executor_hang_timeout": timeout, "retry_threshold": 10}
    )
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for at in positions:
            bystanders = [pool.submit(outcome, server, 1_000_000, stream) for stream in (False, True)]
            wait_until(lambda: server.metric("running") == 2)
            with Pinging(server) as pinging:
                faulty = [pool.submit(outcome, server, 100 + at, stream) for stream in (False, True)]
                answers = [future.result() for future in (*bystanders, *faulty)]
                recovered = pinging.recovered()
            assert set(pinging.statuses) <= {200, 503}
            # Nobody waits for the new host to hear of the old one's end.
            assert max(answer.ended for answer in answers) < recovered
            for number, (answer, is_stream) in enumerate(zip(answers, (False, True) * 2, strict=True)):
                if answer.status == 503:
                    assert number >= 2  # it came when the other one had brought the engine down
                    assert "recovering" in json.loads(answer.text)["message"]
                    continue
                assert answer.status == 424 or is_stream  # before its first token, a stream is an answer like any other
                assert "the engine failed while it was generating" in message_of(answer)
            assert server.generate(3).status_code == 200
    assert server.metric("executor_restarts_total") == len(positions)
    assert len(server.hosts()) == 1


def test_a_killed_host_is_replaced_while_nothing_runs(start: Start) -> None:
    server = start({})
    (host,) = server.hosts()
    host.kill()
    wait_until(lambda: server.metric("executor_restarts_total") == 1)
    server.wait_for_ping(200)
    assert server.hosts() != [host]
    assert server.generate(3).status_code == 200


def test_requests_while_it_recovers_are_503_with_retry_after(start: Start) -> None:
    server = start({"start_seconds": 1.0}, **{"option.model_loading_timeout": 600})
    dead = server.host()
    dead.kill()
    wait_until(lambda: server.hosts() not in ([], [dead]), what="a new host")
    server.host().suspend()
    assert server.ping() == 503
    refused = server.generate()
    assert refused.status_code == 503
    assert "recovering" in refused.json()["message"]
    assert int(refused.headers["retry-after"]) > 0
    server.resume()
    server.wait_for_ping(200)


def test_without_retries_a_death_is_final(start: Start) -> None:
    server = start({}, retry_threshold=0)
    server.host().kill()
    server.wait_for_ping(500)
    assert server.http.get("/ping").json() == {"scripted": {"status": "FAILED"}}
    refused = server.generate()
    assert refused.status_code == 503
    assert "has failed" in refused.json()["message"]
    assert "retry-after" not in refused.headers
    assert server.hosts() == []


def test_a_crash_loop_ends(start: Start) -> None:
    faults = [{"action": "die", "at_token": 0, "max_new_tokens": 100}]
    server = start({"faults": faults}, retry_threshold=2)
    for deaths in (1, 2, 3):
        assert server.generate(100).status_code == 424
        server.wait_for_ping(200 if deaths < 3 else 500)
    assert server.metric("executor_restarts_total") == 2


def test_fail_fast_ends_the_process_with_a_status(start: Start) -> None:
    server = start({}, {"SERVING_FAIL_FAST": "true"}, retry_threshold=0)
    server.host().kill()
    assert server.wait() == 1
    assert server.says("killed by SIGKILL")


@pytest.mark.slow
def test_an_idle_host_that_stands_still_is_noticed(start: Start) -> None:
    server = start({}, **{"option.executor_hang_timeout": HANG_TIMEOUT})
    os.kill(server.host().pid, signal.SIGSTOP)
    wait_until(lambda: server.metric("executor_restarts_total") == 1)
    server.wait_for_ping(200)


def test_a_server_that_is_killed_takes_its_host_along(start: Start) -> None:
    server = start({"steps_per_second": 100})
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(outcome, server, 1_000_000, True)
        wait_until(lambda: server.metric("running") == 1)
        server.descendants()
        server.process.kill()
        assert server.wait() == -signal.SIGKILL
        with contextlib.suppress(httpx.TransportError):
            running.result()
