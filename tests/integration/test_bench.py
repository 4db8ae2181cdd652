"""`djl-trtllm bench` against servers whose capacity is known, and against their own statistics.

The engine is slow by its script, so that neither the machine's speed nor its load decides.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import scripted_model
from tests.support.server import Server, environment, run_cli, serving

PLACES = 5
STEPS_PER_SECOND = 20


def bench(server: Server, folder: Path, *arguments: str) -> dict[str, Any]:
    """What the command prints as JSON."""
    done = run_cli("bench", server.url, "--prompt-tokens", "16", "--json", *arguments, environ=environment(folder))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_a_sweep_finds_the_places_and_the_speed_of_the_batch(tmp_path: Path) -> None:
    model = scripted_model(
        tmp_path / "model",
        {"steps_per_second": STEPS_PER_SECOND},
        **{"option.max_rolling_batch_size": PLACES, "job_queue_size": 200},
    )
    with serving(model) as server:
        report = tmp_path / "report.html"
        options = ("--output-tokens", "12", "--duration", "2", "--warmup", "1", "--html", str(report))
        found = bench(server, tmp_path, *options)
    assert "<svg" in report.read_text()
    knee = found["knee"]
    assert knee["concurrency"] == pytest.approx(PLACES, rel=0.3)
    assert knee["capacity_output_tokens_per_second"] == pytest.approx(PLACES * STEPS_PER_SECOND, rel=0.3)
    assert [load["requests"]["failed"] for load in found["loads"]] == [0] * len(found["loads"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("api", "load"),
    [("chat", ("--concurrency", "3")), ("lmi", ("--rate", "1.5"))],
)
def test_times_agree_with_the_servers_own_histograms(api: str, load: tuple[str, str], tmp_path: Path) -> None:
    # So slow that what a busy machine adds on the way is little.
    script = {"steps_per_second": 1}
    names = ("time_to_first_token_seconds", "inter_token_latency_seconds")

    def totals(server: Server) -> list[tuple[float, float]]:
        return [(server.metric(f"{name}_sum"), server.metric(f"{name}_count")) for name in names]

    with serving(scripted_model(tmp_path / "model", script)) as server:
        before = totals(server)
        options = ("--requests", "6", "--warmup", "0", "--output-tokens", "3")
        found = bench(server, tmp_path, "--api", api, *load, *options)
        after = totals(server)
    means = [(sum_ - sum0) / (count - count0) for (sum_, count), (sum0, count0) in zip(after, before, strict=True)]
    (measured,) = found["loads"]
    assert measured["requests"]["succeeded"] == 6
    assert measured["output_tokens_mean"] == 3
    assert measured["ttft_seconds"]["mean"] == pytest.approx(means[0], rel=0.3)
    assert measured["itl_seconds"]["mean"] == pytest.approx(means[1], rel=0.3)


@pytest.mark.slow
def test_every_api_of_the_server_is_measured(tmp_path: Path) -> None:
    counted = {
        "chat": "usage in each event",
        "completions": "usage in each event",
        "lmi": "token by token",
        "tgi": "token by token",
        "triton": "the requested length, spread over the events",
    }
    with serving(scripted_model(tmp_path / "model", {})) as server:
        for api, how in counted.items():
            options = ("--requests", "4", "--warmup", "0", "--output-tokens", "9", "--concurrency", "2")
            found = bench(server, tmp_path, "--api", api, *options)
            (load,) = found["loads"]
            assert (load["tokens_counted_by"], load["output_tokens_mean"]) == ({how: 4}, 9), api
            assert found["notes"] == [], api
