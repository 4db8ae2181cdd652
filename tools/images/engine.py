"""Docker or podman: what builds images and runs containers. Both take the same commands."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# An instruction is executed if it is more than a remark of the image's.
_PODMAN_STEP = re.compile(r"^(?:\[\d+/\d+\] )?STEP \d+/\d+: (\S+)", re.MULTILINE)
_DOCKER_STEP = re.compile(r"^#(\d+) \[[^\]]*\d+/\d+\] (?!FROM)", re.MULTILINE)
_PODMAN_CACHED = re.compile(r"^--> Using cache", re.MULTILINE)
_DOCKER_CACHED = re.compile(r"^#(\d+) CACHED", re.MULTILINE)


class EngineError(Exception):
    """A command of the engine failed, or there is none."""


@dataclass(frozen=True)
class Built:
    """What a build took. Steps are those that the engine caches, on Docker only those that change files."""

    seconds: float
    steps: int
    cached: int
    output: str


@dataclass(frozen=True)
class Container:
    """A container that was started."""

    engine: Engine
    name: str

    def log(self) -> str:
        """The container's output, on stdout and stderr."""
        done = self.engine.run("logs", self.name, check=False)
        return done.stdout + done.stderr

    def running(self) -> bool:
        """Whether the container's process has not ended."""
        return self._state("Running") == "true"

    def status(self) -> int:
        """Exit status of its process."""
        return int(self._state("ExitCode"))

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in it, to its end."""
        return self.engine.run("exec", self.name, *command, check=False)

    def _state(self, name: str) -> str:
        return self.engine.run("inspect", "--format", f"{{{{.State.{name}}}}}", self.name).stdout.strip()


@dataclass(frozen=True)
class Engine:
    """A command line, with options for its `build` and `run`."""

    command: tuple[str, ...]
    options: tuple[str, ...] = field(default=())
    build_options: tuple[str, ...] = field(default=())

    def run(
        self, *arguments: str, check: bool = True, stdin: Any = subprocess.DEVNULL
    ) -> subprocess.CompletedProcess[str]:
        """A command to its end. EngineError if it failed and `check` is true."""
        done = subprocess.run([*self.command, *arguments], stdin=stdin, capture_output=True, text=True, check=False)
        if check and done.returncode != 0:
            raise EngineError(f"{' '.join([*self.command, *arguments])}: {done.stderr.strip()[-2000:]}")
        return done

    def has(self, image: str) -> bool:
        """Whether an image is there, without asking a registry."""
        return self.run("image", "inspect", image, check=False).returncode == 0

    def build(self, dockerfile: Path, tag: str, context: Path, *options: str) -> Built:
        """Build an image."""
        command = [*self.command, "build", *self.build_options, *options]
        command += ["--file", str(dockerfile), "--tag", tag, str(context)]
        began = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        seconds = time.monotonic() - began
        if done.returncode != 0:
            raise EngineError(f"{' '.join(command)}:\n{done.stdout[-6000:]}")
        return Built(seconds, *count_steps(done.stdout), done.stdout)

    def inspect(self, image: str) -> dict[str, Any]:
        """The engine's description of an image."""
        (found,) = json.loads(self.run("image", "inspect", image).stdout)
        described: dict[str, Any] = found
        return described

    def files(self, image: str) -> dict[str, int]:
        """Size of each file in an image, by path."""
        listed = self.run(
            *("run", "--rm", "--user", "0", "--network", "none", "--entrypoint", "/usr/bin/find", *self.options, image),
            *("/", "-xdev", "-type", "f", "-printf", r"%s %p\n"),
        ).stdout
        return {path: int(size) for size, _, path in (line.partition(" ") for line in listed.splitlines())}

    @contextlib.contextmanager
    def started(self, image: str, *command: str, options: Sequence[str] = ()) -> Iterator[Container]:
        """A container in the background, which is removed when the block ends."""
        name = self.run("run", "--detach", *self.options, *options, image, *command).stdout.split()[-1]
        try:
            yield Container(self, name)
        finally:
            self.run("rm", "--force", name, check=False)


def count_steps(output: str) -> tuple[int, int]:
    """Count the steps in a build's output that can be cached, and those that were."""
    podman = [name for name in _PODMAN_STEP.findall(output) if name != "FROM"]
    if podman:
        return len(podman), len(_PODMAN_CACHED.findall(output))
    docker = set(_DOCKER_STEP.findall(output))
    return len(docker), len(docker.intersection(_DOCKER_CACHED.findall(output)))


def find_engine() -> Engine:
    """Docker, or podman where there is no Docker engine. EngineError: there is neither."""
    docker = shutil.which("docker")
    if docker and subprocess.run([docker, "info"], capture_output=True, check=False).returncode == 0:
        return Engine((docker,), build_options=("--progress=plain",))
    return find_podman()


def find_podman(store: Path | None = None) -> Engine:
    """Podman, with images in a folder of their own if `store` is given. EngineError: there is none."""
    podman = shutil.which("podman")
    if podman is None:
        raise EngineError("neither a Docker engine nor podman was found: install one of them")
    command = [podman]
    if store is not None:
        command += ["--root", str(store / "images"), "--runroot", str(store / "run")]
    # Debian's crun refuses machines with both versions of cgroups, and runc does not.
    if runc := shutil.which("runc"):
        command += ["--runtime", runc]
    # Podman's own limits may be above those of this machine, which only a privileged process can raise.
    options = (f"--ulimit=nofile={_limit(resource.RLIMIT_NOFILE)}", f"--ulimit=nproc={_limit(resource.RLIMIT_NPROC)}")
    # Docker's image format, because the other one has no HEALTHCHECK.
    return Engine(tuple(command), options, ("--format=docker", "--layers", *options))


def _limit(kind: int) -> int:
    hard = resource.getrlimit(kind)[1]
    return 1 << 15 if hard == resource.RLIM_INFINITY else min(hard, 1 << 15)
