"""The scripts of the checkout."""

from __future__ import annotations

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
