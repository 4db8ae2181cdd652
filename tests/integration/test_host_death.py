"""The engine process killed or stopped under running streams, which do not go on: each client gets an error."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.client import Answer, exchange, lmi
from tests.support.pinging import Pinging
from tests.support.prompts import DOCUMENT, SIXTEEN
from tests.support.server import Server, serving
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

HANG_SECONDS = 2


@pytest.fixture(scope="module")
def mortal(model: Path, scratch: Path) -> Iterator[Server]:
    with serving(
        model,
        scratch,
        OPTION_EXECUTOR_HANG_TIMEOUT=str(HANG_SECONDS),
        SERVING_RETRY_THRESHOLD="10",
        OPTION_RESUME_AFTER_RESTART="false",
    ) as started:
        yield started


async def strike(server: Server, sig: signal.Signals, stream: bool) -> list[Answer]:
    """Signal the host while sixteen requests run; their answers."""
    struck = asyncio.Event()
    parts = 0

    def count() -> None:
        nonlocal parts
        parts += 1
        if parts > 200:
            struck.set()

    requests = [lmi(prompt, stream=stream, max_new_tokens=500, ignore_eos=True, details=True) for prompt in SIXTEEN]
    answers = asyncio.gather(*(exchange(server.port, request, on_part=count) for request in requests))
    if stream:
        await struck.wait()
    else:
        await asyncio.to_thread(wait_until, lambda: server.metric("running") == 16)
    server.host().send_signal(sig)
    return await answers


def told_of_the_failure(answer: Answer) -> bool:
    """Whether an answer ends with an error, in its stream or by its status."""
    if answer.status == 200:
        last = answer.lines[-1]
        return last["details"]["finish_reason"] == "error" and "may be repeated" in last["token"]["error_msg"]
    return answer.status == 424 and "may be repeated" in answer.json["error"]


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
def test_every_client_is_reported_and_the_next_request_works(mortal: Server, sig: signal.Signals, stream: bool) -> None:
    expected = mortal.token_ids(DOCUMENT, max_new_tokens=40)
    restarts, errors = mortal.metric("executor_restarts_total"), mortal.finished("error")
    host = mortal.host()

    with Pinging(mortal) as pinging:
        answers = asyncio.run(strike(mortal, sig, stream))
        recovered = pinging.recovered()

    for answer in answers:
        assert answer.complete
        assert told_of_the_failure(answer), answer.body[-500:]
    # Nobody waits for the new host to hear of the old one's end.
    assert max(answer.ended for answer in answers) < recovered
    assert set(pinging.statuses) == {200, 503}
    assert mortal.metric("executor_restarts_total") == restarts + 1
    assert mortal.finished("error") == errors + 16
    assert mortal.idle()
    assert not psutil.pid_exists(host.pid), "the dead host was reaped"
    assert mortal.token_ids(DOCUMENT, max_new_tokens=40) == expected


@pytest.mark.parametrize(
    ("sig", "cause"), [(signal.SIGKILL, "killed by SIGKILL"), (signal.SIGSTOP, "option.executor_hang_timeout")]
)
def test_the_log_says_how_the_engine_process_ended(mortal: Server, sig: signal.Signals, cause: str) -> None:
    restarts, lines = mortal.metric("executor_restarts_total"), len(mortal.log)
    mortal.host().send_signal(sig)
    wait_until(lambda: mortal.metric("executor_restarts_total") == restarts + 1)
    log = "\n".join(mortal.log[lines:])
    assert cause in log
    assert "starting a new engine process" in log
    mortal.wait_for_ping(200)
