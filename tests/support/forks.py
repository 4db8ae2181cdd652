"""Tests in several processes that share one collection: `pytest -p tests.support.forks --processes 4`.

Each process of pytest-xdist collects all tests, which is half a minute of processor time. Here the tests are collected
once, and the processes are forks of the one that has done it. A file is run by one of them, as a whole, because its
tests share fixtures; a process that is done with a file takes the next one. A fork has no threads but one: a library
that starts threads when it is imported, and needs them, is imported by tests and not by their modules.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import multiprocessing
import os
import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import pytest
from _pytest import runner
from _pytest.config import create_terminal_writer
from _pytest.terminal import TerminalReporter

_END_SECONDS = 60
"""How long the processes may take to end what their tests have started, when a run is interrupted."""
_CRASHED = pytest.StashKey[bool]()
_FORKS = multiprocessing.get_context("fork")


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many processes there are; without the option pytest runs the tests itself."""
    parser.addoption("--processes", type=int, default=0, help="run the tests in this many forks of the process")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run all tests in forks; their reports become those of this process."""
    options = session.config.option
    if not options.processes or options.collectonly or session.testsfailed:
        return None
    threads, most = len(os.listdir("/proc/self/task")), os.cpu_count() or 1
    if threads > most:  # numpy has one for each processor, and starts them anew in forks
        raise pytest.UsageError(
            f"{threads} threads after the collection, expected {most}: what starts them at its import?"
        )
    files = [list(items) for _, items in itertools.groupby(session.items, key=lambda item: item.path)]
    queue = _Queue(len(files))
    factory: Any = session.config._tmp_path_factory  # type: ignore[attr-defined]
    factory.getbasetemp()
    gc.freeze()  # collections of garbage in the forks leave out what is here, as does copying on write
    forks = [_Fork.of(number, session, files, queue) for number in range(options.processes)]
    queue.close()
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    reporter.showfspath = False  # the reports of files are mixed
    try:
        _listen(session, forks, reporter)
    finally:
        _end(forks)
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process that crashed ends the run with status 2, as an interrupt does: its tests were not run.

    The status of tests that failed would be wrong: `.ci/run` runs those again.
    """
    if session.config.stash.get(_CRASHED, False):
        session.exitstatus = pytest.ExitCode.INTERRUPTED


class _Queue:
    """The numbers of the files that no process has taken yet, in a pipe."""

    _BYTES = 4

    def __init__(self, count: int) -> None:
        self._read, write = os.pipe()
        os.write(write, b"".join(number.to_bytes(self._BYTES, "big") for number in range(count)))
        os.close(write)

    def __iter__(self) -> Iterator[int]:
        while taken := os.read(self._read, self._BYTES):
            yield int.from_bytes(taken, "big")

    def close(self) -> None:
        os.close(self._read)


@dataclass
class _Fork:
    """A process that runs tests, and what it says: reports, warnings, and at last None."""

    process: ForkProcess
    said: Connection
    test: str = ""
    """The last one that has begun."""
    done: bool = False

    @classmethod
    def of(cls, number: int, session: pytest.Session, files: list[list[pytest.Item]], queue: _Queue) -> _Fork:
        said, says = _FORKS.Pipe(duplex=False)
        process = _FORKS.Process(target=_run, args=(number, session, files, queue, says))
        process.start()
        says.close()
        return cls(process, said)

    def messages(self) -> Iterator[Any]:
        """What has come until now. Processes that its tests have left may hold its pipe open when it has ended."""
        with contextlib.suppress(EOFError):
            while self.said.poll():
                yield self.said.recv()


# -- in the process that has collected the tests -----------------------------------------------------------------------


def _listen(session: pytest.Session, forks: list[_Fork], reporter: TerminalReporter) -> None:
    """Hand on what the forks say, until all have ended."""
    running = list(forks)
    while running:
        wait([each for fork in running for each in (fork.said, fork.process.sentinel)])
        for fork in list(running):
            ended = not fork.process.is_alive()
            for message in fork.messages():
                _hand_on(session, fork, message)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if fork.done or ended:
                running.remove(fork)
            if ended and not fork.done:
                session.config.stash[_CRASHED] = True
                reporter.write_line(f"a test process crashed (status {fork.process.exitcode}) in {fork.test}", red=True)


def _hand_on(session: pytest.Session, fork: _Fork, message: Any) -> None:
    hook = session.config.hook
    match message:
        case None:
            fork.done = True
        case ("begins", test):
            fork.test = test
        case ("warns", text, category, file, line, when, test):
            warning = warnings.WarningMessage(f"{category}: {text}", UserWarning, file, line)
            hook.pytest_warning_recorded.call_historic(
                kwargs={"warning_message": warning, "when": when, "nodeid": test, "location": None}
            )
        case data:
            report = hook.pytest_report_from_serializable(config=session.config, data=data)
            hook.pytest_runtest_logreport(report=report)
            if report.when == "teardown":
                hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)


def _end(forks: list[_Fork]) -> None:
    """End the forks of a run that is interrupted, with what their tests have started. The others have ended."""
    for fork in forks:
        if not fork.done and fork.process.pid is not None and fork.process.is_alive():
            os.kill(fork.process.pid, signal.SIGINT)
    for fork in forks:
        fork.process.join(_END_SECONDS)
        fork.process.kill()
        fork.process.join()


# -- in a fork ---------------------------------------------------------------------------------------------------------


class _Sender:
    """A plugin that sends what becomes of tests."""

    def __init__(self, config: pytest.Config, says: Connection) -> None:
        self._config = config
        self._says = says

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._says.send(("begins", nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._says.send(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str) -> None:
        if when == "runtest":  # those of the collection are known already
            warned = warning_message
            place = warned.filename, warned.lineno, when, nodeid
            self._says.send(("warns", str(warned.message), warned.category.__name__, *place))


def _run(number: int, session: pytest.Session, files: list[list[pytest.Item]], queue: _Queue, says: Connection) -> None:
    """Run files until none is left."""
    config = session.config
    # The name that pytest-xdist gives a process: tests.support.server has ports for each.
    os.environ |= {"PYTEST_XDIST_WORKER": f"gw{number}", "PYTEST_XDIST_WORKER_COUNT": str(config.option.processes)}
    plugins, factory = config.pluginmanager, config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"gw{number}"
    factory._basetemp.mkdir()
    # Output that is captured is in files that a fork would share.
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    plugins.getplugin("terminalreporter")._tw = create_terminal_writer(config, io.StringIO())
    plugins.register(_Sender(config, says))
    try:
        items = (item for file in queue for item in files[file])
        item = next(items, None)
        while item is not None and not session.shouldfail:
            following = next(items, None)
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        says.send(None)
    except KeyboardInterrupt:
        says.send(None)
    finally:
        runner.pytest_sessionfinish(session)
