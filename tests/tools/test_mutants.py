"""The mutants of a source, and what is kept of those that change nothing."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import cast

import pytest

from tests.support.processes import wait_until
from tests.support.tables import by_rows, by_table
from tools.mutants import EQUIVALENTS, equivalents, mutants_of
from tools.mutate import (
    NAMESPACE,
    PACKAGE,
    ROOT,
    Sandbox,
    Score,
    Suite,
    Suites,
    chosen,
    fate,
    modules,
    package_of,
    packages_that_name,
)


def changes(source: str) -> set[str]:
    """The lines that the mutants of a source have in place of its last line."""
    before = source.splitlines()
    return {
        line.strip()
        for mutant in mutants_of(source)
        for line in (mutant.applied(source) or "").splitlines()
        if line not in before
    }


@by_rows(
    ("line", "mutants"),
    [
        ("if a < b: c()", {"if a <= b: c()", "if a < 1: c()", "if not (a < b): c()", "if a < b: pass"}),
        ("x = a and b", {"x = a or b"}),
        ("x = a and b and c", {"x = True and b and c", "x = a and True and c", "x = a and b and True"}),
        ("x = not a", {"x = (a)"}),
        ("x = (a + b) * c", {"x = (a - b) * c", "x = (a + b) + c"}),
        ("x = 3", {"x = 4"}),
        ("x = True", {"x = False"}),
        ("x = min(a)", {"x = max(a)"}),
        ("x = f(a, b=c)", {"x = f(a, )"}),
        ("x = [a for a in b if c]", {"x = [a for a in b if True]"}),
        ("a.b = c", {"pass"}),
        ("a += b", {"pass"}),
        ("return a", {"return None"}),
        ("raise a", {"pass"}),
        ("del a[b]", {"pass"}),
        ("logger.info(a, b=c)", set()),
        ("raise SomeError(f'{a + b}', c=True)", {"pass"}),
        ("assert a < b", set()),
        ("x = 'a text for people'", set()),
        ("x = zip(a, strict=True)", set()),
        ("Kind = Literal['a', 'b']", set()),
        ("x = a['b']", {"x = a['bX']"}),
        ("'''A docstring that is none.'''", set()),
    ],
)
def test_a_line_has_these_mutants(line: str, mutants: set[str]) -> None:
    assert changes(f"def f():\n    {line}") == mutants


@by_table("source", "mutant")
def test_names_statements_and_bounds_are_exchanged(source: str, mutant: str) -> None:
    assert mutant in changes(source)


def test_a_parameter_that_self_keeps_under_its_name_is_not_exchanged_for_it() -> None:
    source = "class A:\n    def __init__(self, b, d):\n        self.b, self.d = b, g(d)\n        self.b = b\n"
    found = changes(f"{source}        self.c = f(b, d, self.b)\n")
    assert "self.c = f(b, self.d, self.b)" in found
    assert not found & {"self.c = f(self.b, d, self.b)", "self.c = f(b, d, b)"}


def test_a_baseexception_that_is_caught_is_not_any_exception() -> None:
    source = "def f():\n    try:\n        a\n    except BaseException:\n        b"
    assert changes(source) == {"except Exception:"}


def test_fields_of_classes_and_defaults_are_in_no_function() -> None:
    source = "A = 1\nclass B:\n    c = 1\n    def d(self, e=1):\n        class F:\n            g = 1"
    assert {mutant.line: mutant.in_no_function for mutant in mutants_of(source)} == {
        1: True, 3: True, 4: True, 6: False,
    }  # fmt: skip


def test_every_mutant_is_python_with_a_name_of_its_own() -> None:
    source = (ROOT / PACKAGE / "service" / "work.py").read_text()
    found = list(mutants_of(source))
    assert len({mutant.name for mutant in found}) == len(found) > 40
    whole = ast.dump(ast.parse(source))
    assert all(ast.dump(ast.parse(mutant.applied(source) or "")) != whole for mutant in found)


@pytest.mark.slow
def test_what_is_called_equivalent_is_a_mutant_and_has_a_reason() -> None:
    listed = re.findall(r"^(\S+\.py):$", EQUIVALENTS.read_text(), re.M)
    assert len(set(listed)) == len(listed), "YAML keeps only the last of two modules with one name"
    for module in listed:
        known = equivalents(module)
        names = {mutant.name for mutant in mutants_of((ROOT / PACKAGE / module).read_text())}
        assert known.keys() <= names, f"{module}: {known.keys() - names}"
        assert all(len(reason) > 10 for reason in known.values()), module


def parts(suite: Suite, module: str, line: int, *, imported: bool = False) -> list[list[str]]:
    return [list(part) for part in suite.parts(module, line, imported=imported) if part]


def test_a_line_gets_the_tests_that_run_it_the_fastest_first() -> None:
    suite = Suite({"a": 2.0, "b": 1.0, "c": 3.0}, {"x.py": {1: [], 2: ["a", "c"], 3: ["a"]}})
    assert suite.parts("x.py", 2)[0] == {"a": 2.0, "c": 3.0}
    assert parts(suite, "x.py", 3) == [["a"]]
    assert parts(suite, "y.py", 1) == [["b", "a", "c"]]  # no test runs it in its own process


def test_a_line_that_an_import_runs_gets_all_tests_those_of_its_module_first() -> None:
    suite = Suite({"a": 2.0, "b": 1.0, "c": 3.0}, {"x.py": {1: [], 2: ["c"]}})
    assert parts(suite, "x.py", 1) == parts(suite, "x.py", 2, imported=True) == [["c", "b", "a"]]


def test_a_line_of_a_module_in_no_package_gets_tests_that_run_it_in_packages_that_name_the_module() -> None:
    mutant = next(each for each in mutants_of((ROOT / PACKAGE / "plugins.py").read_text()) if not each.in_no_function)
    lines = {"plugins.py": {mutant.line: ["c", "d"]}}
    own, other = Suite({"b": 1.0}, {"plugins.py": {mutant.line: ["b"]}}), Suite({"c": 1.5, "d": 0.5, "e": 1.0}, lines)
    suites = Suites(**dict.fromkeys(packages_that_name("plugins.py"), Suite()) | {"": own, "api": other})
    found = [list(tests) for tests in suites.parts("plugins.py", mutant, cast(Sandbox, None)) if tests]
    assert found == [["b"], ["d", "c"]]
    assert list(suites.parts("plugins.py", replace(mutant, in_no_function=True), cast(Sandbox, None))) == [{"b": 1.0}]


def test_a_mutant_that_survives_the_tests_of_its_line_gets_the_others_of_their_files_that_run_its_module() -> None:
    """Example: the first test of a file loads an engine that the others share."""
    seconds = {"one::a": 2.0, "one::b": 3.0, "one::c": 1.0, "one::d": 1.0, "two::e": 1.0}
    suite = Suite(seconds, {"x.py": {1: ["one::a"], 2: ["one::b", "one::c", "two::e"]}, "y.py": {1: ["one::d"]}})
    assert parts(suite, "x.py", 1) == [["one::a"], ["one::c", "one::b"]]


class Played:
    """A sandbox whose tests a and b run one line, and a fails without a mutant."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def passes(self, tests: list[str], seconds: float, report: Path) -> bool:
        """Write the report of what the tests ran."""
        found = {"seconds": {"a": 1.0, "b": 2.0}, "failed": ["a"], "modules": {"x.py": {"1": [0, 1]}}}
        report.write_text(json.dumps(found))
        return False


