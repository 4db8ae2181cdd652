"""The executor host killed or stopped under running streams: everyone is told, and the next request works."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.harness import Answer, Server, body, exchange, serving, until
from tests.support.prompts import DOCUMENT, SIXTEEN

HANG_SECONDS = 2
TOLD_WITHIN = 2
"""Seconds from the detection of a dead host to the last client's terminal answer."""


@pytest.fixture(scope="module")
def mortal(model: Path, scratch: Path) -> Iterator[Server]:
    with serving(
        model, scratch, OPTION_EXECUTOR_HANG_TIMEOUT=str(HANG_SECONDS), SERVING_RETRY_THRESHOLD="10"
    ) as started:
        yield started


class Pinging:
    """Every status that /ping has during the block."""

    def __init__(self, server: Server) -> None:
        self.statuses: list[int] = []
        self._server = server
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._end.is_set():
            self.statuses.append(self._server.ping())
            time.sleep(0.01)

    def __enter__(self) -> Pinging:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


async def strike(server: Server, sig: signal.Signals, stream: bool) -> tuple[list[Answer], float]:
    """Signal the host while sixteen requests run; their answers and when it happened."""
    struck = asyncio.Event()
    parts = 0

    def count() -> None:
        nonlocal parts
        parts += 1
        if parts > 200:
            struck.set()

    requests = [body(prompt, stream=stream, max_new_tokens=500, ignore_eos=True, details=True) for prompt in SIXTEEN]
    answers = asyncio.gather(*(exchange(server.port, request, on_part=count) for request in requests))
    if stream:
        await struck.wait()
    else:
        await asyncio.to_thread(until, lambda: server.metric("running") == 16, "sixteen running requests")
    at = time.monotonic()
    server.host().send_signal(sig)
    return await answers, at


def told_of_the_failure(answer: Answer) -> bool:
    """Whether an answer ends with an error, in its stream or by its status."""
    if answer.status == 200:
        last = answer.lines[-1]
        return last["details"]["finish_reason"] == "error" and "may be repeated" in last["token"]["error_msg"]
    return answer.status == 424 and "may be repeated" in answer.json["error"]


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(("sig", "detection"), [(signal.SIGKILL, 0), (signal.SIGSTOP, HANG_SECONDS)])
def test_every_client_is_told_and_the_next_request_works(
    mortal: Server, sig: signal.Signals, detection: float, stream: bool
) -> None:
    expected = mortal.token_ids(DOCUMENT, max_new_tokens=40)
    restarts, errors = mortal.metric("executor_restarts_total"), mortal.metric("finished_total", reason="error")
    host = mortal.host()

    with Pinging(mortal) as pinging:
        answers, struck = asyncio.run(strike(mortal, sig, stream))
        until(lambda: mortal.ping() == 200, "recovery")

    for answer in answers:
        assert answer.complete
        assert told_of_the_failure(answer), answer.body[-500:]
    # The watchdog looks eight times per hang timeout.
    assert max(answer.ended for answer in answers) - struck < detection * 1.25 + TOLD_WITHIN
    assert 503 in pinging.statuses
    assert set(pinging.statuses) == {200, 503}
    assert mortal.metric("executor_restarts_total") == restarts + 1
    assert mortal.metric("finished_total", reason="error") == errors + 16
    assert mortal.idle()
    assert not psutil.pid_exists(host.pid), "the dead host was reaped"
    assert mortal.token_ids(DOCUMENT, max_new_tokens=40) == expected


def test_while_it_recovers_requests_are_refused_with_the_reason(mortal: Server) -> None:
    mortal.host().kill()
    until(lambda: mortal.ping() == 503, "detection")
    answer = mortal.post(DOCUMENT)
    assert answer.status_code == 503
    assert "recovering" in answer.json()["message"]
    assert int(answer.headers["retry-after"]) > 0
    until(lambda: mortal.ping() == 200, "recovery")
    assert mortal.post(DOCUMENT).status_code == 200


def test_the_log_says_how_the_host_ended(mortal: Server) -> None:
    log = mortal.log.read_text()
    assert "killed by SIGKILL" in log
    assert "option.executor_hang_timeout" in log
    assert "starting a new executor host" in log
