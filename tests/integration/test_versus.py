"""`djl-trtllm versus` from its command line to its report, on engines whose speed is known by their script."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.models import TINY_STORIES
from tests.support.processes import survivors
from tests.support.server import CLI, environment, run_cli

pytestmark = pytest.mark.slow

SPEEDS = {"vllm": 5, "openvino": 25}
"""Steps per second of the engine that stands in for each."""
SMALL = ("--clients", "1,2", "--duration", "1", "--warmup", "0", "--output-tokens", "4", "--prompt-tokens", "8")


def engines(folder: Path) -> str:
    """A program in the place of each engine's Python: it serves the model by a script, and notes its starts."""
    named = []
    for name, speed in SPEEDS.items():
        script = ["--option=backend=scripted", f'--option=script={{"steps_per_second": {speed}}}']
        path = folder / f"{name}-python"
        path.write_text(
            f"""#!{sys.executable}
import os, sys
sys.argv.remove("--option=backend={name}")
if sys.argv[3] == "serve":
    with open({str(folder / "starts")!r}, "a") as starts:
        starts.write("{name}\\n")
os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:], *{script!r}])
"""
        )
        path.chmod(0o755)
        named.append(f"{name}={path}")
    return ",".join(named)


def test_engines_are_measured_in_turns_and_the_faster_one_is_ahead(tmp_path: Path) -> None:
    done = run_cli(
        *("versus", str(TINY_STORIES), "--engines", engines(tmp_path), "--rounds", "2", "--json", *SMALL),
        environ=environment(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "starts").read_text().split() == ["vllm", "openvino", "openvino", "vllm"]
    found = json.loads(done.stdout)
    assert found["ahead"] == "openvino"
    assert set(found["configuration"]) == {"option.script"}
    for engine in found["engines"]:
        for each in engine["rounds"]:
            assert each["start_seconds"] > 0 and each["memory_bytes"] > 1e7
            best = max(load["output_tokens_per_second"] for load in each["loads"])
            assert 0 < best <= 2.5 * SPEEDS[engine["engine"]]
    assert found["engines"][1]["answers"]["agreement"]["share"] == 1


def test_an_interrupt_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, *CLI, "versus", str(TINY_STORIES), "--engines", engines(tmp_path), *SMALL]
    with subprocess.Popen(command, env=environment(tmp_path), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "is ready" not in (line := process.stderr.readline()):
            assert line, "it ended before a server was ready"
        servers = psutil.Process(process.pid).children(recursive=True)
        assert servers
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    assert survivors(servers) == []


def test_an_engine_that_is_not_installed_is_named_with_what_to_do(tmp_path: Path) -> None:
    done = run_cli("versus", str(TINY_STORIES), "--engines", "tensorrt,openvino", environ=environment(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("error: tensorrt (") and "cannot be served" in done.stderr
