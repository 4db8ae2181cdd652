"""What `.ci/run` makes of tests that fail: which have a second try, and which end the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tables import by_rows
from tools import run_tests

ROOT = Path(__file__).parents[2]

ALWAYS = "def test_{name}():\n    assert False\n"
ONCE = """
from pathlib import Path

def test_{name}():
    seen = Path(__file__ + ".{name}")
    first = not seen.exists()
    seen.touch()
    assert not first
"""
TWICE = """
from pathlib import Path

def test_below():
    seen = Path(__file__ + ".seen")
    assert not seen.exists()
    seen.touch()
"""
PASSES = "def test_{name}():\n    pass\n"
TEARDOWN = """
import pytest

@pytest.fixture
def left():
    yield
    assert False

def test_{name}(left):
    pass
"""
SHARED = "import sys\n\ndef test_{name}():\n    assert not hasattr(sys, 'left')\n    sys.left = True\n"
ENDS = "import os\n\ndef test_{name}():\n    os._exit(9)\n"


def run(folder: Path, *sources: str) -> subprocess.CompletedProcess[str]:
    """Run tests, one file for each source, as `.ci/run` runs those of the repository."""
    (folder / "scripts").mkdir()
    (folder / "tests" / "part").mkdir(parents=True)
    program = f'#!/bin/sh\nshift\nexec "{sys.executable}" -m pytest -p no:cacheprovider -p no:schemathesis "$@"\n'
    (folder / "scripts" / "test").write_text(program)
    (folder / "scripts" / "test").chmod(0o755)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:xdist\n")
    (folder / "tests" / "part" / "below").mkdir()
    for number, source in enumerate(sources):
        place = "below" if source is TWICE else "."
        (folder / "tests" / "part" / place / f"test_{number}.py").write_text(source.format(name=f"number_{number}"))
    command = [sys.executable, "-m", "tools.run_tests"]
    environ = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sources", "passes", "said"),
    [
        ([TWICE, ONCE], True, "test_number_1"),
        ([PASSES, TEARDOWN], False, "teardown"),
        ([SHARED, SHARED], False, "1 tests failed in the second try"),
        ([ENDS], False, "status"),
    ],
    ids=["below", "teardown", "shared", "crash"],
)
def test_a_failed_test_has_a_second_try_with_its_directory(
    sources: list[str], passes: bool, said: str, tmp_path: Path
) -> None:
    done = run(tmp_path, *sources)
    assert (done.returncode == 0) == passes, done.stdout + done.stderr
    assert said in done.stdout + done.stderr


def failed(*tests: str, directory: str = "tests/part") -> run_tests.Run:
    """A run of ten tests of which these failed."""
    return run_tests.Run(1, 10, tuple(run_tests.Outcome(test, directory, in_teardown=False) for test in tests))


PASSED = run_tests.Run(0, 10, ())


@by_rows(
    ("runs", "status", "said"),
    [
        ([PASSED], 0, ""),
        ([run_tests.Run(0, 0, ())], 1, "no test ran"),
        ([run_tests.Run(5, 0, ())], 5, "status 5"),
        ([failed("a", "b"), PASSED], 0, "a\n  b"),
        ([failed("a", "b", "c"), PASSED], 1, "more than 2"),
        ([failed("a"), failed("a")], 1, "1 tests failed in the second try"),
        ([failed(*"abcdef")], 1, "6 tests failed"),
        ([failed("a", directory="")], 1, "cannot be collected"),
    ],
)
def test_up_to_five_failed_tests_have_a_second_try_which_two_may_need(
    runs: list[run_tests.Run],
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    played = iter(runs)
    monkeypatch.setattr(run_tests, "run", lambda *_: next(played))
    assert run_tests.verdict([]) == status
    assert said in "".join(capsys.readouterr())
    assert list(played) == []
