"""Every command of every tutorial, run as it is written and in the order of the page.

A block of the language `sh` is typed into one terminal, which keeps its variables. One that is also called `terminal`
is a server's, in a terminal of its own: its log has to say what the text below it promises ("When the log says `...`")
before the next command. A `text` or `json` block that follows commands is their output; `...` stands for anything.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.processes import PATIENCE
from tests.support.sagemaker_front import sagemaker
from tests.support.server import CLI, START_SECONDS, environment, free_port
from tests.support.tables import by_table

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
HTTP = {8080: "SERVING_INFERENCE_PORT"}
DJL = {8080: "SERVING_PORT"}
TRITON = {
    **HTTP,
    8000: "SERVING_TRITON_HTTP_PORT",
    8001: "SERVING_TRITON_GRPC_PORT",
    8002: "SERVING_TRITON_METRICS_PORT",
}
"""The ports of a page, and the variables that change them."""
DJL_SERVING = os.environ.get("DJL_SERVING", "")
"""A checkout of DJL Serving: no registry has its front end."""


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
                server.wait(PATIENCE)
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


Read = Callable[..., None]


@pytest.fixture
def read(tmp_path: Path) -> Iterator[Read]:
    """`read(name, ports, **environ)`: do what a tutorial says, on ports that are free."""
    readers = []

    def read_one(name: str, variables_of: dict[int, str], **environ: str) -> None:
        ports = {port: free_port() for port in variables_of}
        variables = {variable: str(ports[port]) for port, variable in variables_of.items()}
        reader = Reader(make_clone(tmp_path / "clone"), environment(tmp_path, **variables, **environ), ports)
        readers.append(reader)
        reader.read((TUTORIALS / f"{name}.md").read_text())

    yield read_one
    for reader in readers:
        reader.stop()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "ports"), [("laptop", HTTP), ("triton", TRITON), ("truss", HTTP)])
def test_it_works_as_written(read: Read, name: str, ports: dict[int, str]) -> None:
    read(name, ports)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sagemaker_works_as_written(read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The account is moto's, and the endpoint a server that is started as SageMaker does."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with sagemaker(tmp_path / "instances") as aws:
        assert aws.role in (TUTORIALS / "sagemaker.md").read_text()
        read("sagemaker", HTTP, **aws.variables())


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not DJL_SERVING or not shutil.which("mvn"), reason="$DJL_SERVING names no checkout, or no Maven")
def test_djl_serving_works_as_written(read: Read, tmp_path: Path) -> None:
    (tmp_path / "djl-serving").symlink_to(Path(DJL_SERVING).resolve())
    read("djl-serving", DJL)


def test_every_tutorial_is_tried() -> None:
    tried = {"laptop", "triton", "truss", "sagemaker", "djl-serving"}
    assert {path.stem for path in TUTORIALS.glob("*.md")} == tried


def test_every_command_of_a_page_is_one_of_its_steps() -> None:
    for path in TUTORIALS.glob("*.md"):
        page = path.read_text()
        assert page.count("```sh") == len(steps(page)) > 3, path


@by_table("shown", "output", "same")
def test_an_output_is_compared_with_what_the_page_shows(shown: str, output: str, same: bool) -> None:
    assert prints(shown, output) is same
