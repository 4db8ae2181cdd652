"""Change one line of a module at a time and see whether the module's own tests notice.

    python -m tools.mutate batching/sequence.py        a sample of the module's mutants
    python -m tools.mutate                             the same for every module of the core
    python -m tools.mutate --all service/lifecycle.py  all its mutants

The own tests of `djl_trtllm/x/y.py` are `tests/x/test_y.py` and `tests/x/test_y_*.py`, without those marked slow. A
mutant is killed when they fail or take too long. What survives is printed: a test is missing there, or the line is not
needed, or the mutant is equivalent. Equivalent mutants stand in `equivalent_mutants.yaml`, each with its reason.

The tests run in a copy of the repository and in process and mount namespaces of their own (Linux, with util-linux),
where /opt is read-only, each mutant in a process forked from one that has the libraries loaded.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from rich.console import Console
from rich.table import Table

from tools.mutants import Mutant, equivalents, mutants_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "djl_trtllm"
CORE = (
    "api/custom/formatters.py",
    "api/lmi/encoders.py",
    "api/guides.py",
    "api/lmi/parse.py",
    "api/lmi/parameters.py",
    "api/messages.py",
    "api/parameters.py",
    "batching/*.py",
    "config/resolve.py",
    "config/rules/*.py",
    "engines/cache.py",
    "engines/manifest.py",
    "executor/channel.py",
    "executor/client.py",
    "executor/process.py",
    "executor/step_buffer.py",
    "backends/openvino/prefix.py",
    "executor/protocol.py",
    "executor/reaping.py",
    "backends/scripted/executor.py",
    "model/archive.py",
    "server/*.py",
    "service/*.py",
)
"""Where a wrong line does the most harm; patterns below the package."""

NAMESPACE = ("unshare", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", """
if ! (mount --bind /opt /opt && mount -o remount,bind,ro /opt) 2>/dev/null
then echo 'mutants can write to /opt/ml here: remove what they leave' >&2
fi
exec "$@"
""", "sh")  # fmt: skip
"""What the tests run in. A mutant of what ends processes must find no others than its own, and one of what knows
SageMaker's directories must not fill those of this machine, where the tests of other modules would find a model."""

_COPIED = (PACKAGE, "tests", "serving", "docker", "docs", "benchmarks", "tools", "scripts")
_PATIENCE = 4.0
"""A mutant may take this many times as long as the tests of the unchanged module, and `_GRACE_SECONDS` more."""
_GRACE_SECONDS = 15.0


@dataclass
class Score:
    """What became of a module's mutants."""

    module: str
    tried: int = 0
    killed: int = 0
    equivalent: int = 0
    untested: bool = False

    @property
    def percent(self) -> float:
        """Killed of those that are not equivalent."""
        counted = self.tried - self.equivalent
        return 100.0 * self.killed / counted if counted else 100.0


class Sandbox:
    """A copy of the repository, and a process in it that runs a module's own tests."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in _COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__", ".venv*"))
        for file in ROOT.iterdir():
            if file.is_file():
                shutil.copy2(file, directory / file.name)
        self._writes = 0
        self._runner = self._start()

    def _start(self) -> subprocess.Popen[str]:
        environ = {**os.environ, "PYTHONPATH": str(self.directory)}
        # Only the mutated module is to be compiled each time.
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        return subprocess.Popen(
            [*NAMESPACE, sys.executable, str(Path(__file__).with_name("mutation_runner.py"))],
            cwd=self.directory,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def write(self, module: str, text: str) -> None:
        """Put a module's source in place. Python must not take it for the one that it has compiled before."""
        path = self.directory / PACKAGE / module
        path.write_text(text)
        self._writes += 1
        os.utime(path, (self._writes, self._writes))

    def passes(self, tests: list[str], seconds: float) -> bool:
        """Whether tests pass within a time."""
        assert self._runner.stdin is not None and self._runner.stdout is not None
        print(seconds, *tests, file=self._runner.stdin, flush=True)
        answer = self._runner.stdout.readline()
        if not answer:
            raise RuntimeError("the process that runs the tests has ended")
        return answer.strip() == "0"

    def close(self) -> None:
        assert self._runner.stdin is not None and self._runner.stdout is not None
        self._runner.stdin.close()
        self._runner.wait()
        self._runner.stdout.close()


@contextmanager
def sandboxes(count: int) -> Iterator[Queue[Sandbox]]:
    """Several copies of the repository, to take and to put back."""
    queue: Queue[Sandbox] = Queue()
    with tempfile.TemporaryDirectory(prefix="mutate-") as scratch:
        made = [Sandbox(Path(scratch) / str(number)) for number in range(count)]
        for sandbox in made:
            queue.put(sandbox)
        try:
            yield queue
        finally:
            for sandbox in made:
                sandbox.close()


