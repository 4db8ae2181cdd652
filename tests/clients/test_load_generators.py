"""Short runs of GuideLLM, AIPerf and lm-eval, each from its own virtual environment (`scripts/test-clients`)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import MODEL
from tests.support.server import Server

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
REQUESTS = 12


def run(name: str, *arguments: str, folder: Path) -> None:
    """Run a program to its end."""
    program = ROOT / f".venv-{name}" / "bin" / name
    environ = {**os.environ, "HOME": str(folder), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run([program, *arguments], cwd=folder, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(server: Server, tiny_stories: Path, tmp_path: Path, route: str) -> None:
    run(
        "guidellm",
        "run",
        "--disable-console",
        f"--backend=kind=openai_http,target={server.url},model={MODEL},request_format={route}",
        "--profile=kind=concurrent,streams=4",
        f"--constraint=kind=max_requests,count={REQUESTS}",
        f"--tokenizer=kind=hf_auto,model={tiny_stories}",
        "--data=kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        f"--output=kind=json,path={tmp_path / 'report.json'}",
        folder=tmp_path,
    )
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
    assert benchmark["metrics"]["output_token_count"]["successful"]["mean"] == 16


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_aiperf(server: Server, tiny_stories: Path, tmp_path: Path, endpoint: str) -> None:
    run(
        "aiperf",
        "profile",
        f"--model={MODEL}",
        f"--url={server.url}",
        f"--endpoint-type={endpoint}",
        "--streaming",
        f"--tokenizer={tiny_stories}",
        "--concurrency=4",
        f"--request-count={REQUESTS}",
        "--prompt-input-tokens-mean=32",
        "--prompt-output-tokens-mean=16",
        "--extra-inputs=ignore_eos:true",
        "--use-server-token-count",
        *(["--per-chunk-usage"] if endpoint == "chat" else []),
        "--no-gpu-telemetry",
        f"--output-artifact-dir={tmp_path / 'report'}",
        folder=tmp_path,
    )
    report: dict[str, Any] = json.loads((tmp_path / "report" / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert not report.get("error_summary")
    assert report["output_sequence_length"]["avg"] == 16


STORIES = [
    {"begin": "Once upon a", "ends": ["time", "hen", "bricks"]},
    {"begin": "The little red riding", "ends": ["hood", "was", "of"]},
    {"begin": "Once upon a time there were three little", "ends": ["pigs", "time", "were"]},
    {"begin": "The wolf huffed and", "ends": ["puffed", "bears", "red"]},
]
"""The model knows how each goes on: with its first end."""
TASKS: dict[str, dict[str, object]] = {
    "stories": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{begin}}",
        "doc_to_choice": "{{ends}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{begin}} {{ends[0]}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "continuation": {
        "output_type": "generate_until",
        "doc_to_text": "{{begin}}",
        "doc_to_target": "{{ends[0]}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def test_tasks_of_each_kind_are_evaluated(server: Server, tiny_stories: Path, tmp_path: Path) -> None:
    stories = tmp_path / "stories.jsonl"
    stories.write_text("".join(json.dumps(story) + "\n" for story in STORIES))
    for name, task in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(stories)}}, "test_split": "test"}
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name} | data | task))  # which is YAML too
    model = f"model={MODEL},base_url={server.url}/v1/completions,tokenizer={tiny_stories},num_concurrent=4"
    command: list[str | Path] = [
        ROOT / ".venv-lm-eval" / "bin" / "lm_eval",
        "--model",
        "local-completions",
        "--model_args",
        model,
    ]
    command += ["--tasks", ",".join(TASKS), "--include_path", tmp_path, "--batch_size", "2"]
    environ = {**os.environ, "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [*command, "--output_path", tmp_path / "report.json"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    (report,) = tmp_path.glob("report*.json")
    results = json.loads(report.read_text())["results"]
    assert results["stories"]["acc,none"] == 1
    assert 1 < results["perplexity"]["word_perplexity,none"] < 20
    assert "exact_match,none" in results["continuation"]
