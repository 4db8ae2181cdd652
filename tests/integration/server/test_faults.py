"""The executor host dies, raises, hangs or is stopped, at every one of the first tokens."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import time

import httpx
import pytest

from tests.support.serving_process import JSON, ServingProcess, body, wait_until

from .conftest import Start

HANG_TIMEOUT = 1.0
ANSWER = 2.0
"""Seconds from detection to every client's terminal answer."""

SLACK = 2.5
"""For a busy machine, and the steps before the fault."""


def answered(server: ServingProcess, tokens: int, stream: bool) -> tuple[int, str, float]:
    """Status, text and seconds of a request that may fail."""
    started = time.monotonic()
    content = body(tokens, stream=stream)
    answer = httpx.post(server.url + "/invocations", content=content, headers=JSON, timeout=30, trust_env=False)
    return answer.status_code, answer.text, time.monotonic() - started


@pytest.mark.parametrize("action", ["die", "raise", "exit", "hang", "stop"])
def test_every_client_is_answered_and_the_next_request_works(start: Start, executor: str, action: str) -> None:
    # TensorRT-LLM's worker takes longer to come back.
    positions = range(4) if executor == "scripted" else (0, 2)
    # The number of tokens asked for picks the token that the fault comes at.
    faults = [{"action": action, "at_token": at, "max_new_tokens": 100 + at} for at in positions]
    server = start(
        {"steps_per_second": 50, "faults": faults},
        **{"option.executor_hang_timeout": HANG_TIMEOUT, "retry_threshold": 10},
    )
    detection = HANG_TIMEOUT + 0.3 if action in ("hang", "stop") else 0.0
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for at in positions:
            bystanders = [pool.submit(answered, server, 1000, stream) for stream in (False, True)]
            wait_until(lambda: server.metric("running") == 2)
            faulty = [pool.submit(answered, server, 100 + at, stream) for stream in (False, True)]
            seen = set()
            while not all(future.done() for future in (*bystanders, *faulty)):
                seen.add(server.ping())
                time.sleep(0.01)
            seen.add(server.ping())
            assert seen <= {200, 503}
            for number, future in enumerate((*bystanders, *faulty)):
                status, text, seconds = future.result()
                assert seconds < detection + ANSWER + SLACK
                if status == 503:
                    assert number >= 2  # it came when the other one had brought the engine down
                    assert "recovering" in json.loads(text)["message"]
                    continue
                if status == 200:
                    assert number % 2 == 1
                    last = json.loads(text.splitlines()[-1])
                    assert last["details"]["finish_reason"] == "error"
                    message = last["token"]["error_msg"]
                else:
                    assert (status, set(json.loads(text))) == (424, {"error", "code"})
                    message = json.loads(text)["error"]
                assert "the engine failed while it was generating" in message
            server.wait_for_ping(200)
            assert server.generate(3).status_code == 200
    assert server.metric("executor_restarts_total") == len(positions)
    assert len(server.hosts()) == 1


def test_a_killed_host_is_replaced_while_nothing_runs(start: Start) -> None:
    server = start({})
    (host,) = server.hosts()
    host.kill()
    server.wait_for_ping(503, timeout=5)
    server.wait_for_ping(200)
    assert server.hosts() != [host]
    assert server.generate(3).status_code == 200


def test_requests_while_it_recovers_are_503_with_retry_after(start: Start) -> None:
    server = start({"start_seconds": 1.0})
    server.hosts()[0].kill()
    server.wait_for_ping(503, timeout=5)
    refused = server.generate()
    assert refused.status_code == 503
    assert "recovering" in refused.json()["message"]
    assert int(refused.headers["retry-after"]) > 0
    server.wait_for_ping(200)


def test_without_retries_a_death_is_final(start: Start) -> None:
    server = start({}, retry_threshold=0)
    server.hosts()[0].kill()
    server.wait_for_ping(500, timeout=5)
    assert server.client.get("/ping").json() == {"scripted": {"status": "FAILED"}}
    refused = server.generate()
    assert refused.status_code == 503
    assert "has failed" in refused.json()["message"]
    assert "retry-after" not in refused.headers
    assert server.hosts() == []
    server.terminate()
    assert server.wait() == 0


def test_a_crash_loop_ends(start: Start) -> None:
    faults = [{"action": "die", "at_token": 0, "max_new_tokens": 100}]
    server = start({"faults": faults}, retry_threshold=2)
    for deaths in (1, 2, 3):
        assert server.generate(100).status_code == 424
        server.wait_for_ping(200 if deaths < 3 else 500)
    assert server.metric("executor_restarts_total") == 2


def test_fail_fast_ends_the_process_with_a_status(start: Start) -> None:
    server = start({}, {"SERVING_FAIL_FAST": "true"}, retry_threshold=0)
    server.hosts()[0].kill()
    assert server.wait() == 1
    assert any("killed by SIGKILL" in line for line in server.log)


def test_an_idle_host_that_stands_still_is_noticed(start: Start) -> None:
    server = start({}, **{"option.executor_hang_timeout": HANG_TIMEOUT})
    (host,) = server.hosts()
    os.kill(host.pid, signal.SIGSTOP)
    wait_until(lambda: server.metric("executor_restarts_total") == 1, timeout=30)
    server.wait_for_ping(200)


def test_a_server_that_is_killed_takes_its_host_along(start: Start) -> None:
    server = start({"steps_per_second": 100})
    (host,) = server.hosts()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(answered, server, 100_000, True)
        wait_until(lambda: server.metric("running") == 1)
        server.process.kill()
        with contextlib.suppress(httpx.TransportError):
            running.result()
    host.wait(10)
