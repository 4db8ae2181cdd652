"""Machines that share an engine cache in S3, each a process, of which one is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.engines.cache_entries import KEY
from tests.engines.helpers import wait_until
from tests.support.moto_server import keys, moto_server
from tests.support.s3_server import variables

pytestmark = pytest.mark.slow


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with moto_server() as url:
        for name, value in variables(url).items():
            monkeypatch.setenv(name, value)
        yield url


@contextmanager
def started(what: str, root: Path, name: str, lease_seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    script = Path(__file__).with_name("fleet_process.py")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, str(script), what, str(root), name, str(lease_seconds)], env=environment
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_several_machines_compile_once(aws: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        # So long that no machine's pause makes it lose the lease.
        processes = [stack.enter_context(started("race", tmp_path, f"machine-{n}", 600.0)) for n in range(3)]
        wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 3)
        (tmp_path / "go").touch()
        assert [process.wait(300) for process in processes] == [0] * 3
    assert len(list(tmp_path.glob("built-by-*"))) == 1
    assert len(list(tmp_path.glob("served-by-*"))) == 3


def test_a_killed_builder_is_succeeded_and_leaves_no_entry(aws: str, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    with started("half", tmp_path, "killed", 3.0):
        wait_until((tmp_path / "built-by-killed").exists)
    assert f"engines/{KEY}.json" not in keys(aws)
    with started("race", tmp_path, "next", 3.0) as following:
        assert following.wait(300) == 0
    assert (tmp_path / "built-by-next").exists() and (tmp_path / "served-by-next").exists()
