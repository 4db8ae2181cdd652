"""The gate, with a process that does what a guide's text says, and what the programs of backends share."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

import psutil
import pytest

from djl_trtllm.executor import guides
from djl_trtllm.executor.guides import (
    AsyncGuideGate,
    GuideGate,
    Key,
    Trial,
    Verdict,
    keywords_left_out,
    reason_of,
    too_large,
    trial_with_tokenizer,
)
from djl_trtllm.executor.protocol import Refusal, Stats, Submit, Try
from djl_trtllm.request import Guide, GuideKind, Sampling
from tests.support.tables import by_table

PROGRAM = "tests.support.guide_program"
NAME: ContextVar[str] = ContextVar("name", default="")


class Bench:
    """A gate, and what it let through: a request's id with the context's name, or with the problem of its guide."""

    def __init__(self, kind: type[GuideGate] = GuideGate) -> None:
        self.now = 0.0
        self.preparing: dict[str, str | None] = {}
        """What an engine says of guides that can be used; of others it says nothing against them."""
        self.submitted: list[tuple[int, str]] = []
        self.refused: list[tuple[int, str]] = []
        self.full: list[int] = []
        self.gate = kind(PROGRAM, "engine", self._submit, self._refuse, prepare=self._prepare, clock=lambda: self.now)

    def hold(self, *texts: str, first: int = 0, kind: GuideKind = GuideKind.REGEX, client: str = "") -> None:
        for number, text in enumerate(texts, first):
            self.gate.hold(Submit(number, [5], Sampling(9), guide=Guide(kind, text), client=client))

    def finish(self) -> None:
        while self.gate:
            self.gate.advance(0.05)

    def pid(self, text: str = "pid") -> int:
        """The process that tries this guide, or tried it."""
        self.hold(text, first=1000)
        others = len(self.refused)
        while len(self.refused) == others:
            self.gate.advance(0.05)
        return int(self.refused.pop()[1])

    @property
    def trials(self) -> int:
        return self.gate.count_in(Stats()).guide_trials or 0

    def _prepare(self, key: Key, guide: Guide) -> str | None:
        return self.preparing.get(guide.value, "")

    def _submit(self, request: Submit | Try) -> None:
        self.submitted.append((request.request_id, NAME.get()))

    def _refuse(self, request: Submit | Try, refusal: Refusal) -> None:
        if refusal.full is not None:
            self.full.append(request.request_id)
            return
        self.refused.append((request.request_id, refusal.message.removeprefix("the guide cannot be used: ")))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench()
    monkeypatch.setattr(guides, "processor_seconds", lambda pid: bench.now)
    yield bench
    bench.gate.close()


def test_requests_are_held_until_their_guides_are_tried_each_once(bench: Bench) -> None:
    bench.hold("good", "bad", "good")
    assert (len(bench.gate), bench.submitted, bench.refused) == (3, [], [])
    bench.finish()
    assert (bench.submitted, bench.refused) == ([(0, ""), (2, "")], [(1, "no good regex in engine")])
    bench.hold("bad", "good", first=3)
    assert (bench.submitted[-1][0], bench.refused[-1][0]) == (4, 3), "both are known"
    bench.hold("bad", first=5, kind=GuideKind.GRAMMAR)
    bench.finish()
    assert bench.refused[-1] == (5, "no good grammar in engine"), "of another kind it is another guide"


def test_the_guide_that_waits_longest_is_tried_next(bench: Bench) -> None:
    bench.hold("good a", "bad", "good b", "bad")
    bench.gate.cancel(1)
    while not bench.submitted:
        bench.gate.advance(0.05)
    assert len(bench.gate) == 2
    while len(bench.submitted) < 2:
        bench.gate.advance(0.05)
    assert (len(bench.gate), bench.refused) == (1, [])


def test_a_request_that_is_cancelled_meanwhile_goes_no_further(bench: Bench) -> None:
    bench.hold("good", "good")
    cancelled = bench.gate.cancel(0)
    assert cancelled is not None and cancelled.request_id == 0
    assert bench.gate.cancel(0) is None
    bench.finish()
    assert bench.submitted == [(1, "")]


def test_a_request_is_submitted_in_the_context_in_which_it_came(bench: Bench) -> None:
    """Lines that are printed for it have its id, and not that of the first one that was held."""
    for number, text in enumerate(("good a", "good b")):
        token = NAME.set(text)
        bench.hold(text, first=number)
        NAME.reset(token)
    bench.finish()
    assert bench.submitted == [(0, "good a"), (1, "good b")]


def test_the_engine_prepares_guides_that_can_be_used(bench: Bench) -> None:
    bench.preparing = {"good slow": None, "bad": None, "good broken": "cannot be compiled"}
    bench.hold("good slow", "bad", "good broken", "good")
    while len(bench.gate) > 1:
        bench.gate.advance(0.05)
    assert bench.refused == [(1, "no good regex in engine"), (2, "cannot be compiled")]
    assert bench.submitted == [(3, "")]
    began = time.monotonic()
    bench.gate.advance(0.05)
    assert (len(bench.gate), time.monotonic() - began >= 0.05) == (1, True), "the loop must not spin meanwhile"
    bench.preparing["good slow"] = ""
    bench.finish()
    assert bench.submitted[-1] == (0, "")


def test_clients_take_turns_however_many_guides_one_of_them_has(bench: Bench) -> None:
    bench.hold(*(f"good bomb {number}" for number in range(12)), client="bombs")
    for number in range(20):
        bench.hold(f"good {number}", f"good more {number}", first=100 + 10 * number, client=f"client {number}")
    while bench.gate:
        bench.gate.advance(0.05)
    numbers = [number for number, _ in bench.submitted]
    assert len(numbers) == 52
    last_small = max(index for index, number in enumerate(numbers) if number >= 100)
    assert sum(number < 100 for number in numbers[:last_small]) <= 3
    firsts = [number for number in numbers if number >= 100 and number % 10 == 0]
    assert numbers.index(firsts[-1]) <= 22, "clients take turns"


def test_a_full_queue_refuses_guides_except_a_share_for_each_client(bench: Bench) -> None:
    bench.hold("hang", *(f"good {number}" for number in range(64)), client="a")
    assert (len(bench.gate), bench.full) == (64, [64])
    bench.hold("hang", "good 0", first=100, client="a")
    assert (len(bench.gate), bench.full) == (66, [64]), "these guides wait already"
    bench.hold(*(f"good b {number}" for number in range(33)), first=200, client="b")
    assert (len(bench.gate), bench.full) == (98, [64, 232])
    stats = bench.gate.count_in(Stats())
    assert (stats.guides_waiting, stats.guide_trials) == (96, 0)


def test_a_guide_that_is_expected_to_take_long_has_a_process_of_its_own(bench: Bench) -> None:
    """It is one of more than 5,000 characters, with its repetitions written out."""
    counted = ["a{%d}", "a{,%d}", "a{%d,}", "[a-z]{0,%d}", r"\]{%d}", r"[\]]{%d}", r"((\n{%d}"]
    pairs = [(4996, text) for text in counted]
    pairs += [(2498, "(ab){%d}"), (4995, "a){%d}"), (499, "((ab){5}){%d}"), (49809, '"maxItems":%d')]
    pairs += [(49799, '"minLength":%d')]
    quick = bench.pid()
    for count, text in pairs:
        assert bench.pid("pid " + text % count) == quick, text
    assert bench.pid("pid " + 4996 * "a") == bench.pid("pid " + 50 * "a*b+c?d*") == quick
    large = ["pid " + text % (count + 1) for count, text in pairs]
    bench.hold(*large, "pid " + 4997 * "a", "pid " + 50 * "a*b+c?d*" + "a?")
    while bench.gate:
        bench.gate.advance(0.05)
    slow = {int(problem) for _, problem in bench.refused}
    assert (len(slow), quick in slow, bench.pid("pid again")) == (1, False, quick)
    assert not psutil.pid_exists(slow.pop()), "it is not kept"
    bench.hold("nice " + 5000 * "a", "nice")
    bench.finish()
    assert sorted(bench.refused[-2:]) == [(0, "10"), (1, str(os.getpriority(os.PRIO_PROCESS, 0)))]


def test_trials_that_last_make_room_for_others(bench: Bench) -> None:
    pids = [bench.pid()]
    bench.hold("hang 1", first=1, client="a")
    bench.now += 0.2
    bench.hold("good", first=3, client="b")
    bench.gate.advance(0.01)
    assert bench.submitted == [], "it has its moment"
    bench.now += 0.1
    while not bench.submitted:
        bench.gate.advance(0.05)
    assert psutil.pid_exists(pids[0]), "it goes on beside the others"
    pids.append(bench.pid("pid again"))
    bench.hold("hang 2", first=2, client="a")
    bench.hold("good too", first=4, client="b")
    bench.now += 0.3
    while len(bench.submitted) < 2:
        bench.gate.advance(0.05)
    assert not psutil.pid_exists(pids[1]), "there is one already: it waits"
    stats = bench.gate.count_in(Stats())
    assert (stats.guides_waiting, len(bench.gate)) == (2, 2)
    bench.gate.cancel(1)
    bench.now += 1.1
    while psutil.pid_exists(pids[0]):
        bench.gate.advance(0.05)
    assert len(bench.gate) == 1, "its turn"


def test_every_thread_of_a_trial_that_lasts_lets_others_go_first(bench: Bench) -> None:
    pid = bench.pid()
    bench.hold("hang", first=1, client="a")
    bench.now += 0.3
    bench.hold("good", first=2, client="b")
    while not bench.submitted:
        bench.gate.advance(0.05)
    threads = [thread.id for thread in psutil.Process(pid).threads()]
    assert len(threads) > 1, "a trial has its own"
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {10}


def test_a_trial_that_others_keep_from_the_processor_is_not_interrupted_for_two_seconds(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guides, "processor_seconds", lambda pid: 7.0)
    first = bench.pid()
    bench.hold("hang", client="a")
    bench.hold("pid again", first=1, client="b")
    bench.now += 1.9
    for _ in range(5):
        bench.gate.advance(0.01)
    assert bench.trials == 1
    bench.now += 0.2
    while not bench.refused:
        bench.gate.advance(0.05)
    assert bench.refused != [(1, str(first))], "another process"


def test_what_a_guide_is_tried_for_is_let_through_or_refused_as_a_request_is(bench: Bench) -> None:
    for number, text in enumerate(("good", "bad", "noted")):
        bench.gate.hold(Try(number, Guide(GuideKind.REGEX, text)))
    bench.finish()
    assert sorted([number for number, _ in (*bench.submitted, *bench.refused)]) == [0, 1, 2]


def test_what_the_log_is_to_say_is_printed_once_in_the_requests_context(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(2):
        bench.hold("noted", first=number)
        bench.finish()
    assert capsys.readouterr().out == "something about it\n"
    assert not keywords_left_out((), strict=True).problem
    assert "'not' at #" in keywords_left_out(("'not' at #",), strict=True).problem
    assert "'not' at #" in keywords_left_out(("'not' at #",), strict=False).note


@pytest.mark.parametrize("text", ["die", "hang"])
def test_the_loss_of_a_process_is_no_verdict_about_the_guide(bench: Bench, text: str) -> None:
    first = bench.pid()
    for _ in range(2):
        bench.hold(text)
        tried = bench.trials
        while bench.gate:
            bench.gate.advance(0.05)
            bench.now += 10 if text == "hang" else 0
        assert bench.trials == tried + 2, "it is tried in a second process, and remembered nowhere"
    assert {number for number, _ in bench.refused} == {0}
    assert bench.pid("pid again") != first
    assert not psutil.pid_exists(first)


def test_a_trial_is_bounded_in_processor_time_and_that_is_a_verdict(
    bench: Bench,
) -> None:
    bench.hold("burn")
    bench.finish()
    assert "longer than 10 seconds of processor time" in bench.refused[0][1]
    bench.hold("burn")
    assert (len(bench.refused), bench.trials) == (2, 1)


def test_a_trial_that_nobody_waits_for_any_more_ends_where_others_wait(bench: Bench) -> None:
    bench.pid()
    bench.hold("hang")
    bench.gate.cancel(0)
    bench.hold("good", first=1)
    bench.now += 1.1
    bench.finish()
    assert (bench.submitted, bench.refused, bench.trials) == ([(1, "")], [], 3)


def test_a_process_is_replaced_before_it_grows(bench: Bench) -> None:
    pids = [bench.pid(f"pid {number}") for number in range(257)]
    assert (len(set(pids[:256])), len(set(pids))) == (1, 2)


def test_the_verdict_not_asked_for_longest_is_forgotten(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guides, "_MOST_VERDICTS", 3)
    for text in ("good 0", "good 1", "good 2", "good 0", "good 3"):
        bench.hold(text)
        bench.finish()
    for text, known in (("good 0", True), ("good 2", True), ("good 3", True), ("good 1", False)):
        bench.hold(text)
        assert (len(bench.gate) == 0) == known, text


def test_nothing_is_left_when_it_is_closed(bench: Bench) -> None:
    pid = bench.pid()
    assert bench.gate.close() == -9
    assert not psutil.pid_exists(pid)
    assert bench.gate.close() is None


def test_an_event_loop_advances_a_gate_while_it_holds_requests() -> None:
    async def hold() -> None:
        bench = Bench(AsyncGuideGate)
        for text in ("good", "bad"):
            bench.hold(text)
            assert len(bench.gate) == 1
            for _ in range(2000):
                await asyncio.sleep(0.01)
                if not bench.gate:
                    break
        assert (len(bench.submitted), len(bench.refused)) == (1, 1)
        assert len(asyncio.all_tasks()) == 1, "nothing is polled while nothing is held"
        bench.hold("hang")
        bench.gate.close()
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(hold())


# -- programs ----------------------------------------------------------------------------------------------------------


@by_table("message", "reason")
def test_the_reason_is_the_last_part_of_the_compilers_message(message: str, reason: str) -> None:
    assert reason_of(message) == reason


@pytest.mark.parametrize(("seconds", "problem"), [(5.0, None), (5.6, "for 6 seconds")])
def test_a_guide_that_would_stop_other_requests_is_refused(
    monkeypatch: pytest.MonkeyPatch, seconds: float, problem: str | None
) -> None:
    monkeypatch.setattr(time, "process_time", lambda: 1.0 + seconds)
    found = too_large(1.0)
    assert found is None if problem is None else found is not None and found.endswith(problem)


@pytest.mark.parametrize(("text", "problem"), [(None, "None"), ("{}", "'{}'"), ("broken", "None")])
def test_a_trial_is_made_for_a_tokenizer_that_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, problem: str
) -> None:
    def make(tokenizer: str | None) -> Trial:
        if tokenizer == "broken":
            raise ValueError("no tokenizer")
        return lambda _: Verdict(repr(tokenizer))

    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    assert trial_with_tokenizer(make, tmp_path)(Guide(GuideKind.REGEX, "a")).problem == problem
    assert ("tokenizer.json cannot be read" in capsys.readouterr().out) == (text == "broken")
