"""Which rounds remain when one of them cannot be measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from djl_trtllm.errors import BenchmarkError
from djl_trtllm.versus import rounds
from djl_trtllm.versus.engines import Engine, Memory
from tests.versus.test_report import figures, versus

ENGINES = [Engine("a", "python"), Engine("b", "python")]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The engines that were started. The fourth one does not become ready."""
    started: list[str] = []

    @contextmanager
    def serving(engine: Engine, directory: Path, log: Path) -> Iterator[Any]:
        started.append(engine.name)
        if len(started) == 4:
            raise BenchmarkError(f"{engine.name}: the server ended")
        memory = Memory(1, None)
        yield SimpleNamespace(url="http://127.0.0.1:1", seconds=1.0, restarts=lambda: 0, memory=lambda: memory)

    def load(show: Any, say: Any, result: Any) -> None:
        result.loads = [figures(1, 10)]

    monkeypatch.setattr(rounds, "prepare", lambda model, engine, limits, folder: folder)
    monkeypatch.setattr(rounds, "resolve", lambda engine, directory: {})
    monkeypatch.setattr(rounds, "common_limits", lambda resolved: {})
    monkeypatch.setattr(rounds, "serving", serving)
    monkeypatch.setattr(rounds, "run_load", load)
    return started


def compare(engines: list[Engine], said: list[str] | None = None) -> rounds.Versus:
    found = versus(*map(rounds.Measured, engines))
    rounds.compare(found, 3, ([] if said is None else said).append)
    return found


def test_the_order_turns_and_whole_rounds_are_kept_of_engines_that_all_have_one(starts: list[str]) -> None:
    found = compare(ENGINES)
    assert starts == ["a", "b", "b", "a"]
    assert [len(each.rounds) for each in found.engines] == [1, 2]
    assert "a: the server ended" in str(found.failure)


def test_each_engine_is_asked_for_its_answers_once(starts: list[str]) -> None:
    said: list[str] = []
    compare(ENGINES, said)
    assert [text.split()[0] for text in said if "answers" in text] == ["a", "b"]


def test_an_engine_without_a_round_is_an_error(starts: list[str]) -> None:
    with pytest.raises(BenchmarkError, match="d: the server ended"):
        compare([Engine(name, "python") for name in "abcd"])
