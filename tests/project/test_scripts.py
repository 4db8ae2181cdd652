"""The scripts of the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    [
        *(path for path in ROOT.glob("scripts/*") if path.suffix != ".py"),
        ROOT / ".ci" / "run",
        ROOT / "docker" / "verify",
    ]
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, "--external-sources", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("uv", "message"),
    [
        ("exit 1", "uv.lock is not what pyproject.toml asks for, or uv failed: run scripts/lock"),
        ("echo $1", "docker/requirements-core.txt is not what uv.lock has: run scripts/lock"),
        ("[ $1 = lock ] || echo locked", ""),
    ],
)
def test_a_lock_that_is_not_up_to_date_says_what_to_run(uv: str, message: str, tmp_path: Path) -> None:
    for folder in ("scripts", "docker", "bin"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "scripts" / "lock", tmp_path / "scripts")
    for image in ("core", "cpu"):
        (tmp_path / "docker" / f"requirements-{image}.txt").write_text("locked\n")
    program = tmp_path / "bin" / "uv"
    program.write_text(f"#!/bin/sh\n{uv}\n")
    program.chmod(0o755)
    path = f"{program.parent}:/usr/bin:/bin"
    done = subprocess.run(
        [tmp_path / "scripts" / "lock", "--check"], env={"PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == bool(message)
    assert done.stderr.endswith(f"{message}\n" if message else "")
    assert done.stderr.count("run scripts/lock") == bool(message)


# -- .ci/run -----------------------------------------------------------------------------------------------------------

TESTS = """#!/bin/sh
echo "$@" >>calls
case $1 in
--all) if [ -n "$FAILED" ]; then mkdir -p .pytest_cache/v/cache; echo "$FAILED" >.pytest_cache/v/cache/lastfailed; fi
    exit "$FIRST" ;;
--version) ;;
*) exit "$AGAIN" ;;
esac
"""
AGAIN = "tests --last-failed"


def write_ci(folder: Path, **programs: str) -> None:
    """`.ci/run` in a folder, with `programs` in the place of those that it runs; the others do nothing."""
    programs = dict.fromkeys(("ruff", "mypy", "lint-imports"), "#!/bin/sh\n") | programs
    programs["python"] = f'#!/bin/sh\n[ "$1" = -m ] || exec "{sys.executable}" "$@"\n'
    scripts = {f".venv-test/bin/{name}": text for name, text in programs.items()} | {"scripts/test": TESTS}
    for name, text in scripts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci")


@pytest.mark.parametrize(
    ("first", "failed", "again", "status", "calls"),
    [
        (0, 0, 0, 0, ["--all -k some"]),
        (1, 1, 0, 0, ["--all -k some", AGAIN]),
        (1, 5, 0, 0, ["--all -k some", AGAIN]),
        (1, 5, 1, 1, ["--all -k some", AGAIN]),
        (1, 6, 0, 1, ["--all -k some"]),
        (1, 0, 0, 1, ["--all -k some"]),
        (2, 1, 0, 2, ["--all -k some"]),
        (3, 1, 0, 3, ["--all -k some"]),
    ],
)
def test_ci_runs_a_few_failed_tests_again_alone(
    first: int, failed: int, again: int, status: int, calls: list[str], tmp_path: Path
) -> None:
    write_ci(tmp_path)
    earlier = tmp_path / ".pytest_cache" / "v" / "cache"
    earlier.mkdir(parents=True)
    (earlier / "lastfailed").write_text('{"of an earlier run": true}')
    found = json.dumps({str(number): True for number in range(failed)}) if failed else ""
    environ = {**os.environ, "FIRST": str(first), "FAILED": found, "AGAIN": str(again)}
    done = subprocess.run([tmp_path / ".ci" / "run", "-k", "some"], env=environ, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert (tmp_path / "calls").read_text().splitlines() == ["--version", *calls]


@pytest.mark.parametrize("failing", ["ruff", "mypy", "lint-imports"])
def test_ci_runs_no_test_of_what_fails_a_check(failing: str, tmp_path: Path) -> None:
    write_ci(tmp_path, **{failing: "#!/bin/sh\nexit 7\n"})
    done = subprocess.run([tmp_path / ".ci" / "run"], capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    assert (tmp_path / "calls").read_text().splitlines() == ["--version"]


@pytest.mark.parametrize(("end", "status"), [("assert False", 1), ("os._exit(9)", 2)])
def test_a_test_process_that_crashed_is_no_failed_test(end: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_one.py").write_text(f"import os\ndef test_it():\n    {end}\n")
    options = ("-n", "2", "--max-worker-restart=0", "-p", "tests.support.crashed_workers", "-p", "no:randomly")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stdout
    assert "1 failed" in done.stdout
