"""Hostile requests get an answer, and leave a server that answers. `benchmarks/hostile.py` measures what they cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hostile import requests, send
from tests.support.models import scripted_model
from tests.support.server import serving

pytestmark = pytest.mark.slow

_MOST_GROWTH = 200_000_000


def test_every_hostile_request_gets_its_status_and_leaves_nothing(tmp_path: Path) -> None:
    with serving(scripted_model(tmp_path / "model"), tmp_path) as server:
        before = server.process.memory_info().rss
        wrong, largest = {}, before
        for request in requests():
            # A reset may overtake the response to a request that is not read to its end.
            statuses = {send(server.port, request.data)[0] for _ in range(2)} - {0}
            if statuses - {request.status}:
                wrong[request.name] = statuses, request.status
            largest = max(largest, server.process.memory_info().rss)
        assert not wrong
        assert largest - before < _MOST_GROWTH
        assert server.ping() == 200
