"""The engines of a comparison: this server on each of them, with the same limits, from its start to its end.

`vllm=/opt/vllm/bin/python` is vLLM in another Python environment. The server is this package there too, so that
only the engine differs; the environment has to have the packages that `djl-trtllm` requires.
"""

import http.client
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from djl_trtllm.config.options.choices import Backend
from djl_trtllm.engines.hardware import read_states
from djl_trtllm.errors import BenchmarkError
from djl_trtllm.processes import child_environment, end_group

LIMITS = ("max_rolling_batch_size", "max_input_len", "max_output_len", "max_seq_len")
"""Options that are the same on all engines: where they differ, the smallest value is set."""
_FILE = "serving.properties"
_LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")
_RESTARTS = re.compile(r"^djl_trtllm_executor_restarts_total(?:{.*})? ([\d.]+)$", re.MULTILINE)
_LOG_TIME = re.compile(r"^[\d-]+ [\d:,]+ [A-Z]+ [\w.]+: ")
_POLL_SECONDS = 0.05
_CONFIG_SECONDS = 600
_END_SECONDS = 60.0
_DROPPED = ("SERVING_", "ARGS_", "SAGEMAKER_")
"""Variables of a server in production (its key, its port, its certificates): a measured one has none of them."""


class Engine(NamedTuple):
    """An engine by its value of `option.backend`, and the Python that has it installed."""

    name: str
    python: str


def read_engines(text: str) -> list[Engine]:
    """Read `vllm=/opt/vllm/bin/python,openvino`; this Python where none is named. Raises BenchmarkError."""
    known = {"tensorrt_llm": Backend.PYTORCH.value} | {name: name for name in Backend.all_values()}
    del known[Backend.AUTO.value]
    engines: dict[str, Engine] = {}
    problems = []
    for part in text.split(","):
        given, _, python = (each.strip() for each in part.partition("="))
        name = known.get(given, given)
        if given not in known:
            problems.append(f"{given or 'nothing'} is no engine; expected {', '.join(known)}")
        elif name in engines:
            problems.append(f"{name} is named twice")
        elif python and not os.access(python, os.X_OK):
            problems.append(f"{python} is no program; expected the Python that has {name}")
        engines[name] = Engine(name, python or sys.executable)
    if len(engines) < 2:
        problems.append("expected two or more, separated by commas")
    if problems:
        raise BenchmarkError(f"--engines {text}: {problems[0]}")
    return list(engines.values())


def prepare(model: str, engine: Engine, limits: Mapping[str, object], folder: Path) -> Path:
    """Make a model directory whose files are links to the model's, and whose settings end with those of the comparison.

    `model` is a model's directory, or an address in the hub or S3. Raises BenchmarkError for a file.
    """
    source, directory = Path(model), folder / engine.name
    if source.is_file():
        raise BenchmarkError(f"{model} is a file: name the model's directory, or unpack the archive first")
    directory.mkdir(exist_ok=True)
    lines = [] if source.is_dir() else [f"option.model_id={model}"]
    for path in source.iterdir() if source.is_dir() else ():
        if path.name == _FILE:
            lines.append(path.read_text(encoding="utf-8", errors="surrogateescape"))
        elif not (directory / path.name).is_symlink():
            (directory / path.name).symlink_to(path.resolve())
    # The last setting of a name counts, and a file wins over the environment.
    lines += [f"option.{name}={value}" for name, value in {"backend": engine.name, **limits}.items()]
    (directory / _FILE).write_text("\n".join([*lines, ""]), encoding="utf-8", errors="surrogateescape")
    return directory


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in child_environment().items() if not name.startswith(_DROPPED)}
    return kept | {"SERVING_LOG_LEVEL": "info"}


def resolve(engine: Engine, directory: Path) -> dict[str, Any]:
    """The resolved options of a model on an engine, as `config --json --all` prints them, by name.

    Raises BenchmarkError where the engine cannot serve the model, for example because it is not installed.
    """
    command = [engine.python, "-m", "djl_trtllm.cli", "config", str(directory), "--json", "--all"]
    environ, stderr = _environment(), ""
    try:
        ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_CONFIG_SECONDS, check=False)
        stderr = ran.stderr
        found = json.loads(ran.stdout)
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"{engine.name}: `config` did not end within {_CONFIG_SECONDS} s") from None
    except (OSError, ValueError) as error:
        why = str(error) if isinstance(error, OSError) else _last_line(stderr)
        advice = "install djl-trtllm and the engine in one environment, and name its Python as in --engines vllm=PYTHON"
        raise BenchmarkError(f"{engine.name}: {engine.python} cannot run djl-trtllm: {why}; {advice}") from None
    if not found["served"]:
        raise BenchmarkError(
            f"{engine.name} ({engine.python}): {found['summary'][-1].replace(str(directory), 'MODEL')}"
        )
    options: dict[str, Any] = found["options"]
    return options


