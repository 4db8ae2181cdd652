"""What a start imports, which is most of its time. Counted, not timed: the machine's speed does not matter."""

from __future__ import annotations

import ast
import collections
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tables import by_table

# Each of them takes from a tenth of a second to many seconds, and is imported where it is used.
HEAVY = {
    "awscrt",
    "boto3",
    "botocore",
    "huggingface_hub",
    "nncf",
    "numpy",
    "openvino",
    "openvino_genai",
    "optimum",
    "pynvml",
    "ray",
    "scipy",
    "sentencepiece",
    "tensorrt_llm",
    "torch",
    "transformers",
}
HELP = "import sys; sys.argv = ['djl-trtllm', '--help']; from djl_trtllm.cli import app; app(standalone_mode=False)"


@functools.cache
def imported(program: str) -> set[str]:
    """The modules that a program imports, beside those that Python itself starts with."""
    report = f"import json, sys; before = set(sys.modules)\n{program}\n"
    report += "print(); print(json.dumps(sorted(set(sys.modules) - before)))"
    done = subprocess.run([sys.executable, "-c", report], cwd="/", capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("program", "most"),
    [
        ("import djl_trtllm", 20),
        ("import djl_trtllm.executor.process", 200),
        (HELP, 350),
        ("import djl_trtllm.offline", 800),
        ("import djl_trtllm.server.app", 900),
    ],
    ids=["package", "engine process", "help", "offline", "server"],
)
def test_a_start_imports_little_and_nothing_heavy(program: str, most: int) -> None:
    modules = imported(program)
    assert "djl_trtllm" in modules
    assert sorted({module.partition(".")[0] for module in modules} & HEAVY) == []
    assert len(modules) <= most


def test_help_imports_no_command_and_nothing_that_commands_need() -> None:
    modules = imported(HELP)
    assert [name for name in modules if name.startswith("djl_trtllm.commands.")] == ["djl_trtllm.commands.console"]
    assert not {"djl_trtllm.config", "djl_trtllm.logs", "asyncio", "msgspec", "pydantic", "yaml"} & modules


# -- engines are imported in the folders of their backends only, also where the import is a text -----------------------

PACKAGE = Path(__file__).parents[2] / "djl_trtllm"
FOLDERS = {
    "tensorrt_llm": "backends/tensorrt_llm",
    "openvino": "backends/openvino",
    "openvino_genai": "backends/openvino",
}
DYNAMIC = {"import_module", "__import__", "find_spec"}


def imported_engine_imports(tree: ast.AST) -> Iterator[str]:
    """The modules that a file imports, by statements and by calls with a text."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in DYNAMIC:
                yield from (
                    argument.value
                    for argument in (*node.args, *(keyword.value for keyword in node.keywords))
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                )


def engines_in(path: Path) -> set[str]:
    return {
        module.partition(".")[0] for module in imported_engine_imports(ast.parse(path.read_text()))
    } & FOLDERS.keys()


def test_engines_are_imported_in_their_folders_only() -> None:
    found = {path.relative_to(PACKAGE).as_posix(): engines_in(path) for path in PACKAGE.rglob("*.py")}
    elsewhere = {
        file: engine for file, engines in found.items() for engine in engines if not file.startswith(FOLDERS[engine])
    }
    assert elsewhere == {}
    # The search finds what there is.
    assert {engine for engines in found.values() for engine in engines} == FOLDERS.keys()


@by_table("line")
def test_every_way_to_import_is_seen(line: str, tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(line)
    assert engines_in(file) == {"tensorrt_llm"}


# -- files that one can read in one go ---------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
MOST_LINES = 700
MOST_LINES_OF_A_DIALECT = 500
OF_SEVERAL_PROTOCOLS = {"lmi", "openai", "triton"}
"""Dialects that are larger: a model's own formatters, two kinds of completions, HTTP with tensors and gRPC."""


def test_no_python_file_is_longer_than_700_lines() -> None:
    files = [
        file for folder in ("djl_trtllm", "tests", "tools", "benchmarks") for file in (ROOT / folder).rglob("*.py")
    ]
    assert len(files) > 100
    lengths = {str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert {name: length for name, length in sorted(lengths.items()) if length > MOST_LINES} == {}


def test_a_dialect_is_small() -> None:
    dialects = PACKAGE / "api" / "dialects"
    lengths = collections.Counter[str]()
    for file in dialects.rglob("*.py"):
        name = file.relative_to(dialects).with_suffix("").parts[0]
        lengths[name] += len(file.read_text(encoding="utf-8").splitlines())
    assert len(lengths) > 5
    assert {name for name, length in lengths.items() if length > MOST_LINES_OF_A_DIALECT} == OF_SEVERAL_PROTOCOLS


def test_a_fixture_of_a_package_has_one() -> None:
    """Without `__init__.py` its server would stay to the end of the run."""
    fixtures = [file for file in ROOT.glob("tests/**/conftest.py") if 'scope="package"' in file.read_text()]
    assert fixtures
    assert [file for file in fixtures if not (file.parent / "__init__.py").exists()] == []
