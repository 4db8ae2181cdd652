"""`djl-trtllm cluster` on this machine."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.models import scripted_model
from tests.support.processes import survivors, wait_until
from tests.support.ray_cluster import needs_ray, variables
from tests.support.server import CLI, Reachable, environment, free_port

pytestmark = pytest.mark.slow

START_SECONDS = 240.0
_ATTEMPTS = 3
_SETTINGS = ("--replicas", "1", "--cpus", "0.5", "--host", "127.0.0.1", "-o", "max_rolling_batch_size=7")


class Commands:
    """`djl-trtllm cluster up` and what it says."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.reached = Reachable(free_port())
        self.environ = environment(folder / "cache", **variables(folder), RAY_TMPDIR=str(folder))
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = psutil.Popen(
                [sys.executable, *CLI, "cluster", "up", str(model), *_SETTINGS, "--port", str(self.reached.port)],
                env=self.environ,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def is_up(self) -> bool:
        """Wait until it is; whether it is not that a raylet had no time to start."""
        said = ""

        def decided() -> bool:
            nonlocal said
            said = self.log.read_text()
            return f"default runs at {self.reached.url}/" in said or self.process.poll() is not None

        wait_until(decided, START_SECONDS, "a cluster that is up")
        assert self.process.poll() is None or "error: Ray does not start on this machine" in said, said
        return self.process.poll() is None

    def close(self) -> None:
        """Kill it, if it still runs. AssertionError: a process of it is left."""
        self.reached.http.close()
        seen = self.process.children(recursive=True) if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        left = survivors(seen)
        for process in left:
            process.kill()
        assert not left


@contextmanager
def up(folder: Path) -> Iterator[Commands]:
    """A cluster of this machine, with a scripted model."""
    model = scripted_model(folder / "scripted")
    for _ in range(_ATTEMPTS):
        commands = Commands(model, folder)
        try:
            if commands.is_up():
                yield commands
                return
        finally:
            commands.close()
    pytest.fail(f"Ray has not started {_ATTEMPTS} times")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name, for sockets."""
    with tempfile.TemporaryDirectory(prefix="c", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield Path(name)


def test_up_serves_until_it_is_asked_to_end(folder: Path) -> None:
    needs_ray()
    with up(folder) as commands:
        assert commands.reached.generate(4).status_code == 200
        commands.process.terminate()
        assert commands.process.wait(START_SECONDS) == 0, commands.log.read_text()
