from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from djl_trtllm.engines.compiler import Cause, Compiler
from djl_trtllm.errors import CompilerMissingError

MEMORY = Cause("memory", re.compile("no memory"), "buy some")
OTHER = Cause("other", re.compile("^Error"), "look")
COMPILER = Compiler(
    module="some.compiler",
    packages=("pytest", "no-such-package", "packaging", "nor-this"),
    install="pip install them",
    phases=("load", "convert", "save"),
    causes=(MEMORY, OTHER),
    phase_lines={"load": re.compile("Loading"), "convert": re.compile("Converting"), "save": re.compile("Saving")},
)


def test_a_line_begins_a_later_phase() -> None:
    assert COMPILER.phase_after("load", "[1/2] Converting") == "convert"
    assert COMPILER.phase_after("load", "[2/2] Saving") == "save"
    assert COMPILER.phase_after("load", "anything") is None


def test_a_phase_that_is_over_or_has_begun_does_not_come_again() -> None:
    assert COMPILER.phase_after("convert", "Loading") is None
    assert COMPILER.phase_after("convert", "Converting") is None
    assert COMPILER.phase_after("save", "Converting and Saving") is None


def test_after_a_phase_of_the_compilers_own_any_may_come() -> None:
    assert COMPILER.phase_after("another", "Loading") == "load"


def test_a_phase_without_lines_is_known_by_marks_only() -> None:
    silent = Compiler("m", (), "", ("load", "save"), (), {"save": re.compile("Saving")})
    assert silent.phase_after("start", "load") is None
    assert silent.phase_after("start", "Saving") == "save"
    assert Compiler("m", (), "", ("load",), ()).phase_after("start", "load") is None


def test_of_a_failure_the_first_class_counts_and_its_first_line() -> None:
    lines = ["Error: a", "there was no memory", "and no memory again"]
    assert COMPILER.cause_of(lines) == (MEMORY, "there was no memory")
    assert COMPILER.cause_of(lines[:1]) == (OTHER, "Error: a")
    assert COMPILER.cause_of(["an Error"]) is None


def test_what_is_not_installed_is_named_with_both_ways_out() -> None:
    with pytest.raises(CompilerMissingError) as caught:
        COMPILER.require(Path("/models/it"))
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("/models/it is a checkpoint and must be compiled")
    assert "(missing: no-such-package, nor-this)" in first
    assert lines[0] == "    pip install them" and lines[-1] == "    djl-trtllm compile /models/it OUT"


def test_what_is_installed_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "1.0")
    COMPILER.require(Path("/models/it"))
