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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from djl_trtllm.config.options.choices import Backend
from djl_trtllm.engines.hardware import GpuState, read_states
from djl_trtllm.errors import BenchmarkError
from djl_trtllm.processes import child_environment, end_group

LIMITS = ("max_rolling_batch_size", "max_input_len", "max_output_len", "max_seq_len")
"""Options that are the same on all engines: where they differ, the smallest value is set."""
_LISTENING = re.compile(r"listening on (http://127\.0\.0\.1:\d+)")
_RESTARTS = re.compile(r"^djl_trtllm_executor_restarts_total(?:{.*})? ([\d.]+)$", re.MULTILINE)
_OWN_ERROR = "error: "
"""The beginning of the errors that a command of this package prints, in place of its answer."""
_LOG_TIME = re.compile(rf"^(?:[\d-]+ [\d:,]+ [A-Z]+ [\w.]+: |{_OWN_ERROR})")
_POLL_SECONDS = 0.05
_CONFIG_SECONDS = 600
_END_SECONDS = 60.0
_DROPPED = ("SERVING_", "ARGS_", "SAGEMAKER_")
"""Variables of a server in production (its key, its port, its certificates): a measured one has none of them."""


class Engine(NamedTuple):
    """An engine by its value of `option.backend`, and the Python that has it installed."""

    name: str
    python: str

    def command(self, verb: str, model: str, limits: Mapping[str, object], *flags: str) -> list[str]:
        """The words that run this package for a model on the engine; `limits` are options by name."""
        options = {"backend": self.name, **limits}
        given = [f"--option={name}={value}" for name, value in options.items()]
        return [self.python, "-m", "djl_trtllm.cli", verb, model, *flags, *given]


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


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in child_environment().items() if not name.startswith(_DROPPED)}
    return kept | {"SERVING_LOG_LEVEL": "info"}


def resolve(engine: Engine, model: str, limits: Mapping[str, object]) -> dict[str, Any]:
    """The resolved options of a model on an engine, as `config --json --all` prints them, by name.

    Raises BenchmarkError where the engine cannot serve the model, for example because it is not installed.
    """
    command = engine.command("config", model, limits, "--json", "--all")
    environ, stderr = _environment(), ""
    try:
        ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_CONFIG_SECONDS, check=False)
        stderr = ran.stderr
        found = json.loads(ran.stdout)
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"{engine.name}: `config` did not end within {_CONFIG_SECONDS} s") from None
    except (OSError, ValueError) as error:
        if stderr.startswith(_OWN_ERROR):
            raise BenchmarkError(f"{engine.name}: {stderr.removeprefix(_OWN_ERROR).strip()}") from None
        why = str(error) if isinstance(error, OSError) else _last_line(stderr)
        advice = "install djl-trtllm and the engine in one environment, and name its Python as in --engines vllm=PYTHON"
        raise BenchmarkError(f"{engine.name}: {engine.python} cannot run djl-trtllm: {why}; {advice}") from None
    if not found["served"]:
        raise BenchmarkError(f"{engine.name} ({engine.python}): {found['summary'][-1]}")
    return dict(found["options"])


def common_limits(resolved: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The smallest value of each limit that differs between engines, of those that every engine has."""
    values = {name: [options[name]["value"] for options in resolved] for name in LIMITS}
    return {name: min(found) for name, found in values.items() if None not in found and len(set(found)) > 1}


def differences(resolved: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The options that differ, by key: the value on each engine, or `no effect`."""
    rows: dict[str, list[str]] = {}
    for name, first in resolved[0].items():
        options = [each[name] for each in resolved]
        if name != "backend" and any(each["set"] or each["value"] != first["value"] for each in options):
            rows[first["key"]] = [_cell(each) for each in options]
    return {key: cells for key, cells in rows.items() if len(set(cells)) > 1}


def _cell(option: Mapping[str, Any]) -> str:
    if option["effect"].startswith("no effect"):
        return "no effect"
    value = option["value"]
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True)
class Server:
    """A server that is ready. `seconds` is how long its start took, `gpus_before` what the GPUs held before it."""

    process: psutil.Popen
    url: str
    seconds: float
    gpus_before: int

    def restarts(self) -> int:
        """How often the server has replaced its engine process."""
        return sum(int(float(count)) for count in _RESTARTS.findall(_get(f"{self.url}/metrics") or ""))

    def memory(self) -> dict[str, int | None]:
        """Bytes: of the server's processes, pages that they share counted once; of all GPUs since before the start."""
        total = 0
        for each in (self.process, *self.process.children(recursive=True)):
            with suppress(psutil.Error):
                total += each.memory_full_info().pss
        states = read_states()
        gpus = max(0, _used(states) - self.gpus_before) if states else None
        return {"memory_bytes": total, "gpu_memory_bytes": gpus}


@contextmanager
def serving(engine: Engine, model: str, limits: Mapping[str, object], log: Path) -> Iterator[Server]:
    """Run a server until the block ends; then none of its processes is left.

    `log` gets what it writes. Raises BenchmarkError with its last line if it ends before it is ready.
    """
    gpus_before, began = _used(read_states()), time.monotonic()
    command = engine.command("serve", model, limits, "--host", "127.0.0.1", "--port", "0")
    with log.open("wb") as output:
        # In a session of its own: Ctrl-C is for this command, which ends the server.
        process = psutil.Popen(
            command, env=_environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )

    def check(when: str) -> None:
        if process.poll() is not None:
            last = _last_line(log.read_text(errors="replace"))
            raise BenchmarkError(f"{engine.name}: the server ended {when} (status {process.returncode}): {last}")

    try:
        while not (found := _LISTENING.search(log.read_text(errors="replace"))) or _get(f"{found[1]}/ping") is None:
            check("while it started")
            time.sleep(_POLL_SECONDS)
        try:
            yield Server(process, found[1], time.monotonic() - began, gpus_before)
        finally:
            check("while it was measured")
    finally:
        end_group(process, _END_SECONDS)


def _used(states: Iterable[GpuState]) -> int:
    """The bytes that all processes use of GPUs."""
    return sum(state.total - state.free for state in states)


_HERE = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _get(url: str) -> str | None:
    """A page of a server; None where nobody answers, or with another status than 200."""
    with suppress(OSError, http.client.HTTPException), _HERE.open(url, timeout=10) as page:
        return str(page.read().decode(errors="replace"))
    return None


def _last_line(text: str) -> str:
    """The last line of a log without its time and place."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _LOG_TIME.sub("", lines[-1]) if lines else "it wrote nothing"
