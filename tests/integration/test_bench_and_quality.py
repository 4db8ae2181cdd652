"""`djl-trtllm bench` against servers whose capacity is known, and against their own statistics.

The engine is slow by its script, so that neither the machine's speed nor its load decides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import TINY_STORIES, scripted_model
from tests.support.processes import wait_until
from tests.support.server import Server, environment, run_cli, serving

pytestmark = pytest.mark.slow

PLACES = 5
STEPS_PER_SECOND = 20


def bench(server: Server, folder: Path, *arguments: str) -> dict[str, Any]:
    """Return the JSON that the command prints."""
    done = run_cli("bench", server.url, "--prompt-tokens", "16", "--json", *arguments, environ=environment(folder))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


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


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server so slow that what a busy machine adds on the way is little."""
    model = scripted_model(tmp_path_factory.mktemp("slow") / "model", {"steps_per_second": 1})
    with serving(model) as server:
        yield server


@pytest.mark.parametrize(
    ("api", "load"),
    [("chat", ("--concurrency", "3")), ("lmi", ("--rate", "1.5"))],
)
def test_times_agree_with_the_servers_own_histograms(
    slow: Server, api: str, load: tuple[str, str], tmp_path: Path
) -> None:
    names = ("time_to_first_token_seconds", "inter_token_latency_seconds")

    def totals() -> list[tuple[float, float]]:
        return [(slow.metric(f"{name}_sum"), slow.metric(f"{name}_count")) for name in names]

    before = totals()
    options = ("--requests", "6", "--warmup", "0", "--output-tokens", "3")
    found = bench(slow, tmp_path, "--api", api, *load, *options)
    after = totals()
    means = [(sum_ - sum0) / (count - count0) for (sum_, count), (sum0, count0) in zip(after, before, strict=True)]
    (measured,) = found["loads"]
    assert measured["requests"]["succeeded"] == 6
    assert measured["output_tokens_mean"] == 3
    assert measured["ttft_seconds"]["mean"] == pytest.approx(means[0], rel=0.3)
    assert measured["itl_seconds"]["mean"] == pytest.approx(means[1], rel=0.3)


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


# -- quality and compile --check with real engines, and a server's record that both commands replay -------------------


def test_a_server_agrees_with_the_model_that_it_serves(server: Server, model: Path, tmp_path: Path) -> None:
    done = run_cli("quality", server.url, str(model), "--json", environ=environment(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["verdict"], found["agreement"]["share"], found["prompts"]["equal"]) == ("agrees", 1, 32)
    assert found["kl_lower_bound_nats"]["positions"] > found["agreement"]["compared_tokens"] > 1000
    assert found["kl_lower_bound_nats"]["max"] < 1e-6
    assert found["perplexity"]["a"] == pytest.approx(found["perplexity"]["b"], rel=1e-6)


@pytest.mark.timeout(600)
def test_4_bit_weights_differ_from_those_of_the_checkpoint(tmp_path: Path) -> None:
    flags = ("--quantize=int4", "--check", str(TINY_STORIES))
    done = run_cli("compile", str(TINY_STORIES), str(tmp_path / "int4"), *flags, environ=environment(tmp_path))
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines()[-1].startswith("differs: agreement 0.9")
    assert (tmp_path / "int4" / "openvino_model.xml").is_file(), "the engine is there all the same"


def own(record: Path) -> list[str]:
    """The lines of a record but those of the fixture's requests, which have two tokens."""
    return [line for line in record.read_text().splitlines(keepends=True) if '"max_tokens":2,' not in line]


@pytest.mark.parametrize("prompts", ["lengths", "ids"])
def test_a_record_of_requests_is_replayed(prompts: str, tmp_path: Path) -> None:
    record = tmp_path / "requests.jsonl"
    recording = {
        "SERVING_RECORD_FILE": str(record),
        "SERVING_RECORD_SHARE": "1",
        "SERVING_RECORD_PROMPTS": prompts,
    }
    with serving(scripted_model(tmp_path / "model"), tmp_path, **recording) as server:
        body: dict[str, Any] = {"prompt": ["a secret wolf", "a secret fox"], "max_tokens": 5, "temperature": 0}
        assert server.http.post("/v1/completions", json=body).status_code == 200
        chat = {"messages": [{"role": "user", "content": "a secret bear"}], "max_tokens": 7, "seed": 3}
        assert server.http.post("/v1/chat/completions", json=chat).status_code == 200
        server.answer("a secret hen", max_new_tokens=9)
        assert server.http.post("/v1/completions", json={"prompt": ""}).status_code == 400
        wait_until(lambda: len(own(record)) == 4)  # a thread writes them
        kept = "".join(own(record))
        flags = ("--api", "completions", "--requests", "8", "--warmup", "0", "--concurrency", "2", "--json")
        (tmp_path / "kept.jsonl").write_text(kept)
        dataset = str(tmp_path / "kept.jsonl")
        replayed = run_cli("bench", server.url, "--dataset", dataset, *flags, environ=environment(tmp_path))
    entries = [json.loads(line) for line in kept.splitlines()]
    assert [(each["dialect"], each["max_tokens"]) for each in entries] == [
        ("openai", 5),
        ("openai", 5),
        ("openai", 7),
        ("lmi", 9),
    ]
    assert entries[2]["parameters"]["seed"] == 3
    assert "secret" not in kept and "wolf" not in kept
    assert replayed.returncode == 0, replayed.stderr
    (load,) = json.loads(replayed.stdout)["loads"]
    assert load["requests"]["succeeded"] == 8
    assert load["output_tokens_mean"] == pytest.approx(sum(each["max_tokens"] for each in entries) / 4)
    if prompts == "ids":
        assert load["prompt_tokens_mean"] == pytest.approx(sum(each["prompt_tokens"] for each in entries) / 4)
    model = str(tmp_path / "model")
    compared = run_cli("quality", model, model, "--prompts", dataset, environ=environment(tmp_path))
    assert (compared.returncode, "record them with" in compared.stderr) == (
        (1, True) if prompts == "lengths" else (0, False)
    )
