"""A client's first request beside the flood of another, and a client that behaves in a crowd."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.client import lmi
from tests.support.floods import Crowd, flooded
from tests.support.hostile import observe
from tests.support.models import PROMPT, scripted_model
from tests.support.processes import wait_until
from tests.support.server import Server, serving

pytestmark = pytest.mark.slow

PLACES = 4
ENDLESS = 500_000
"""Tokens of the flood's requests: hours, at the speed of the script."""


@contextmanager
def endless(server: Server) -> Iterator[httpx.Response]:
    """A request that runs, of the client that `serving` is too: with another one before, a place would be kept free."""
    body = lmi(PROMPT, stream=True, max_new_tokens=ENDLESS, details=True, ignore_eos=True)
    with server.http.stream("POST", "/invocations", json=body) as response:
        assert response.status_code == 200
        yield response


def tokens(lines: Iterator[str], count: int) -> list[int]:
    return [json.loads(next(lines))["token"]["id"] for _ in range(count)]


def test_the_first_request_of_a_client_gets_a_place_of_a_flood_that_goes_on_afterwards(tmp_path: Path) -> None:
    options = {"option.max_rolling_batch_size": PLACES, "job_queue_size": 20}
    model = scripted_model(tmp_path / "model", {"steps_per_second": 100}, **options)
    with serving(model, SERVING_CLIENT_HEADER="x-client") as server, ExitStack() as stack:
        first = stack.enter_context(endless(server))
        others = [stack.enter_context(endless(server)) for _ in range(PLACES - 1)]
        wait_until(lambda: server.metric("generated_tokens_total") > 10 * PLACES, what="tokens")
        light = server.http.post(
            "/invocations", json=lmi(PROMPT, max_new_tokens=3, ignore_eos=True), headers={"x-client": "light"}
        )
        assert light.status_code == 200, light.text
        # One place is kept free now, so the sequence that was moved goes on when one of its client ends.
        more = int(server.metric("generated_tokens_total")) + 20
        first.close()
        stayed, moved = (tokens(response.iter_lines(), more) for response in (others[0], others[-1]))
        assert moved == stayed


# -- A client that behaves, among many that do not ---------------------------------------------------------------------
#
# (benchmarks/crowd.py measures how long it waits.)

SECONDS = 3.0
CROWD = Crowd(idle=1500, readers=40, senders=20, flooders=10)
_MEMORY = 300e6


def test_a_crowd_costs_a_client_that_behaves_no_request_and_the_server_little_memory(tmp_path: Path) -> None:
    options = {"option.max_rolling_batch_size": 128, "job_queue_size": 20, "max_connections": 1600}
    model = scripted_model(tmp_path / "model", {"steps_per_second": 50}, **options)
    with serving(model) as server:
        quiet = observe(server, 1)
        with flooded(server.port, CROWD.numbers):
            busy = observe(server, SECONDS)
        assert quiet.failures == busy.failures == []
        assert busy.pings.passed and busy.first_tokens.passed
        assert busy.rss - quiet.rss < _MEMORY
        for status in ("414", "431"):
            assert server.metric("http_responses_total", status=status) > 0
