"""The commands of a tutorial, run in their order as somebody would who reads it.

A block of the language `sh` is typed into one terminal, which keeps its variables. One that is also called `terminal`
is a server's, in a terminal of its own: its log has to say what the text below it promises ("When the log says `...`")
before the next command. A `text` or `json` block that follows commands is their output; `...` stands for anything.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.server import CLI, START_SECONDS

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_PROMISE = re.compile(r"When the log\s+says `([^`]+)`")
_END = "-- the end of these commands --"


@dataclass(frozen=True)
class Step:
    """Commands, and what they print (None: anything), or the line of a server's log that is waited for."""

    commands: str
    output: str | None = None
    promise: str | None = None

    @property
    def of_server(self) -> bool:
        return self.promise is not None


def steps(page: str) -> list[Step]:
    """What the page has one do."""
    found = []
    fences = list(_FENCE.finditer(page))
    for fence, following in zip(fences, [*fences[1:], None], strict=True):
        rest = page[fence.end() : following.start() if following else len(page)]
        if fence["kind"] == "sh terminal":
            promise = _PROMISE.search(rest)
            assert promise is not None, f"the text after {fence['text']!r} does not say when the server is ready"
            found.append(Step(fence["text"], promise=promise[1]))
        elif fence["kind"] == "sh":
            is_output = following is not None and following["kind"] in ("text", "json") and not rest.strip()
            found.append(Step(fence["text"], following["text"] if following and is_output else None))
    return found


def prints(shown: str, output: str) -> bool:
    """Whether an output is what the page shows."""
    pattern = ".*".join(re.escape(part) for part in shown.strip().split("..."))
    return re.fullmatch(pattern, output.strip(), re.DOTALL) is not None


def make_clone(folder: Path) -> Path:
    """A clone of the repository where `scripts/serve` has been run: `djl-trtllm` is the one under test."""
    folder.mkdir()
    (ROOT / ".djl").mkdir(exist_ok=True)  # where scripts/djl-serving builds, once
    for name in (".djl", "docker", "pyproject.toml", "scripts", "serving", "uv.lock"):
        (folder / name).symlink_to(ROOT / name)
    environment = folder / ".venv-serve"
    programs = environment / "bin"
    programs.mkdir(parents=True)
    extras = re.findall(r"make_environment .* (\S+)", (ROOT / "scripts" / "serve").read_text())
    asked_for = [(ROOT / name).read_text() for name in ("pyproject.toml", "uv.lock")] + [f"{extras[0]}\n"]
    (environment / ".complete").write_text("".join(asked_for))
    (programs / "activate").write_text(f'PATH="{programs}:$PATH"\n')
    for name, arguments in {"djl-trtllm": CLI, "python": (), "python3": ()}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {" ".join(arguments)} "$@"\n')
        (programs / name).chmod(0o755)
    return folder


class Reader:
    """Somebody who does what the pages say, in a clone. `ports` are those that stand in for the pages' own."""

    def __init__(self, clone: Path, environ: Mapping[str, str], ports: Mapping[int, int]) -> None:
        self._clone = clone
        self._environ = {**environ, "PYTHONPATH": str(ROOT)}
        self._ports = ports
        self._server: subprocess.Popen[bytes] | None = None
        self._log = clone.parent / "server.log"
        self._errors = clone.parent / "terminal.log"

    def read(self, page: str) -> None:
        """Do all steps."""
        with self._terminal() as terminal:
            for step in steps(page):
                if step.of_server:
                    self.stop()
                    self._start(step)
                else:
                    self._type(terminal, step)
        self.stop()

    def stop(self) -> None:
        """Ctrl-C in the server's terminal."""
        server, self._server = self._server, None
        if server is not None:
            os.killpg(server.pid, signal.SIGINT)
            try:
                server.wait(60)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(server.pid, signal.SIGKILL)

    @contextmanager
    def _terminal(self) -> Iterator[subprocess.Popen[str]]:
        with (
            self._errors.open("w") as errors,
            subprocess.Popen(
                ["bash", "-eo", "pipefail"],
                cwd=self._clone,
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as terminal,
        ):
            try:
                yield terminal
            finally:
                terminal.kill()

    def _type(self, terminal: subprocess.Popen[str], step: Step) -> None:
        assert terminal.stdin is not None and terminal.stdout is not None
        terminal.stdin.write(f"{self._here(step.commands)}\necho; echo '{_END}'\n")
        terminal.stdin.flush()
        lines = []
        for line in terminal.stdout:
            if line == f"{_END}\n":
                break
            lines.append(line)
        else:
            raise AssertionError(f"{step.commands}failed: {''.join(lines)}{self._errors.read_text()}")
        output = "".join(lines)
        assert step.output is None or prints(step.output, output), f"{step.commands}printed: {output}"

    def _start(self, step: Step) -> None:
        assert step.promise is not None
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                ["bash", "-ec", self._here(step.commands)],
                cwd=self._clone,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        server = self._server
        deadline = time.monotonic() + START_SECONDS
        while step.promise not in self._log.read_text(errors="replace"):
            assert server.poll() is None and time.monotonic() < deadline, self._log.read_text(errors="replace")
            time.sleep(0.1)

    def _here(self, commands: str) -> str:
        """The commands with the ports that are free here."""
        for port, free in self._ports.items():
            commands = commands.replace(f"localhost:{port}", f"localhost:{free}")
        return commands