def test_a_test_that_fails_without_a_mutant_is_named_and_kills_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = Suite.measured("batching", cast(Sandbox, Played(tmp_path)))
    assert parts(suite, "x.py", 1) == parts(suite, "y.py", 1) == [["b"]]
    assert capsys.readouterr().err.split()[-1] == "a"


def test_tests_end_with_the_program_that_asked_for_them(tmp_path: Path) -> None:
    """Example: mutate.py is ended by a signal."""
    (tmp_path / "test_long.py").write_text(
        "import pathlib, time\ndef test_long():\n    pathlib.Path('begun').touch()\n    time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "tools.mutation_runner"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as runner:
        assert runner.stdin is not None and runner.stdout is not None
        runner.stdin.write(b'{"tests": ["test_long.py"], "seconds": 600}\n')
        runner.stdin.flush()
        wait_until((tmp_path / "begun").exists)
        runner.stdin.close()
        assert runner.stdout.read() == b"timeout\n"


def test_what_was_not_tried_in_time_is_not_counted() -> None:
    name = "batching/queue.py"
    pool: Queue[Sandbox] = Queue()
    pool.put(cast(Sandbox, None))
    score = Score("batching")
    for mutant in mutants_of((ROOT / PACKAGE / name).read_text()):
        score.count(fate(name, mutant, Suites(batching=Suite({"a": 1.0})), pool, deadline=0.0))
    known = len(equivalents(name))
    assert (score.tried, score.equivalent, score.killed) == (known, known, 0)


def test_a_sample_follows_from_its_seed() -> None:
    names = modules(["batching"])
    first = chosen(names, 5, seed=1)
    assert first == chosen(names, 5, seed=1) != chosen(names, 5, seed=2)
    assert {package_of(name) for name, _ in first} == {"batching"}


def test_a_pattern_that_means_no_module_is_an_error() -> None:
    with pytest.raises(SystemExit, match="nothing/of/this"):
        modules(["nothing/of/this.py"])


@pytest.mark.skipif(shutil.which("unshare") is None, reason="there is no unshare")
def test_a_mutant_writes_nothing_where_sagemaker_puts_models() -> None:
    if subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare can make no namespace here")
    done = subprocess.run(
        [*NAMESPACE, "mkdir", "-p", "/opt/ml/model/compiled"], capture_output=True, text=True, check=False
    )
    if "mutants can write to /opt/ml here" in done.stderr:
        pytest.skip("mount may do nothing here")
    assert "Read-only file system" in done.stderr
