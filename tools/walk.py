"""Count the files that a value passes on its way to the engine.

    python -m tools.walk                     max_new_tokens, from an HTTP body; max_num_tokens, from serving.properties
    python -m tools.walk max_new_tokens -v   with the functions, in the order in which they first have the value

The bundled model is served for real, with every function of the package traced. A file is on the way if one of its
functions has the value, as a number or text, itself or at most two containers deep (a request's `sampling`, say),
before the engine's own arguments have it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "djl_trtllm"
MODEL = ROOT / "serving" / "models" / "tiny-stories"
VALUES = {"max_new_tokens": 487, "max_num_tokens": 2371}
"""A number for each parameter that nothing else has. The traced processes read it here, not in their environment,
which is itself a source of configuration."""
DEPTH = 2
LARGEST = 5000
"""Texts and containers above this size are not searched."""


def holds(value: Any, number: int, depth: int = DEPTH) -> bool:
    """Return whether `value` is the number, has it in its text, or contains it at most `depth` containers deep."""
    match value:
        case bool():
            return False
        case int():
            return value == number
        case str():
            return len(value) < LARGEST and re.search(rf"(?<!\d){number}(?!\d)", value) is not None
        case bytes() | bytearray():
            return holds(bytes(value[:LARGEST]).decode("latin-1"), number)
    if depth == 0:
        return False
    parts: list[Any] = []
    if isinstance(value, dict | list | tuple) and len(value) < LARGEST:
        parts = list(value.values() if isinstance(value, dict) else value)
    else:
        kind = type(value)
        fields = getattr(kind, "__struct_fields__", None) or getattr(kind, "__dataclass_fields__", None)
        if isinstance(fields, tuple | dict):  # of a class itself, it is a descriptor
            parts = [getattr(value, name, None) for name in fields]
    return any(holds(part, number, depth - 1) for part in parts)


class Tracer:
    """Write each function of the package that has the value, once, with its process, to a file."""

    def __init__(self, number: int, output: str) -> None:
        self.number = number
        self.output = os.open(output, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        self.seen: set[tuple[str, str]] = set()

    def enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Trace a call of the package's own functions; a function for `sys.settrace`."""
        inside = event == "call" and frame.f_code.co_filename.startswith(f"{PACKAGE}{os.sep}")
        return self.step if inside else None

    def step(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Look at the local variables before each line, and at what the function returns."""
        place = (frame.f_code.co_filename, frame.f_code.co_name)
        if place in self.seen:
            return None
        values = [*frame.f_locals.values(), argument if event == "return" else None]
        if any(holds(value, self.number) for value in values):
            self.seen.add(place)
            module = Path(place[0]).relative_to(PACKAGE)
            os.write(self.output, f"{os.getpid()} {module} {place[1]}\n".encode())
        return self.step


def trace_this_process() -> None:
    """Begin to trace; the traced processes' `sitecustomize` calls it."""
    tracer = Tracer(VALUES[os.environ["WALK_NAME"]], os.environ["WALK_OUTPUT"])
    sys.settrace(tracer.enter)
    threading.settrace(tracer.enter)


def way(name: str) -> list[tuple[str, str]]:
    """Return (module, function) of what has the value of a parameter, in order, until the engine has it."""
    with tempfile.TemporaryDirectory(prefix="walk-") as folder:
        site = Path(folder, "site")
        site.mkdir()
        (site / "sitecustomize.py").write_text("from tools.walk import trace_this_process\ntrace_this_process()\n")
        model = Path(folder, "model")
        shutil.copytree(MODEL, model)
        if name == "max_num_tokens":
            properties = model / "serving.properties"
            properties.write_text(f"option.max_num_tokens={VALUES[name]}\n")
        output = Path(folder, "output")
        serve_once(model, name, output, {"WALK_NAME": name, "WALK_OUTPUT": str(output), "PYTHONPATH": f"{site}:{ROOT}"})
        records = [line.split(" ", 2) for line in output.read_text().splitlines()]
    server = records[0][0]
    found: list[tuple[str, str]] = []
    in_engine = False
    for process, module, function in records:
        in_backend = process != server and module.startswith("backends/")
        if in_engine and not in_backend:
            break
        in_engine = in_backend
        found.append((module, function.strip()))
    return found


def serve_once(model: Path, name: str, output: Path, environment: dict[str, str]) -> None:
    """Serve a model in traced processes, and ask it for one text."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tokens = VALUES["max_new_tokens"] if name == "max_new_tokens" else 4
    body = f'{{"inputs": "Once", "parameters": {{"max_new_tokens": {tokens}}}}}'.encode()
    command = [sys.executable, "-m", "djl_trtllm.cli", "serve", str(model), "--port", str(port)]
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    ) as server:
        try:
            deadline = time.monotonic() + 300
            url = f"http://127.0.0.1:{port}"
            while not _answers(f"{url}/ping"):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the traced server did not start")
                time.sleep(0.2)
            if name == "max_new_tokens":
                output.write_text("")  # what has the number by chance
            # A random id could have the number in its digits.
            headers = {"Content-Type": "application/json", "X-Request-Id": "walk"}
            request = urllib.request.Request(f"{url}/invocations", body, headers)  # noqa: S310 (this machine's server)
            with urllib.request.urlopen(request, timeout=300) as response:  # noqa: S310
                response.read()
        finally:
            server.terminate()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310 (this machine's server)
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main() -> None:
    """Print the files on the way of each parameter, and their number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*VALUES, []], metavar="NAME", help=" or ".join(VALUES))
    parser.add_argument("-v", "--verbose", action="store_true", help="print the functions, too")
    arguments = parser.parse_args()
    for name in arguments.names or VALUES:
        found = way(name)
        files = list(dict.fromkeys(module for module, _ in found))
        print(f"{name}: {len(files)} files")
        for module in files:
            functions = ": " + ", ".join(function for at, function in found if at == module)
            print(f"  {module}{functions if arguments.verbose else ''}")


if __name__ == "__main__":
    main()
