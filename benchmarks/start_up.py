"""How long a start takes: `--help`, and `serve` from the command to the first token.

    python -m benchmarks.start_up [MODEL] [--rounds 5] [--before CHECKOUT] [--s3]

Times are since the command was started, as its log and its first answer have them: the server's imports are done, it
listens, the model's files are read, the engine is loaded, a request has its first token. CPU-seconds are those of the
server and the engine process together, until then; on a busy machine they say more than the times. With `--before` the
code of another checkout runs in turns with this one's, with `--s3` a server of the same model in a local S3, which it
has downloaded before. Figures are medians over the rounds, a difference and a ratio are those of the differences and
ratios within them. The engine has to be compiled already, as that of the bundled model is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.load import compared, post, run_streams
from benchmarks.servers import cpu_seconds, free_port, of_the_shell
from tests.support.s3 import Store, s3_server, variables

HERE = Path(__file__).parent.parent
BUNDLED = HERE / "serving" / "models" / "tiny-stories"
PHASES = {
    "imports": "Started server process",
    "listens": "listening on",
    "files read": "limits: ",
    "engine loaded": " is ready: ",
}
"""A phase, and what the line of the log at its end has."""
FIRST = "first token"
REQUEST = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 1}, "stream": True}


class Start(NamedTuple):
    """What is started: the code of a checkout, with a model and variables."""

    code: Path
    model: str
    variables: Mapping[str, str]

    @property
    def environment(self) -> dict[str, str]:
        """To run this code, from whatever folder."""
        return of_the_shell(PYTHONPATH=str(self.code), PYTHONSAFEPATH="1", **self.variables)


def help_page(start: Start) -> dict[str, float]:
    """Seconds and CPU-seconds of `--help`."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "djl_trtllm.cli", "--help"]
    process = subprocess.Popen(command, env=start.environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"--help of {start.code} ended with status {process.returncode}")
    return {"--help": time.perf_counter() - began, "--help, CPU-s": used.ru_utime + used.ru_stime}


def serve(start: Start) -> dict[str, float]:
    """Seconds from the command to the end of each phase, and CPU-seconds until the first token."""
    port = free_port()
    command = [sys.executable, "-m", "djl_trtllm.cli", "serve", start.model, "--host", "127.0.0.1", "--port", str(port)]
    found: dict[str, float] = {}
    began = time.perf_counter()
    with psutil.Popen(command, env=start.environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stderr:
                now = time.perf_counter()
                found |= {phase: now - began for phase, text in PHASES.items() if text in line}
                if "engine loaded" in found:
                    break
            else:
                sys.exit(f"the server of {start} ended with status {process.wait()}")
            (stream,) = run_streams(port, [post("/invocations", REQUEST)])
            found[FIRST] = stream.times[0] - began
            found["CPU-s"] = sum(map(cpu_seconds, (process, *process.children())))
        finally:
            process.terminate()
            process.communicate()
    return found


def in_s3(stack: ExitStack, model: Path) -> Start:
    """The model in a local S3, with an empty folder for what is downloaded."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    store = Store(folder)
    for file in model.rglob("*"):
        if file.is_file():
            store.put(f"m/{file.relative_to(model)}", file)
    endpoint = stack.enter_context(s3_server(store))
    return Start(HERE, "s3://models/m", {**variables(endpoint), "DJL_CACHE_DIR": str(folder / "cache")})


def table_of(found: dict[str, list[dict[str, float]]], title: str) -> Table:
    """`found` has the rounds of each start by its name, the first one's first."""
    table = Table(title=title)
    now, *others = found
    columns = [column for other in others for column in (other, f"{other} - now", f"now / {other}", "ratios")]
    for column in ("until", now, *columns):
        table.add_column(column, justify="left" if column == "until" else "right")
    for phase in found[now][0]:
        first = [measured[phase] for measured in found[now]]
        cells = [f"{statistics.median(first):.2f}"]
        for other in others:
            row = [measured[phase] for measured in found[other]]
            added = statistics.median(its - ours for its, ours in zip(row, first, strict=True))
            cells += [f"{statistics.median(row):.2f}", f"{added:+.2f}", *compared(first, row)]
        table.add_row(phase, *cells)
    return table


def main() -> None:
    """Measure in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=BUNDLED)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--s3", action="store_true", help="from a local S3 too")
    arguments = parser.parse_args()
    model = arguments.model.resolve()
    starts = {"now": Start(HERE, str(model), {})}
    with ExitStack() as stack:
        if arguments.before is not None:
            starts["before"] = Start(arguments.before.resolve(), str(model), {})
        if arguments.s3:
            starts["from S3"] = in_s3(stack, model)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in starts}
        for number in range(arguments.rounds + 1):
            for name in reversed(starts) if number % 2 else starts:
                measured = help_page(starts[name]) | serve(starts[name])
                if number:  # the first round compiles Python's files, reads all from the disk, and downloads
                    found[name].append(measured)
    Console(width=120).print(table_of(found, f"Start with {model.name}, seconds, medians of {arguments.rounds}"))


if __name__ == "__main__":
    main()
