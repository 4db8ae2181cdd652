"""The executor that repeats the prompt. Its clock is played: a pace is kept to the millisecond, and nothing waits."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import msgspec
import pytest

from djl_trtllm.backends.scripted import executor as scripted
from djl_trtllm.backends.scripted.executor import FEATURES, ScriptedExecutor
from djl_trtllm.executor.protocol import Delta, Limits, Stats, Submit
from djl_trtllm.request import FinishReason, Sampling


class Clock:
    """Time that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 50.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        self.now += seconds

    @property
    def passed(self) -> float:
        return round(self.now - 50, 6)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(scripted, "time", SimpleNamespace(sleep=made.sleep, monotonic=lambda: made.now))
    return made


def run(executor: ScriptedExecutor) -> list[Delta]:
    deltas = []
    while executor.busy:
        deltas += executor.step()
    return deltas


def submit(executor: ScriptedExecutor, request_id: int, tokens: int, *prompt: int, **more: object) -> None:
    stop, logprobs = more.pop("stop", []), bool(more.pop("logprobs", False))
    sampling = Sampling(tokens, **more)  # type: ignore[arg-type]
    executor.submit(Submit(request_id, list(prompt or (5, 6, 7)), sampling, stop, logprobs=logprobs))  # type: ignore[arg-type]


def test_it_repeats_the_prompt_and_ends_at_the_length() -> None:
    executor = ScriptedExecutor()
    submit(executor, 1, 5)
    deltas = run(executor)
    assert [token for delta in deltas for token in delta.token_ids] == [5, 6, 7, 5, 6]
    assert [delta.finish for delta in deltas] == [None, None, None, None, FinishReason.LENGTH]


def test_a_stop_id_in_the_prompt_ends_the_sequence_even_if_the_models_own_end_does_not() -> None:
    executor = ScriptedExecutor()
    submit(executor, 1, 5, stop=[6])
    submit(executor, 2, 3, stop=[6], ignore_eos=True)
    by_id: dict[int, list[tuple[int, FinishReason | None]]] = {1: [], 2: []}
    for delta in run(executor):
        by_id[delta.request_id].append((delta.token_ids[0], delta.finish))
    assert by_id == {1: [(5, None), (6, FinishReason.STOP)], 2: [(5, None), (6, FinishReason.STOP)]}


def test_end_after_emits_the_first_stop_id() -> None:
    executor = ScriptedExecutor(end_after=2)
    submit(executor, 1, 9, stop=[2, 3])
    assert [(delta.token_ids, delta.finish) for delta in run(executor)] == [
        ([5], None),
        ([6], None),
        ([2], FinishReason.STOP),
    ]


def test_a_cancelled_request_gets_its_terminal_delta_with_the_next_step() -> None:
    executor = ScriptedExecutor()
    submit(executor, 1, 9)
    executor.step()
    executor.cancel(1)
    executor.cancel(99)
    assert executor.step() == [Delta(1, [], finish=FinishReason.CANCELLED)]
    assert not executor.busy


def test_log_probabilities_come_only_when_asked_for() -> None:
    executor = ScriptedExecutor()
    submit(executor, 1, 1)
    submit(executor, 2, 1, logprobs=True)
    assert [delta.logprobs for delta in executor.step()] == [None, [-0.5]]


def test_an_error_ends_only_the_request_it_is_meant_for() -> None:
    executor = ScriptedExecutor(faults=[{"action": "error", "at_token": 1, "max_new_tokens": 3}])
    submit(executor, 1, 3)
    submit(executor, 2, 2)
    ends = {delta.request_id: delta for delta in run(executor) if delta.finish}
    assert ends[1] == Delta(1, [], finish=FinishReason.ERROR, error="scripted error")
    assert ends[2].finish == FinishReason.LENGTH


def test_raise_comes_out_of_step() -> None:
    executor = ScriptedExecutor(faults=[{"action": "raise", "at_token": 0}])
    submit(executor, 1, 3)
    with pytest.raises(RuntimeError, match="scripted engine failure"):
        executor.step()


