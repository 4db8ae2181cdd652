"""uv, which is among the `test` extra's packages: building, resolving and installing in tests."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from uv import find_uv_bin

_NO_INDEX = re.compile(r"error sending request|Failed to fetch|dns error|Connection", re.IGNORECASE)


def uv(*arguments: str | Path, cwd: Path | None = None) -> str:
    """What a run of uv wrote to stdout. Without a package index the test is skipped; never in CI, which has one."""
    environ = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    environ.setdefault("UV_HTTP_TIMEOUT", "30")
    done = subprocess.run([find_uv_bin(), *arguments], cwd=cwd, env=environ, capture_output=True, text=True)
    if done.returncode != 0 and _NO_INDEX.search(done.stderr) and not os.environ.get("CI"):
        pytest.skip("no package index here")
    assert done.returncode == 0, done.stderr
    return done.stdout