def common_limits(resolved: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The smallest value of each limit that differs between engines, of those that every engine has."""
    values = {name: [options[name]["value"] for options in resolved] for name in LIMITS}
    return {
        name: min(found)
        for name, found in values.items()
        if all(isinstance(value, int) for value in found) and len(set(found)) > 1
    }


def differences(resolved: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The options that differ, by key: the value on each engine, or `no effect`."""
    rows: dict[str, list[str]] = {}
    for name, first in resolved[0].items():
        options = [each[name] for each in resolved]
        if name == "backend" or not any(each["set"] or each["value"] != first["value"] for each in options):
            continue
        cells = [_cell(each) for each in options]
        if len(set(cells)) > 1:
            rows[first["key"]] = cells
    return rows


def _cell(option: Mapping[str, Any]) -> str:
    if option["effect"].startswith("no effect"):
        return "no effect"
    value = option["value"]
    return value if isinstance(value, str) else json.dumps(value)


class Memory(NamedTuple):
    """Bytes: of the server's processes, pages that they share counted once, and of all GPUs since before the start."""

    host: int
    gpus: int | None


@dataclass(frozen=True)
class Server:
    """A server that is ready. `seconds` is how long its start took."""

    process: psutil.Popen
    port: int
    seconds: float
    gpus_before: int | None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def restarts(self) -> int:
        """How often the server has replaced its engine process."""
        return sum(int(float(count)) for count in _RESTARTS.findall(_get(self.port, "/metrics") or ""))

    def memory(self) -> Memory:
        total = 0
        for each in (self.process, *self.process.children(recursive=True)):
            with suppress(psutil.Error):
                total += each.memory_full_info().pss
        now = _gpu_memory()
        return Memory(total, None if now is None or self.gpus_before is None else max(0, now - self.gpus_before))


@contextmanager
def serving(engine: Engine, directory: Path, log: Path) -> Iterator[Server]:
    """Run a server until the block ends; then none of its processes is left.

    `log` gets what it writes. Raises BenchmarkError with its last line if it ends before it is ready.
    """
    gpus_before, began = _gpu_memory(), time.monotonic()
    command = [engine.python, "-m", "djl_trtllm.cli", "serve", str(directory), "--host", "127.0.0.1", "--port", "0"]
    with log.open("wb") as output:
        # In a session of its own: Ctrl-C is for this command, which ends the server.
        process = psutil.Popen(
            command, env=_environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )

    def check(when: str) -> None:
        if process.poll() is not None:
            last = _last_line(log.read_text(errors="replace")).replace(str(directory), "MODEL")
            raise BenchmarkError(f"{engine.name}: the server ended {when} (status {process.returncode}): {last}")

    try:
        port = 0
        while not port or _get(port, "/ping") is None:
            check("while it started")
            time.sleep(_POLL_SECONDS)
            if not port and (found := _LISTENING.search(log.read_text(errors="replace"))):
                port = int(found[1])
        try:
            yield Server(process, port, time.monotonic() - began, gpus_before)
        finally:
            check("while it was measured")
    finally:
        end_group(process, _END_SECONDS)


def _gpu_memory() -> int | None:
    """The bytes that all processes use of this machine's GPUs; None without NVML or a GPU."""
    states = read_states()
    return sum(state.total - state.free for state in states) if states else None


_HERE = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _get(port: int, path: str) -> str | None:
    """A page of the server; None where nobody answers, or with another status than 200."""
    with suppress(OSError, http.client.HTTPException), _HERE.open(f"http://127.0.0.1:{port}{path}", timeout=10) as page:
        return str(page.read().decode(errors="replace"))
    return None


def _last_line(text: str) -> str:
    """The last line of a log without its time and place."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _LOG_TIME.sub("", lines[-1]) if lines else "it wrote nothing"