@pytest.mark.parametrize(
    ("action", "asked"),
    [
        ("die", ("kill", os.getpid(), signal.SIGKILL)),
        ("stop", ("kill", os.getpid(), signal.SIGSTOP)),
        ("exit", ("exit", 3)),
        ("hang", ("sleep", 1e9)),
    ],
)
def test_a_fault_is_what_it_is_called(monkeypatch: pytest.MonkeyPatch, action: str, asked: tuple[object, ...]) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(os, "kill", lambda *arguments: calls.append(("kill", *arguments)))
    monkeypatch.setattr(os, "_exit", lambda *arguments: calls.append(("exit", *arguments)))
    sleep = SimpleNamespace(sleep=lambda *arguments: calls.append(("sleep", *arguments)), monotonic=lambda: 0.0)
    executor = ScriptedExecutor(faults=[{"action": action}])
    monkeypatch.setattr(scripted, "time", sleep)
    submit(executor, 1, 3)
    executor.step()
    assert calls == [asked]
    executor.step()
    assert calls == [asked]


def test_without_a_pace_nothing_waits(clock: Clock) -> None:
    executor = ScriptedExecutor()
    submit(executor, 1, 5)
    run(executor)
    assert clock.slept == [0]  # while it loads


def test_loading_takes_its_time(clock: Clock) -> None:
    ScriptedExecutor(start_seconds=3)
    assert clock.slept == [3]


def test_a_pace_is_kept(clock: Clock) -> None:
    executor = ScriptedExecutor(steps_per_second=100)
    submit(executor, 1, 5)
    run(executor)
    assert clock.slept[1:] == [0.01] * 5


def test_what_was_held_up_is_caught_up_with(clock: Clock) -> None:
    executor = ScriptedExecutor(steps_per_second=100)
    submit(executor, 1, 6)
    executor.step()
    clock.now += 0.025
    run(executor)
    assert clock.slept[2:] == [0, 0, 0.005, 0.01, 0.01]


def test_a_pace_begins_anew_after_idleness_and_goes_on_with_the_next_request(clock: Clock) -> None:
    executor = ScriptedExecutor(steps_per_second=100)
    submit(executor, 1, 1)
    run(executor)
    clock.now += 5
    submit(executor, 2, 2)
    executor.step()
    clock.now += 0.004
    submit(executor, 3, 1)
    executor.step()
    assert clock.slept[1:] == [0.01, 0.01, 0.006]


def test_a_prompt_is_computed_in_the_first_iteration_and_holds_the_others_up(clock: Clock) -> None:
    executor = ScriptedExecutor(prefill_seconds=0.5)
    submit(executor, 1, 3)
    executor.step()
    assert clock.passed == 0.5
    executor.step()
    assert clock.passed == 0.5
    submit(executor, 2, 3)
    executor.step()
    assert clock.passed == 1.0


def test_limits_and_statistics_are_those_of_the_script() -> None:
    executor = ScriptedExecutor(max_sequences=4, kv_blocks=9, block_size=16, max_seq_len=100)
    assert executor.limits == Limits(max_sequences=4, kv_blocks=9, block_size=16, max_seq_len=100)
    assert executor.stats() == Stats(kv_usage=0.0)
    submit(executor, 1, 5)
    executor.step()
    assert executor.stats() == Stats(running=1, kv_usage=0.25)
    for number in range(2, 9):
        submit(executor, number, 5)
    assert executor.stats() == Stats(running=8, kv_usage=1.0)


def test_it_holds_much_where_the_script_says_nothing() -> None:
    executor = ScriptedExecutor()
    assert executor.limits == Limits(max_sequences=256, kv_blocks=0, block_size=32, max_seq_len=1 << 20)
    assert (executor.details, executor.features) == ({}, FEATURES)
    assert executor.busy is False


@pytest.mark.parametrize("options", [{"stepspersecond": 3}, {"faults": [{"action": "explode"}]}])
def test_a_script_with_a_mistake_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        ScriptedExecutor(**options)


def test_a_start_error_comes_out_of_loading() -> None:
    with pytest.raises(RuntimeError, match="no such engine"):
        ScriptedExecutor(start_error="no such engine")


def test_a_script_may_accept_more() -> None:
    assert ScriptedExecutor(features=["json"]).features == FEATURES | {"json"}


@pytest.mark.parametrize("phase", ["load", "requests"])
def test_a_script_may_have_memory_for_some_tokens_only(phase: str) -> None:
    bounded = {"memory_tokens": 100, "memory_phase": phase}
    ScriptedExecutor(**bounded)
    ScriptedExecutor(**bounded, max_num_tokens=100).step()
    with pytest.raises(MemoryError, match=r"std::bad_alloc \(scripted: max_num_tokens=101 is more than 100\)"):
        ScriptedExecutor(**bounded, max_num_tokens=101).step()
    if phase == "requests":
        ScriptedExecutor(**bounded, max_num_tokens=101)
    ScriptedExecutor(max_num_tokens=101).step()
