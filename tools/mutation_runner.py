"""Runs tests in a fork of itself, with the libraries loaded. Part of mutate.py.

Reads lines `SECONDS FILE...`; answers each with pytest's exit status, or `timeout`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import time

_LIBRARIES = (
    "_pytest.assertion.rewrite",
    "anyio._backends._asyncio",
    "anyio.pytest_plugin",
    "asyncio",
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
_OPTIONS = ("-x", "-q", "-m", "not slow", "-W", "ignore", *(f"-pno:{plugin}" for plugin in _NOT_NEEDED))


def run(files: list[str]) -> int:
    """pytest's exit status, in this process."""
    import pytest

    os.setsid()  # whatever the tests start can be ended with them
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    return int(pytest.main([*_OPTIONS, *files]))


def wait(pid: int, seconds: float) -> str:
    """How a child ended."""
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            outcome = str(os.waitstatus_to_exitcode(status))
            break
        if time.monotonic() > deadline:
            outcome = "timeout"
            break
        time.sleep(0.01)
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
        seconds, *files = line.split()
        pid = os.fork()
        if not pid:
            status = 3
            try:
                status = run(files)
            finally:
                os._exit(status)
        print(wait(pid, float(seconds)), flush=True)


if __name__ == "__main__":
    main()
