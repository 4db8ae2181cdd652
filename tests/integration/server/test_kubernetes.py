"""A server with the settings of `serving/kubernetes` answers its probes as the manifests expect."""

from __future__ import annotations

import re
from pathlib import Path

from tests.serving.test_kubernetes import PICKER, container, environment, triggers
from tests.support.models import PROMPT, scripted_model
from tests.support.processes import wait_until
from tests.support.server import Server

_NOT_SCRIPTED = {"djl_trtllm_engine_queued", "trtllm_kv_cache_max_blocks", "trtllm_kv_cache_tokens_per_block"}
"""What only real engines report."""
_SETTINGS = {name: value for name, value in environment().items() if name.startswith(("OPTION_", "SERVING_"))}


def _probe(server: Server, name: str) -> int:
    return server.http.get(container()[name]["httpGet"]["path"]).status_code


def _wait_until_it_listens(server: Server) -> None:
    wait_until(lambda: server.ping() != 0, what="a server that listens")


def test_a_server_that_loads_is_alive_and_not_ready(tmp_path: Path) -> None:
    model = scripted_model(tmp_path / "model", {"start_seconds": 3600})
    with Server(model, _SETTINGS, tmp_path) as server:
        _wait_until_it_listens(server)
        probes = [_probe(server, name) for name in ("startupProbe", "livenessProbe", "readinessProbe")]
        assert probes == [200, 200, 503]
        wait_until(lambda: server.hosts() != [])
        server.terminate()
        assert server.wait() == 0


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
