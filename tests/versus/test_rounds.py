"""How engines are measured in turns, and which rounds remain when one of them cannot be measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from djl_trtllm.bench.client import Target
from djl_trtllm.bench.figures import Figures
from djl_trtllm.bench.session import Result
from djl_trtllm.errors import BenchmarkError
from djl_trtllm.quality.figures import Continuation, Position
from djl_trtllm.quality.sides import Asked
from djl_trtllm.versus import rounds
from djl_trtllm.versus.engines import LIMITS, Engine
from tests.versus.test_report import PRICED, figures, versus

ENGINES = [Engine("a", "python"), Engine("b", "python")]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The engines that were started. The fourth one does not become ready."""
    started: list[str] = []

    @contextmanager
    def serving(engine: Engine, model: str, limits: Any, log: Path) -> Iterator[Any]:
        started.append(engine.name)
        if len(started) == 4:
            raise BenchmarkError(f"{engine.name}: the server ended")
        yield SimpleNamespace(url="http://127.0.0.1:1", seconds=1.0, restarts=lambda: 0, memory=dict)

    def load(show: Any, say: Any, result: Any) -> None:
        result.loads = [figures(1, 10)]

    monkeypatch.setattr(rounds, "resolve", lambda engine, model, limits: {})
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


# -- A comparison whose servers and loads are played -------------------------------------------------------------------


