"""Engines are imported in the folders of their backends only, also where the import is a text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "djl_trtllm"
FOLDERS = {
    "tensorrt_llm": "backends/tensorrt_llm",
    "openvino": "backends/openvino",
    "openvino_genai": "backends/openvino",
}
DYNAMIC = {"import_module", "__import__", "find_spec"}


def imported(tree: ast.AST) -> Iterator[str]:
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
    return {module.partition(".")[0] for module in imported(ast.parse(path.read_text()))} & FOLDERS.keys()


def test_engines_are_imported_in_their_folders_only() -> None:
    found = {path.relative_to(PACKAGE).as_posix(): engines_in(path) for path in PACKAGE.rglob("*.py")}
    elsewhere = {
        file: engine for file, engines in found.items() for engine in engines if not file.startswith(FOLDERS[engine])
    }
    assert elsewhere == {}
    # The search finds what there is.
    assert {engine for engines in found.values() for engine in engines} == FOLDERS.keys()


@pytest.mark.parametrize(
    "line",
    [
        "import tensorrt_llm",
        "import json, tensorrt_llm.llmapi as api",
        "from tensorrt_llm.llmapi import LLM",
        "importlib.import_module('tensorrt_llm.llmapi')",
        "import_module(name='tensorrt_llm')",
        "__import__('tensorrt_llm')",
        "importlib.util.find_spec('tensorrt_llm')",
        "def late():\n    from tensorrt_llm import LLM",
    ],
)
def test_every_way_to_import_is_seen(line: str, tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(line)
    assert engines_in(file) == {"tensorrt_llm"}
