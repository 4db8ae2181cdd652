"""Run all tests as `.ci/run` does, and the directories of a few failed ones once more.

    python -m tools.run_tests [OPTION ...]    options go to pytest

Real servers share the machine with other tests, and a deadline of theirs may pass on a slow one. So up to five failed
tests run again, each with all tests of its own directory (not of those below it) and in the same random order: what
fails because of a test before it fails again. Who fails twice fails. At most two tests may need their second try, and
each is printed.

A second try is not for these: tests that cannot be collected, an error of a teardown, which is where leaked processes
are found, a crashed test process, an interrupt, and a run without tests. They fail at once.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

TESTS_FAILED = 1
"""pytest's status of a run whose tests were all run, and of which some failed."""
_MOST_AGAIN = 5
_MOST_PASSED_AGAIN = 2
_FIRST_SECONDS, _AGAIN_SECONDS = 4200, 1800
_END_SECONDS = 60
_SLOWEST = 25
"""Tests whose times are printed."""


@dataclass(frozen=True)
class Outcome:
    """A test that did not pass. `directory` is relative to the repository, and empty where nothing was collected."""

    test: str
    directory: str
    in_teardown: bool


@dataclass(frozen=True)
class Run:
    """A run of pytest: its status, how many tests ran, and those that did not pass."""

    status: int
    tests: int
    failed: tuple[Outcome, ...]


def outcomes(report: Path) -> Iterator[Outcome]:
    """Read the tests that did not pass from a JUnit report. A test whose teardown failed too is there twice."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):  # noqa: S314  # pytest has just written it
        file = case.attrib.get("file", "")
        # An interrupted run ends with a case that has no name.
        directory, test = file.rpartition("/")[0], f"{file}::{case.attrib.get('name', '')}"
        for problem in (*case.findall("failure"), *case.findall("error")):
            yield Outcome(test, directory, problem.attrib.get("message", "").startswith("failed on teardown"))


def run(arguments: Sequence[str], seconds: float) -> Run:
    """Run `scripts/test --all`. After `seconds` it is interrupted, and still prints the failures it has seen."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = (f"--junitxml={report}", "-o", "junit_family=xunit1", f"--durations={_SLOWEST}")
        process = subprocess.Popen([Path("scripts/test").absolute(), "--all", *arguments, *options])
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        status = process.wait()
        if not report.exists():
            return Run(status, 0, ())
        suites = ElementTree.parse(report).getroot().iter("testsuite")  # noqa: S314
        tests = sum(int(suite.attrib["tests"]) - int(suite.attrib["skipped"]) for suite in suites)
        return Run(status, tests, tuple(outcomes(report)))


def verdict(arguments: Sequence[str]) -> int:
    """Run the tests, and the directories of failed ones again; returns the status of both together."""
    seed = f"--randomly-seed={random.randrange(2**32)}"  # noqa: S311
    first = run([seed, *arguments], _FIRST_SECONDS)
    if first.status == 0:
        return 0 if first.tests else _refused("no test ran")
    failed = {outcome.test for outcome in first.failed}
    if first.status != TESTS_FAILED:
        return _refused(f"pytest ended with status {first.status}", first.status)
    if not all(outcome.directory for outcome in first.failed):
        return _refused("the tests cannot be collected")
    if torn := [outcome.test for outcome in first.failed if outcome.in_teardown]:
        return _refused(f"errors of teardowns and leaks have no second try: {', '.join(torn)}")
    if not 1 <= len(failed) <= _MOST_AGAIN:
        return _refused(f"{len(failed)} tests failed; up to {_MOST_AGAIN} have a second try")
    directories = sorted({outcome.directory for outcome in first.failed})
    print(f"{len(failed)} tests failed beside others; again with all of {', '.join(directories)}", flush=True)
    files = [str(file) for directory in directories for file in sorted(Path(directory).glob("test_*.py"))]
    again = run([seed, *files], _AGAIN_SECONDS)
    if again.status != 0:
        return _refused(f"{len(again.failed)} tests failed in the second try", again.status)
    print(f"{len(failed)} tests passed in their second try only:", *sorted(failed), sep="\n  ", flush=True)
    return 0 if len(failed) <= _MOST_PASSED_AGAIN else _refused(f"more than {_MOST_PASSED_AGAIN} needed a second try")


def _refused(reason: str, status: int = 1) -> int:
    print(f"tests: {reason}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(verdict(sys.argv[1:]))
