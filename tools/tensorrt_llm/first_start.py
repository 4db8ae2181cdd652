"""Runs two first starts of a server on an installed TensorRT-LLM, and writes what they took as one JSON file.

    python -m tools.tensorrt_llm.first_start [--model DIR] [--backend pytorch] [--out first-start.json]

The first start has an empty cache, the second one that of the first. Of each the file has the seconds to every stage,
with the memory that the GPUs had in use then, and whether requests of each kind were answered; and once the versions
and the GPUs. `docker/verify` runs it in a container. Status 1 where a check has failed. No environment variable is
in the file; the end of the log is, where a start has failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.server import Server

BUNDLED = Path(__file__).parents[2] / "serving" / "models" / "tiny-stories"
_PACKAGES = ("djl-trtllm", "tensorrt_llm", "tensorrt", "torch", "flashinfer-python", "transformers", "mpi4py", "triton")
_WARM_UP = re.compile(r"warming up: (.+) took ([\d.]+) s")
_START_SECONDS = 1800
_LOG_LINES = 200
_POLL_SECONDS = 0.2
_REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "log-probabilities": {"details": True},
    "guided": {"guided_regex": "[a-z]{3}"},
}
_AT_ONCE = 32


class Record:
    """What is written: stages and checks, in the order in which they came."""

    def __init__(self) -> None:
        self.stages: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []

    def stage(self, start: str, name: str, seconds: float) -> None:
        """Note a stage with the memory that is in use now."""
        self.stages.append(
            {"start": start, "stage": name, "seconds": round(seconds, 2), "gpu_memory_mib": gpu_memory()}
        )

    @contextmanager
    def check(self, start: str, name: str) -> Iterator[None]:
        """Note how long the block takes, and what it raises."""
        began = time.monotonic()
        problem = ""
        try:
            yield
        except (AssertionError, OSError, httpx.HTTPError) as error:
            problem = f"{type(error).__name__}: {error}"[:2000]
        seconds = round(time.monotonic() - began, 2)
        self.checks.append(
            {"start": start, "check": name, "passed": not problem, "seconds": seconds, "problem": problem}
        )
        print(f"{start}: {name}: {problem or 'passed'} ({seconds} s)", flush=True)


def gpu_memory() -> list[int]:
    """MiB in use on each GPU; none where there is no nvidia-smi."""
    return [int(line) for line in _nvidia_smi("memory.used", "csv,noheader,nounits") if line.isdigit()]


def machine() -> dict[str, Any]:
    """The versions of what runs, and the GPUs."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"versions": versions, "gpus": _nvidia_smi("name,compute_cap,memory.total,driver_version", "csv,noheader")}


def _nvidia_smi(query: str, form: str) -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={query}", f"--format={form}"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return found.stdout.splitlines() if found.returncode == 0 else []


def run(model: Path, start: str, scratch: Path, record: Record) -> list[str]:
    """Start a server, ask it, and end it. Returns the last lines of its log if it did not become ready."""
    log: list[str] = []
    with Server(model, scratch=scratch) as server:
        with record.check(start, "it becomes ready"):
            _wait(server, start, record)
        if not record.checks[-1]["passed"]:
            log = server.log[-_LOG_LINES:]
        else:
            _ask(server, start, record)
            with record.check(start, "it ends with status 0"):
                server.terminate()
                assert server.wait() == 0
        with record.check(start, "nothing outlives it"):
            server.close()
    return log


def _wait(server: Server, start: str, record: Record) -> None:
    began = time.monotonic()
    seen, ready = 0, False
    while not ready:
        ready = server.ping() == 200  # what it said before then is in its log
        for name, seconds in _WARM_UP.findall("\n".join(server.log))[seen:]:
            seen += 1
            record.stage(start, f"warming up: {name}", float(seconds))
        assert server.process.poll() is None, "the server has ended"
        assert time.monotonic() - began < _START_SECONDS, f"not ready after {_START_SECONDS} seconds"
        time.sleep(_POLL_SECONDS)
    record.stage(start, "ready", time.monotonic() - began)


def _ask(server: Server, start: str, record: Record) -> None:
    prompt = "Once upon a time"
    for name, parameters in _REQUESTS.items():
        with record.check(start, f"a {name} request"):
            answer = server.post(prompt, max_new_tokens=16, **parameters)
            assert answer.status_code == 200 and answer.json()["generated_text"], answer.text
    with record.check(start, "a stream"):
        answer = server.post(prompt, stream=True, max_new_tokens=16)
        assert answer.status_code == 200 and "generated_text" in answer.text, answer.text
    with record.check(start, f"{_AT_ONCE} requests at once"):
        body = {"inputs": prompt, "parameters": {"max_new_tokens": 64}}
        answers = server.together([body] * _AT_ONCE)
        assert all(each.complete and each.status == 200 for each in answers), [each.status for each in answers]
    record.stage(start, f"{_AT_ONCE} requests at once", record.checks[-1]["seconds"])


def first_start(model: Path, backend: str, out: Path) -> bool:
    """Write the file. Returns whether every check has passed."""
    record = Record()
    log: list[str] = []
    with tempfile.TemporaryDirectory(prefix="first-start-") as folder:
        served = Path(folder) / "model"
        served.mkdir()
        for path in model.iterdir():
            if path.name not in ("engine", "serving.properties"):
                (served / path.name).symlink_to(path.resolve())
        lines = (f"option.backend={backend}", "option.max_input_len=512", "option.max_output_len=512")
        (served / "serving.properties").write_text("\n".join(lines))
        for start in ("first", "second"):
            log = run(served, start, Path(folder), record)
            if log:
                break
    passed = all(check["passed"] for check in record.checks)
    found = {"backend": backend, "passed": passed, **machine(), "stages": record.stages, "checks": record.checks}
    out.write_text(json.dumps(found | ({"log": log} if log else {}), indent=2) + "\n")
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=BUNDLED, help="a checkpoint (default: the bundled one)")
    parser.add_argument("--backend", default="pytorch", choices=["pytorch", "tensorrt"])
    parser.add_argument("--out", type=Path, default=Path("first-start.json"))
    arguments = parser.parse_args()
    passed = first_start(arguments.model, arguments.backend, arguments.out)
    print(f"wrote {arguments.out}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
