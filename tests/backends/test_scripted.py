"""The executor that repeats the prompt. Nothing here waits."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from djl_trtllm.backends.base import effects_on
from djl_trtllm.backends.effects import has_effect
from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.backends.scripted import executor as scripted
from djl_trtllm.backends.scripted.executor import ScriptedExecutor
from djl_trtllm.config import Backend
from djl_trtllm.config.options import OPTIONS
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.errors import ConfigError
from djl_trtllm.executor.protocol import Limits, Stats, Submit
from djl_trtllm.model import inspect
from djl_trtllm.request import FinishReason, Sampling
from tests.engines.helpers import CPU_ONLY, configured
from tests.support import models
from tests.support.steps import Delta, deltas_of


def run(executor: ScriptedExecutor) -> list[Delta]:
    deltas = []
    while executor.busy:
        deltas += deltas_of(executor.step())
    return deltas


def submit(executor: ScriptedExecutor, request_id: int, tokens: int, *prompt: int, **more: object) -> None:
    stop = more.pop("stop", [])
    sampling = Sampling(tokens, **more)  # type: ignore[arg-type]
    executor.submit(Submit(request_id, list(prompt or (5, 6, 7)), sampling, stop))  # type: ignore[arg-type]


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
    assert deltas_of(executor.step()) == [Delta(1, [], finish=FinishReason.CANCELLED)]
    assert not executor.busy


def test_an_error_ends_only_the_request_it_is_meant_for() -> None:
    executor = ScriptedExecutor(faults=[{"action": "error", "at_token": 1, "max_new_tokens": 3}])
    submit(executor, 1, 3)
    submit(executor, 2, 2)
    ends = {delta.request_id: delta for delta in run(executor) if delta.finish}
    assert ends[1] == Delta(1, [], finish=FinishReason.ERROR, error="scripted error")
    assert ends[2].finish == FinishReason.LENGTH


@pytest.mark.parametrize(
    ("action", "asked"),
    [
        ("die", ("kill", "itself", signal.SIGKILL)),
        ("stop", ("kill", "itself", signal.SIGSTOP)),
        ("exit", ("exit", 3)),
        ("hang", ("sleep", 1e9)),
    ],
)
def test_a_fault_is_what_it_is_called(monkeypatch: pytest.MonkeyPatch, action: str, asked: tuple[object, ...]) -> None:
    calls: list[tuple[object, ...]] = []
    names = {os.getpid(): "itself"}
    monkeypatch.setattr(os, "kill", lambda pid, number: calls.append(("kill", names.get(pid), number)))
    monkeypatch.setattr(os, "_exit", lambda *arguments: calls.append(("exit", *arguments)))
    sleep = SimpleNamespace(sleep=lambda *arguments: calls.append(("sleep", *arguments)), monotonic=lambda: 0.0)
    executor = ScriptedExecutor(faults=[{"action": action}])
    monkeypatch.setattr(scripted, "time", sleep)
    submit(executor, 1, 3)
    executor.step()
    assert calls == [asked]
    executor.step()
    assert calls == [asked]


def test_a_pace_is_kept_and_what_was_held_up_is_caught_up_with(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 50.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(round(seconds, 6))
        now += seconds

    monkeypatch.setattr(scripted, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now))
    executor = ScriptedExecutor(steps_per_second=100, start_seconds=3)
    submit(executor, 1, 6)
    executor.step()
    now += 0.025
    run(executor)
    assert slept == [3, 0.01, 0, 0, 0.005, 0.01, 0.01]


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


@pytest.mark.parametrize("options", [{"stepspersecond": 3}, {"faults": [{"action": "explode"}]}])
def test_a_script_with_a_mistake_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        ScriptedExecutor(**options)


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


# -- the backend -------------------------------------------------------------------------------------------------------


def planned(checkpoint: Path, **options: str) -> EnginePlan:
    return plan_engine(configured(backend="scripted", **options), inspect(checkpoint), CPU_ONLY)


def test_the_script_is_what_the_executor_is_started_with(checkpoint: Path) -> None:
    plan = planned(checkpoint, script='{"end_after": 3}')
    assert (plan.executor, plan.compiler) == (models.SCRIPTED, None)
    assert plan.executor_options() == {"end_after": 3}


@pytest.mark.parametrize("script", ["{", "[]", "3"])
def test_a_script_is_a_json_object(checkpoint: Path, script: str) -> None:
    with pytest.raises(ConfigError, match=r"option\.script=.* \(environment variable OPTION_SCRIPT\): expected a JSON"):
        planned(checkpoint, script=script)


@pytest.mark.parametrize(
    ("script", "tokens", "given"),
    [('{"memory_tokens": 3}', "5000", 5000), ("{}", "5000", None), ('{"memory_tokens": 3}', None, None)],
)
def test_a_script_that_bounds_max_num_tokens_is_given_it(
    checkpoint: Path, script: str, tokens: str | None, given: int | None
) -> None:
    plan = planned(checkpoint, script=script, **({} if tokens is None else {"max_num_tokens": tokens}))
    assert plan.executor_options().get("max_num_tokens") == given


def test_admission_and_the_script_are_all_that_options_have_an_effect_on() -> None:
    effects = effects_on(Backend.SCRIPTED)
    assert {name for name in effects if has_effect(OPTIONS[name], effects)} == {
        *("max_input_len", "max_output_len", "max_seq_len", "max_rolling_batch_size", "max_num_sequences"),
        *("max_num_tokens", "script", "stream_interval"),
    }
