"""A client that behaves, among many that do not. (benchmarks/crowd.py measures how long it waits.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.behaved import observe
from tests.support.crowd import Crowd, crowded
from tests.support.models import scripted_model
from tests.support.server import serving

pytestmark = pytest.mark.slow

SECONDS = 6.0
CROWD = Crowd(idle=1500, readers=40, senders=20, flooders=10)
_MEMORY = 300e6


def test_a_crowd_costs_a_client_that_behaves_no_request_and_the_server_little_memory(tmp_path: Path) -> None:
    options = {"option.max_rolling_batch_size": 128, "job_queue_size": 20, "max_connections": 1600}
    model = scripted_model(tmp_path / "model", {"steps_per_second": 50}, **options)
    with serving(model) as server:
        quiet = observe(server, 1)
        with crowded(server.port, CROWD):
            busy = observe(server, SECONDS)
        assert quiet.failures == busy.failures == []
        assert busy.pings.passed and busy.first_tokens.passed
        assert busy.rss - quiet.rss < _MEMORY
        for status in ("414", "431"):
            assert server.metric("http_responses_total", status=status) > 0
