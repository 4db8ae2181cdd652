"""Short runs of GuideLLM and AIPerf, each from its own virtual environment (`scripts/test-clients` makes them)."""

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
