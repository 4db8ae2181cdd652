"""Runs tests in a fork of itself, with the libraries loaded. Part of mutate.py.

Reads a JSON object a line: `tests` (pytest's arguments), `seconds`, and `report`, where a file is to be written with
what each test takes and which lines of the package it runs. Answers each with pytest's exit status, or `timeout`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

PACKAGE = "djl_trtllm"
_LIBRARIES = (
    "_pytest.assertion.rewrite",
    "anyio._backends._asyncio",
    "anyio.pytest_plugin",
    "asyncio",
    "coverage",
    "email.message",
    "httpx",
    "hypothesis",
    "jinja2.sandbox",
    "msgspec",
    "orjson",
    "prometheus_client",
    "psutil",
    "pydantic",
    "pytest",
    "pytest_timeout",
    "starlette.applications",
    "tokenizers",
    "uvicorn",
    "yaml",
)
_NOT_NEEDED = ("cacheprovider", "randomly", "xdist", "unraisableexception", "faulthandler")
_OPTIONS = ("-q", "-m", "not slow", "-W", "ignore", "--hypothesis-seed=0", *(f"-pno:{name}" for name in _NOT_NEEDED))


class Coverage:
    """A pytest plugin that notes which test runs which lines of the package, and how long it takes."""

    def __init__(self, report: str) -> None:
        import coverage

        self.report = Path(report)
        self.coverage = coverage.Coverage(data_file=None, include=[f"{Path.cwd()}/{PACKAGE}/*"], config_file=False)
        self.coverage.start()
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []

    def pytest_runtest_protocol(self, item: Any) -> None:
        """Give what runs from here on to this test."""
        self.coverage.switch_context(item.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add up the phases of a test."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write the report: tests with their seconds, and for each module and line the numbers of its tests."""
        self.coverage.stop()
        data = self.coverage.get_data()
        numbers = {test: number for number, test in enumerate(self.seconds)}
        modules = {}
        for file in data.measured_files():
            lines = data.contexts_by_lineno(file)
            modules[str(Path(file).relative_to(Path.cwd() / PACKAGE))] = {
                line: sorted(numbers[test] for test in tests if test in numbers) for line, tests in lines.items()
            }
        found = {"seconds": self.seconds, "failed": self.failed, "modules": modules}
        self.report.write_text(json.dumps(found), encoding="utf-8")


def run(tests: list[str], report: str | None) -> int:
    """Return pytest's exit status, in this process; without a report, the first failure ends it."""
    import pytest

    os.setsid()  # whatever the tests start can be ended with them
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    if report is None:
        return int(pytest.main([*_OPTIONS, "-x", *tests]))
    return int(pytest.main([*_OPTIONS, *tests], plugins=[Coverage(report)]))


def wait(pid: int, seconds: float) -> str:
    """Return how a child ended. It is ended after a time, and when nobody asks any more: standard input is closed."""
    asking = select.poll()
    asking.register(sys.stdin, 0)  # reports the end only
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            outcome = str(os.waitstatus_to_exitcode(status))
            break
        if time.monotonic() > deadline or asking.poll(10):
            outcome = "timeout"
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if outcome == "timeout":
        os.waitpid(pid, 0)
    return outcome


def main() -> None:
    """Answer lines until there are no more."""
    for library in _LIBRARIES:
        importlib.import_module(library)
    gc.freeze()  # collections in the forks leave out what is here
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if not pid:
            status = 3
            try:
                status = run(asked["tests"], asked.get("report"))
            finally:
                os._exit(status)
        print(wait(pid, asked["seconds"]), flush=True)


if __name__ == "__main__":
    main()
