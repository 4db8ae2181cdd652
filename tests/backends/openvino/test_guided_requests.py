from __future__ import annotations

import threading
from typing import Any

import pytest

from djl_trtllm.backends.openvino.guided_requests import GuidedRequests
from djl_trtllm.executor.protocol import Delta, Refusal, Submit
from djl_trtllm.request import FinishReason, Guide, Sampling
from tests.executor.played_checker import PlayedChecker, regex


class Compiler:
    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.compiled: list[str] = []
        self.forgotten = 0
        self.may = threading.Event()
        self.may.set()

    def compile(self, guide: Guide) -> None:
        self.may.wait(20)
        self.compiled.append(guide.value)
        if guide.value == "broken":
            raise RuntimeError("cannot be compiled")

    def forget(self) -> None:
        self.forgotten += 1


class Bench:
    def __init__(self) -> None:
        self.checker = PlayedChecker()
        self.compiler = Compiler(0)
        self.made: list[int] = []
        self.guided = GuidedRequests(self.checker, self._make)  # type: ignore[arg-type]
        self.ready: list[int] = []
        self.deltas: list[Delta] = []

    def _make(self, vocabulary: int) -> Compiler:
        self.made.append(vocabulary)
        return self.compiler

    def hold(self, number: int, text: str, **sampling: Any) -> Delta | None:
        return self.guided.hold(Submit(number, [1], Sampling(5, **sampling), guide=regex(text)))

    def advance(self) -> None:
        ready, deltas = self.guided.advance(wait=True)
        self.ready += [request.request_id for request in ready]
        self.deltas += deltas

    def finish(self) -> None:
        for _ in range(4000):
            if not self.guided.waiting:
                return
            self.advance()
        raise AssertionError("still waiting")


@pytest.fixture
def bench() -> Any:
    bench = Bench()
    yield bench
    bench.guided.close()
    assert bench.checker.closed


def test_a_request_waits_for_its_verdict_and_for_its_guide_to_be_compiled(bench: Bench) -> None:
    assert bench.hold(1, "a") is None
    assert bench.guided.waiting
    bench.advance()
    assert (bench.ready, bench.compiler.compiled) == ([], [])
    bench.compiler.may.clear()
    bench.checker.decide("a")
    bench.advance()
    bench.advance()
    assert bench.ready == []
    bench.compiler.may.set()
    bench.finish()
    assert (bench.ready, bench.compiler.compiled, bench.made) == ([1], ["a"], [99])


def test_a_guide_is_compiled_once(bench: Bench) -> None:
    for text in ("a", "b"):
        bench.checker.decide(text)
    for number, text in enumerate("aabba"):
        bench.hold(number, text)
    bench.finish()
    bench.hold(9, "b")
    bench.advance()
    assert sorted(bench.ready) == [0, 1, 2, 3, 4, 9]
    assert sorted(bench.compiler.compiled) == ["a", "b"]
    assert bench.made == [99]


def test_a_compiled_guide_does_not_wait_for_another_that_compiles(bench: Bench) -> None:
    bench.checker.decide("a")
    bench.hold(1, "a")
    bench.finish()
    bench.compiler.may.clear()
    bench.checker.decide("slow")
    bench.hold(2, "slow")
    bench.advance()
    bench.hold(3, "a")
    bench.advance()
    assert bench.ready == [1, 3]
    bench.compiler.may.set()
    bench.finish()
    assert bench.ready == [1, 3, 2]


def test_an_unusable_guide_is_the_error_of_its_requests_only(bench: Bench) -> None:
    bench.checker.decide("a")
    bench.checker.decide("bad", "it is bad")
    bench.checker.decide("broken")
    for number, text in enumerate(("bad", "broken", "a", "bad")):
        bench.hold(number, text)
    bench.finish()
    assert bench.ready == [2]
    assert {delta.request_id: delta.error for delta in bench.deltas} == {
        0: Refusal("the guide cannot be used: it is bad"),
        1: Refusal("the guide cannot be used: cannot be compiled"),
        3: Refusal("the guide cannot be used: it is bad"),
    }
    assert {delta.finish for delta in bench.deltas} == {FinishReason.ERROR}


@pytest.mark.parametrize(("name", "value"), [("min_new_tokens", 2), ("ignore_eos", True)])
def test_what_contradicts_the_end_of_a_guide_is_refused(bench: Bench, name: str, value: object) -> None:
    refused = bench.hold(1, "a", **{name: value})
    assert refused and refused.error == Refusal(
        f"'{name}' with a guide: the guide says where the output ends; leave out one"
    )
    assert not bench.guided.waiting


def test_a_request_that_waits_is_cancelled_at_once(bench: Bench) -> None:
    bench.hold(1, "a")
    assert bench.guided.cancel(1) == Delta(1, [], finish=FinishReason.CANCELLED)
    assert bench.guided.cancel(1) is None
    assert not bench.guided.waiting


def test_a_forgotten_verdict_is_asked_for_again(bench: Bench) -> None:
    bench.hold(1, "a")
    bench.advance()
    assert bench.checker.checked == ["a", "a"]


def test_compiled_guides_are_forgotten_before_they_take_much_memory(bench: Bench) -> None:
    for number in range(257):
        bench.checker.decide(str(number))
        bench.hold(number, str(number))
        bench.finish()
        assert bench.compiler.forgotten == (1 if number == 256 else 0)
    bench.hold(300, "0")
    bench.finish()
    assert bench.compiler.compiled[-1] == "0"
    assert len(bench.ready) == 258