def own_tests(module: str) -> list[str]:
    """The module's own test files, as paths below the repository."""
    path = Path(module)
    folder = ROOT / "tests" / path.parent
    files = [folder / f"test_{path.stem}.py", *folder.glob(f"test_{path.stem}_*.py")]
    # test_engine_x.py belongs to engine_x.py where there is one.
    longer = [other.stem for other in (ROOT / PACKAGE / path.parent).glob(f"{path.stem}_*.py")]
    return [
        str(file.relative_to(ROOT))
        for file in sorted(files)
        if file.is_file() and not any(f"{file.stem}_".startswith(f"test_{name}_") for name in longer)
    ]


def score(module: str, sample: int | None, pool: Queue[Sandbox], jobs: int, console: Console) -> Score:
    """Try a module's mutants."""
    source = (ROOT / PACKAGE / module).read_text()
    known = equivalents(module)
    chosen: list[Mutant] = list(mutants_of(source))
    if sample is not None and len(chosen) > sample:
        # The same sample every time, for every module another one.
        chosen = random.Random(zlib.crc32(module.encode())).sample(chosen, sample)
    result = Score(module, len(chosen))
    remaining = [mutant for mutant in chosen if mutant.name not in known]
    result.equivalent = len(chosen) - len(remaining)
    tests = own_tests(module)
    if not tests or not remaining:
        result.untested = not tests
        return result
    sandbox = pool.get()
    try:
        started = time.monotonic()
        if not sandbox.passes(tests, 600):
            raise SystemExit(f"{' '.join(tests)} fail without a change")
        seconds = (time.monotonic() - started) * _PATIENCE + _GRACE_SECONDS
    finally:
        pool.put(sandbox)

    def survives(mutant: Mutant) -> bool:
        sandbox = pool.get()
        try:
            sandbox.write(module, mutant.source)
            return sandbox.passes(tests, seconds)
        finally:
            sandbox.write(module, source)
            pool.put(sandbox)

    with ThreadPoolExecutor(jobs) as threads:
        for mutant, survived in zip(remaining, threads.map(survives, remaining), strict=True):
            if survived:
                console.print(f"survived: {module}:{mutant.line} [{mutant.name}]", markup=False, soft_wrap=True)
            else:
                result.killed += 1
    return result


def modules(patterns: list[str]) -> list[str]:
    """The modules that patterns below the package mean."""
    package = ROOT / PACKAGE
    found = [
        str(file.relative_to(package))
        for pattern in patterns
        for file in sorted(package.glob(pattern.removeprefix(f"{PACKAGE}/")))
        if file.name != "__init__.py"
    ]
    if not found:
        raise SystemExit(f"no module of {PACKAGE} is meant by {' '.join(patterns)}")
    return found


def main() -> None:
    """Print what survived, and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="such as batching/sequence.py; default: the core")
    parser.add_argument("--sample", type=int, default=20, metavar="N", help="mutants of each module (default: 20)")
    parser.add_argument("--all", action="store_true", help="all mutants of each module")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="tests that run at once (default: 2)")
    parser.add_argument("--list", action="store_true", help="print the mutants and do not try them")
    parser.add_argument("--at-least", type=float, default=0.0, metavar="PERCENT", help="exit with 1 below this score")
    arguments = parser.parse_args()
    names = modules(arguments.modules or list(CORE))
    console = Console()
    if arguments.list:
        for name in names:
            for mutant in mutants_of((ROOT / PACKAGE / name).read_text()):
                console.print(f"{name}:{mutant.line} [{mutant.name}]", markup=False, soft_wrap=True)
        return
    if shutil.which(NAMESPACE[0]) is None or subprocess.run([*NAMESPACE, "true"], check=False).returncode:
        raise SystemExit("mutants may end any process, and unshare can make no namespace for them here")
    with sandboxes(arguments.jobs) as pool:
        scores = [
            score(name, None if arguments.all else arguments.sample, pool, arguments.jobs, console) for name in names
        ]
    table = Table("module", "mutants", "equivalent", "killed", "%", title="Mutants killed by each module's own tests")
    for column in table.columns[1:]:
        column.justify = "right"
    total = Score("all", *(sum(getattr(one, what) for one in scores) for what in ("tried", "killed", "equivalent")))
    for one in [*scores, total]:
        if one is total:
            table.add_section()
        note = " (no tests of its own)" if one.untested else ""
        table.add_row(one.module + note, str(one.tried), str(one.equivalent), str(one.killed), f"{one.percent:.0f}")
    console.print(table)
    if total.percent < arguments.at_least:
        raise SystemExit(f"{total.percent:.1f} % of the mutants were killed, wanted: {arguments.at_least:g} %")


if __name__ == "__main__":
    main()
