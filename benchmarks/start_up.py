"""How long a start takes: `--help`, and `serve` from the command to the first token.

    python -m benchmarks.start_up [MODEL] [--rounds 5] [--before CHECKOUT]

Times are since the command was started, as its log and its first answer have them: the server's imports are done, it
listens, the model's files are read, the engine is loaded, a request has its first token. CPU-seconds are those of the
server and the engine process together, until then; on a busy machine they say more than the times. With `--before` the
code of another checkout runs in turns with this one's. Figures are medians over the rounds, a ratio is the median of
the ratios within them. The engine has to be compiled already, as that of the bundled model is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.load import post, run_streams
from benchmarks.servers import cpu_seconds, free_port, of_the_shell

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


def environment(code: Path) -> dict[str, str]:
    """To run the code of this checkout, from whatever folder."""
    return of_the_shell(PYTHONPATH=str(code), PYTHONSAFEPATH="1")


def help_page(code: Path) -> dict[str, float]:
    """Seconds and CPU-seconds of `--help`."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "djl_trtllm.cli", "--help"]
    process = subprocess.Popen(command, env=environment(code), stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"--help of {code} ended with status {process.returncode}")
    return {"--help": time.perf_counter() - began, "--help, CPU-s": used.ru_utime + used.ru_stime}


def serve(code: Path, model: Path) -> dict[str, float]:
    """Seconds from the command to the end of each phase, and CPU-seconds until the first token."""
    port = free_port()
    command = [sys.executable, "-m", "djl_trtllm.cli", "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    found: dict[str, float] = {}
    began = time.perf_counter()
    with psutil.Popen(command, env=environment(code), stderr=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stderr:
                now = time.perf_counter()
                found |= {phase: now - began for phase, text in PHASES.items() if text in line}
                if "engine loaded" in found:
                    break
            else:
                sys.exit(f"the server of {code} ended with status {process.wait()}")
            (stream,) = run_streams(port, [post("/invocations", REQUEST)])
            found[FIRST] = stream.times[0] - began
            found["CPU-s"] = sum(map(cpu_seconds, (process, *process.children())))
        finally:
            process.terminate()
            process.communicate()
    return found


def main() -> None:
    """Measure in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=BUNDLED)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path, help="another checkout")
    arguments = parser.parse_args()
    trees = [HERE] if arguments.before is None else [HERE, arguments.before.resolve()]
    found: dict[Path, list[dict[str, float]]] = {code: [] for code in trees}
    for number in range(arguments.rounds + 1):
        for code in reversed(trees) if number % 2 else trees:
            measured = help_page(code) | serve(code, arguments.model.resolve())
            if number:  # the first round compiles Python's files and reads all from the disk
                found[code].append(measured)
    table = Table(title=f"Start with {arguments.model.name}, seconds, medians of {arguments.rounds}")
    for column in ("until", "now", "before", "now / before", "ratios") if len(trees) > 1 else ("until", "now"):
        table.add_column(column, justify="left" if column == "until" else "right")
    for phase in found[HERE][0]:
        rows = [[measured[phase] for measured in rounds] for rounds in found.values()]
        cells = [f"{statistics.median(row):.2f}" for row in rows]
        if len(rows) > 1:
            ratios = [now / before for now, before in zip(*rows, strict=True)]
            cells += [f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}-{max(ratios):.2f}"]
        table.add_row(phase, *cells)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
