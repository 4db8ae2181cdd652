"""Change one line of the package at a time and see whether the tests of its package notice.

    python -m tools.mutate                             a sample of 400 mutants of the whole package, with a table
    python -m tools.mutate batching config --sample 50 a sample of two packages together
    python -m tools.mutate service/lifecycle.py --all  every mutant of a module
    python -m tools.mutate --jobs 16 --within 9        as many as are tried in nine minutes

A package's own tests are those of `tests/PACKAGE/` that are not marked slow. They run once with the lines that each
test runs; then a mutant gets the tests that run its line, the fastest first, and if it survives them the others of the
same files that run its module: a fixture or a cache that they share has run the line in the first one only. A line that
runs at import, such as a row of a table or a field of a class, gets all tests of the package, those that run its module
first. The modules that stand in no package have `tests/test_*.py`; a mutant that survives those gets the tests that run
its line in each package that names the module. A mutant is killed when a test fails or takes too long. Tests that fail
without a mutant are named, and kill none. What survives is printed: a test is missing there, or the line is not needed,
or the mutant is equivalent. Equivalent mutants stand in `equivalent_mutants.yaml`, each with its reason. The sample
follows from --seed, and hypothesis' examples are the same for each mutant.

The tests run in a copy of the repository and in process and mount namespaces of their own (Linux, with util-linux),
where /opt is read-only, each mutant in a process forked from one that has the libraries loaded.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from threading import Lock

from rich.console import Console
from rich.table import Table

from tools.mutants import Mutant, equivalents, mutants_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "djl_trtllm"

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
"""A mutant may take this many times as long as its tests without it, and `_GRACE_SECONDS` more."""
_GRACE_SECONDS = 15.0
_LONGEST_SECONDS = 1200.0


class Sandbox:
    """A copy of the repository, and a process in it that runs tests."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in _COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__", ".venv*"))
        for file in ROOT.iterdir():
            if file.is_file():
                shutil.copy2(file, directory / file.name)
        self._writes = 0
        environ = {**os.environ, "PYTHONPATH": str(self.directory)}
        # Only the mutated module is to be compiled each time.
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        self._runner = subprocess.Popen(
            # As a module: as a script it would find this folder's `vllm` where a test imports vLLM.
            [*NAMESPACE, sys.executable, "-m", "tools.mutation_runner"],
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

    def passes(self, tests: list[str], seconds: float, report: Path | None = None) -> bool:
        """Return whether tests pass within a time; write the report of what they run."""
        assert self._runner.stdin is not None and self._runner.stdout is not None
        asked = {"tests": tests, "seconds": seconds, "report": None if report is None else str(report)}
        print(json.dumps(asked), file=self._runner.stdin, flush=True)
        answer = self._runner.stdout.readline()
        if not answer:
            raise RuntimeError("the process that runs the tests has ended")
        return answer.strip() == "0"

    def close(self) -> None:
        """End the process."""
        assert self._runner.stdin is not None and self._runner.stdout is not None
        self._runner.stdin.close()
        self._runner.wait()
        self._runner.stdout.close()


@contextmanager
def sandboxes(folder: Path, count: int) -> Iterator[Queue[Sandbox]]:
    """Make several copies of the repository below a folder, to take and to put back."""
    queue: Queue[Sandbox] = Queue()
    made: list[Sandbox] = []
    try:
        for number in range(count):
            made.append(Sandbox(folder / str(number)))
            queue.put(made[-1])
        yield queue
    finally:
        for sandbox in made:
            sandbox.close()


@contextmanager
def taken(pool: Queue[Sandbox]) -> Iterator[Sandbox]:
    """Take a sandbox and put it back."""
    sandbox = pool.get()
    try:
        yield sandbox
    finally:
        pool.put(sandbox)


def package_of(module: str) -> str:
    """Return the package of a module: `batching` for `batching/sequence.py`, "" for `request.py`."""
    return Path(module).parts[0] if "/" in module else ""


def tests_of(package: str) -> list[str]:
    """Return the paths of a package's own tests, below the repository."""
    if package:
        return [f"tests/{package}"] if (ROOT / "tests" / package).is_dir() else []
    return sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests").glob("test_*.py"))


def packages_that_name(module: str) -> list[str]:
    """Return the packages whose modules or tests name a module that stands in no package, such as `files.py`."""
    name = re.compile(rf"\b{PACKAGE}(?:\.| import .*\b){Path(module).stem}\b")
    folders = sorted(file.parent for file in (ROOT / PACKAGE).glob("*/__init__.py"))
    return [
        folder.name
        for folder in folders
        if any(
            name.search(file.read_text())
            for where in (folder, ROOT / "tests" / folder.name)
            for file in where.rglob("*.py")
        )
    ]


@dataclass
class Suite:
    """The tests of a package: the seconds that each takes, and for each module and line the tests that run it."""

    seconds: dict[str, float] = field(default_factory=dict)
    modules: dict[str, dict[int, list[str]]] = field(default_factory=dict)

    @classmethod
    def measured(cls, package: str, sandbox: Sandbox) -> Suite:
        """Run the tests of a package without a mutant. Those that fail are left out. Exits if they do not end."""
        tests = tests_of(package)
        if not tests:
            return cls()
        report = sandbox.directory / "report.json"
        sandbox.passes(tests, _LONGEST_SECONDS, report)
        if not report.exists():
            raise SystemExit(f"{' '.join(tests)} did not end")
        found = json.loads(report.read_text(encoding="utf-8"))
        report.unlink()
        names, failed = list(found["seconds"]), set(found["failed"])
        if failed:
            print(f"left out, as they fail without a change: {' '.join(sorted(failed))}", file=sys.stderr)
        modules = {
            module: {
                int(line): [names[number] for number in numbers if names[number] not in failed]
                for line, numbers in lines.items()
            }
            for module, lines in found["modules"].items()
        }
        return cls({test: seconds for test, seconds in found["seconds"].items() if test not in failed}, modules)

    def parts(self, module: str, line: int, *, imported: bool = False) -> list[dict[str, float]]:
        """Return the tests of a line with their seconds, in the order in which they are to run, in one or two parts.

        First those that run the line, the fastest first; then the others of their files that run its module.

        All tests of the package in one part, those of the module first, if no test runs the line or an import does
        (`imported`), which is in the first test only that needs the module. A test may read a table without running a
        line of its module, and a process that a test starts may run one.
        """
        near = {test for tests in self.modules.get(module, {}).values() for test in tests}
        running = {} if imported else self.running(module, line)
        if not running:
            return [dict(sorted(self.seconds.items(), key=lambda each: (each[0] not in near, each[1])))]
        files = {test.partition("::")[0] for test in running}
        beside = {test: self.seconds[test] for test in near - running.keys() if test.partition("::")[0] in files}
        return [running, dict(sorted(beside.items(), key=lambda each: each[1]))]

    def running(self, module: str, line: int) -> dict[str, float]:
        """Return the tests that run a line with their seconds, the fastest first."""
        tests = {test: self.seconds[test] for test in self.modules.get(module, {}).get(line, ())}
        return dict(sorted(tests.items(), key=lambda each: each[1]))


class Suites:
    """The suites of all packages, each measured when it is first asked for. Threads may ask."""

    def __init__(self, **measured: Suite) -> None:
        self._measured = measured
        self._locks: defaultdict[str, Lock] = defaultdict(Lock)

    def of(self, package: str, sandbox: Sandbox) -> Suite:
        """Return the suite of a package, measured in this sandbox if it is new."""
        with self._locks[package]:
            if package not in self._measured:
                self._measured[package] = Suite.measured(package, sandbox)
            return self._measured[package]

    def parts(self, name: str, mutant: Mutant, sandbox: Sandbox) -> Iterator[dict[str, float]]:
        """Yield the parts of the tests for a mutant (see `Suite.parts`), each when the one before has passed."""
        package = package_of(name)
        yield from self.of(package, sandbox).parts(name, mutant.line, imported=mutant.in_no_function)
        if not package and not mutant.in_no_function:
            # Those that are measured come first.
            for other in sorted(packages_that_name(name), key=lambda other: (other not in self._measured, other)):
                yield self.of(other, sandbox).running(name, mutant.line)


@dataclass
class Score:
    """The fates of the mutants of a package."""

    package: str
    tried: int = 0
    killed: int = 0
    equivalent: int = 0

    @property
    def percent(self) -> float:
        """The killed ones of those that are not equivalent."""
        counted = self.tried - self.equivalent
        return 100.0 * self.killed / counted if counted else 100.0

    def count(self, outcome: str | None) -> None:
        """Add the outcome of a mutant: see `fate`."""
        self.tried += outcome is not None
        self.killed += outcome == "killed"
        self.equivalent += outcome == "equivalent"


def modules(patterns: list[str]) -> list[str]:
    """Return the modules that patterns below the package mean; a package means all of its modules."""
    package = ROOT / PACKAGE
    found = []
    for pattern in patterns:
        named = package / pattern.removeprefix(f"{PACKAGE}/")
        files = named.rglob("*.py") if named.is_dir() else package.glob(str(named.relative_to(package)))
        some = sorted(str(file.relative_to(package)) for file in files)
        if not some:
            raise SystemExit(f"no module of {PACKAGE} is meant by {pattern}")
        found += [name for name in some if name not in found]
    return found


def chosen(names: list[str], sample: int | None, seed: int) -> list[tuple[str, Mutant]]:
    """Return mutants of modules, in a random order that follows from the seed; None: all of them."""
    found = [(name, mutant) for name in names for mutant in mutants_of((ROOT / PACKAGE / name).read_text())]
    random.Random(seed).shuffle(found)
    picked: list[tuple[str, Mutant]] = []
    for name, mutant in found:
        if sample is not None and len(picked) == sample:
            break
        if mutant.applied((ROOT / PACKAGE / name).read_text()) is not None:
            picked.append((name, mutant))
    return picked


def fate(name: str, mutant: Mutant, suites: Suites, pool: Queue[Sandbox], deadline: float = math.inf) -> str | None:
    """Return "equivalent"; "survived" if all tests of a mutant's line pass with it, else "killed".

    None after the deadline, a time of `time.monotonic`, at which the tests are ended.
    """
    if mutant.name in equivalents(name):
        return "equivalent"
    source = (ROOT / PACKAGE / name).read_text()
    changed = mutant.applied(source)
    if changed is None:
        return "survived"
    with taken(pool) as sandbox:
        if time.monotonic() >= deadline:
            return None
        for tests in suites.parts(name, mutant, sandbox):
            if time.monotonic() >= deadline:  # the next suite would be measured
                return None
            if not tests:
                continue
            seconds = min(_LONGEST_SECONDS, sum(tests.values()) * _PATIENCE + _GRACE_SECONDS)
            sandbox.write(name, changed)
            try:
                passed = sandbox.passes(list(tests), min(seconds, deadline - time.monotonic()))
            finally:
                sandbox.write(name, source)
            if not passed:
                return "killed" if time.monotonic() < deadline else None
    return "survived" if time.monotonic() < deadline else None


def table_of(scores: list[Score], title: str) -> Table:
    """Return the table of all packages and their sum."""
    table = Table("package", "mutants", "equivalent", "killed", "%", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for one in scores:
        if one is scores[-1]:
            table.add_section()
        table.add_row(one.package, str(one.tried), str(one.equivalent), str(one.killed), f"{one.percent:.1f}")
    return table


def commit() -> str:
    """Return the abbreviated commit of the checkout."""
    command = [shutil.which("git") or "git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    """Print what survived, and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="NAME", help="a package or module, such as batching/sequence.py")
    parser.add_argument("--sample", type=int, default=400, metavar="N", help="mutants in all (default: 400)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--all", action="store_true", help="all mutants")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="tests that run at once (default: 2)")
    parser.add_argument("--within", type=float, default=math.inf, metavar="MINUTES", help="count what is tried by then")
    parser.add_argument("--list", action="store_true", help="print the mutants and do not try them")
    parser.add_argument("--at-least", type=float, default=0.0, metavar="PERCENT", help="exit with 1 below this score")
    parser.add_argument("--each", type=float, default=0.0, metavar="PERCENT", help="exit with 1 if a package is below")
    arguments = parser.parse_args()
    deadline = time.monotonic() + 60 * arguments.within
    names = modules(arguments.modules or [""])
    console = Console()
    picked = chosen(names, None if arguments.all else arguments.sample, arguments.seed)
    if arguments.list:
        for name, mutant in picked:
            console.print(f"{name}:{mutant.line} [{mutant.name}]", markup=False, soft_wrap=True)
        return
    if shutil.which(NAMESPACE[0]) is None or subprocess.run([*NAMESPACE, "true"], check=False).returncode:
        raise SystemExit("mutants may end any process, and unshare can make no namespace for them here")
    scores = {package: Score(package or "(modules)") for package in sorted({package_of(name) for name in names})}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with (
        tempfile.TemporaryDirectory(prefix="mutate-") as scratch,
        ThreadPoolExecutor(arguments.jobs) as threads,
        # They end first, and with them what the threads wait for.
        sandboxes(Path(scratch), arguments.jobs) as pool,
    ):
        suites = Suites()
        outcomes = threads.map(lambda one: fate(one[0], one[1], suites, pool, deadline), picked)
        for (name, mutant), outcome in zip(picked, outcomes, strict=True):
            scores[package_of(name)].count(outcome)
            if outcome == "survived":
                console.print(f"survived: {name}:{mutant.line} [{mutant.name}]", markup=False, soft_wrap=True)
    total = Score("all", *(sum(getattr(one, what) for one in scores.values()) for what in _COUNTS))
    if total.tried < len(picked):
        console.print(f"{len(picked) - total.tried} of {len(picked)} mutants were not tried in time")
    where = f"{datetime.date.today()}, commit {commit()}, seed {arguments.seed}"
    console.print(table_of([*scores.values(), total], f"Mutants killed by each package's own tests ({where})"))
    if total.percent < arguments.at_least:
        raise SystemExit(f"{total.percent:.1f} % of the mutants were killed, wanted: {arguments.at_least:g} %")
    if low := [one.package for one in scores.values() if one.percent < arguments.each]:
        raise SystemExit(f"below {arguments.each:g} %: {', '.join(low)}")


_COUNTS = ("tried", "killed", "equivalent")

if __name__ == "__main__":
    main()
