"""A real Prometheus scrapes a server, and answers the queries of the dashboard."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.project.test_dashboards import FOLDER, board, queries
from tests.support.models import scripted_model
from tests.support.server import free_port, serving
from tests.support.waiting import wait_until

PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed (Debian's package prometheus)"),
]
# Only TensorRT-LLM reports these.
WITHOUT_DATA = ("engine_paused", "engine_queued")


@contextmanager
def prometheus(folder: Path, port: int) -> Iterator[httpx.Client]:
    """A Prometheus with our configuration that scrapes this port each second, and a client of its API."""
    configuration = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    configuration["global"]["scrape_interval"] = "1s"
    configuration["rule_files"] = [str(FOLDER / "alerts.yml")]
    configuration["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    config_file = folder / "prometheus.yml"
    config_file.write_text(yaml.safe_dump(configuration))
    own = free_port()
    command = [str(PROMETHEUS), f"--config.file={config_file}", f"--storage.tsdb.path={folder / 'data'}"]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{own}"], stdout=log, stderr=log) as process,
    ):
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{own}", trust_env=False) as client:
                yield client
        finally:
            process.terminate()


def ask(client: httpx.Client, query: str) -> list[dict[str, Any]]:
    """The result of a query; empty while Prometheus starts."""
    try:
        response = client.get("/api/v1/query", params={"query": query})
    except httpx.TransportError:
        return []
    if response.status_code == 503:
        return []
    answer = response.json()
    assert answer["status"] == "success", (query, answer)
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


def test_every_panel_has_data(tmp_path: Path) -> None:
    model = scripted_model(tmp_path / "model", {"steps_per_second": 200, "kv_blocks": 400})
    with serving(model) as server, prometheus(tmp_path, server.port) as client:
        server.generate(20)
        wait_until(lambda: ask(client, "djl_trtllm_ready == 1") != [], what="a scrape")
        texts = [text for text in queries() if not any(name in text for name in WITHOUT_DATA)]
        assert len(texts) < len(queries()) < 2 * len(board()["panels"])

        def missing() -> list[str]:
            server.generate(20)
            results = {text: ask(client, text) for text in texts}
            return [text for text, found in results.items() if not found or found[0]["value"][1] == "NaN"]

        wait_until(lambda: not missing(), what="data for every panel")
        (tokens,) = ask(client, "djl_trtllm_generated_tokens_total")
        assert 0 < float(tokens["value"][1]) <= server.metric("generated_tokens_total")
        (up,) = ask(client, "up")
        assert up["value"][1] == "1"
        rules = client.get("/api/v1/rules").json()["data"]["groups"][0]["rules"]
        assert rules and all(rule["health"] in ("ok", "unknown") for rule in rules)