class Played:
    """Servers of two engines, whose restarts and answers a test sets. It notes what each of them is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.restarts = self.memory = 0
        self.limits = {"a": 100, "b": 64}
        self.loads: list[Result] = []
        self.resolved: list[tuple[str, str, dict[str, int]]] = []
        self.asked: list[tuple[str, Asked]] = []
        self.no_answers = ""
        self.answers = [Continuation([Position("x", {"x": -0.1})])]
        self.figures = [figures(1, 10), figures(16, 20)]
        self.interrupted_at = 0
        for name in ("resolve", "serving", "Served"):
            monkeypatch.setattr(rounds, name, getattr(self, name))
        monkeypatch.setattr(rounds, "run_load", self.load)

    def resolve(self, engine: Engine, model: str, limits: dict[str, int]) -> dict[str, Any]:
        self.resolved.append((model, engine.name, limits))
        length = limits.get("max_input_len", self.limits[engine.name])
        values = dict.fromkeys(LIMITS, 8) | {"max_input_len": length}
        common = {name: {"key": f"option.{name}", "set": False, "effect": "x"} for name in values}
        found = {name: common[name] | {"value": value} for name, value in values.items()}
        return found | {"dtype": {"key": "option.dtype", "value": engine.name, "set": True, "effect": "x"}}

    @contextmanager
    def serving(self, engine: Engine, model: str, limits: dict[str, int], log: Path) -> Iterator[Any]:
        assert (model, limits) == self.resolved[-1][::2] and log.parent.is_dir() and engine.name in log.name
        memory = {"memory_bytes": 5, "gpu_memory_bytes": 7}
        port = {"a": 1001, "b": 1002}[engine.name]
        yield SimpleNamespace(
            url=f"http://127.0.0.1:{port}", seconds=2.5, restarts=lambda: self.restarts, memory=lambda: memory
        )

    def load(self, show: Any, say: Any, result: Result) -> None:
        show(None)
        self.loads.append(result)
        result.loads, result.interrupted = self.figures, len(self.loads) == self.interrupted_at

    def Served(self, name: str, target: Target, model: str | None, timeout: float) -> Any:
        def answer(asked: Asked) -> list[Continuation]:
            self.asked.append((f"{name} {target.port} {model} {timeout}", asked))
            if self.no_answers:
                raise BenchmarkError(self.no_answers)
            return self.answers

        return SimpleNamespace(answer=answer)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)


def run(count: int = 2) -> tuple[rounds.Versus, list[str]]:
    found, said = versus(*map(rounds.Measured, ENGINES)), list[str]()
    found.instance = PRICED
    rounds.compare(found, count, said.append)
    return found, said


def test_each_round_has_its_seed_and_its_servers_address_and_one_start_is_a_row_of_figures(played: Played) -> None:
    found, said = run()
    assert [(each.plan.target.port, each.plan.seed) for each in played.loads] == [
        (1001, 0), (1002, 0), (1002, 1), (1001, 1),
    ]  # fmt: skip
    assert all(each.plan.loads == found.plan.loads for each in played.loads)
    for measured in found.engines:
        for each in measured.rounds:
            assert [load["concurrency"] for load in each.pop("loads")] == [1, 16]
            assert each.pop("usd_per_million_tokens") == pytest.approx((PRICED.hourly_price or 0) / 0.072, rel=0.01)
            assert each == {
                "output_tokens_per_second": 20.0,
                "knee": 16,
                "start_seconds": 2.5,
                "memory_bytes": 5,
                "gpu_memory_bytes": 7,
            }
    assert said[1:3] == ["round 1 of 2: a starts", "a is ready after 2.5 s"] and "round 2 of 2: a starts" in said
    assert not (found.interrupted or found.failure or found.warnings)


def test_the_answers_are_those_to_the_prompts_of_quality_in_the_first_round(played: Played) -> None:
    found, _ = run()
    assert [who for who, _ in played.asked] == [
        f"a 1001 None {found.plan.timeout}",
        f"b 1002 None {found.plan.timeout}",
    ]
    assert all(asked.tokens == 64 and len(asked.prompts) > 10 for _, asked in played.asked)
    assert all(each.answers == played.answers and not each.no_answers for each in found.engines)
    played.no_answers = "no log-probabilities"
    found, _ = run()
    assert [(each.answers, each.no_answers, len(each.rounds)) for each in found.engines] == [
        ([], "no log-probabilities", 2)
    ] * 2


def test_engines_whose_limits_differ_all_get_the_smallest(played: Played) -> None:
    found, said = run(1)
    assert found.limits == {"max_input_len": 64} and any("option.max_input_len=64" in text for text in said)
    assert played.resolved == [("story", name, limits) for limits in ({}, found.limits) for name in "ab"]
    assert found.differing == {"option.dtype": ["a", "b"]}, "their limits are equal now"
    played.limits, played.resolved = {"a": 64, "b": 64}, []
    found, said = run(1)
    assert found.limits == {} and len(played.resolved) == 2 and not any("limits" in text for text in said)


def test_warnings_name_the_engine_and_are_said_once(played: Played) -> None:
    for each in played.figures:
        each.server_warnings["top_k has no effect"] += 1
    assert run()[0].warnings == [f"{name}: the server warns: top_k has no effect" for name in "ab"]
    played.figures, played.restarts = [figures(1, 10)], 1
    assert [text.partition(":")[0] for text in run()[0].warnings if "replaced" in text] == ["a", "b"]


def test_ctrl_c_keeps_the_rounds_that_are_whole(played: Played) -> None:
    played.interrupted_at = 4
    found, _ = run(3)
    assert found.interrupted and [len(each.rounds) for each in found.engines] == [1, 2]


def test_an_engine_that_answers_no_request_is_an_error_with_its_reason(played: Played) -> None:
    failed = Figures("1 client", 0.0, 10.0, concurrency=1)
    for errors, said in (({}, "none ended in time"), ({"HTTP 500": 3, "HTTP 429": 1}, "HTTP 500 no memory")):
        failed.errors.update(errors)
        failed.details["HTTP 500"] = "no memory"
        played.figures = [failed]
        with pytest.raises(BenchmarkError, match=f"^a: .*{said}$"):
            run()
    played.figures = [failed, figures(16, 20)]
    assert [len(each.rounds) for each in run()[0].engines] == [2, 2], "one load that succeeds is enough"
