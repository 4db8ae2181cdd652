"""lm-eval's `local-completions`, from its own virtual environment (`scripts/test-clients` makes it)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import MODEL
from tests.support.server import Server

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
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
