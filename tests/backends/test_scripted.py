"""The executor that repeats the prompt. Nothing here waits."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from djl_trtllm.backends.base import effects_on
from djl_trtllm.backends.effects import has_effect
from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.backends.scripted import executor as scripted
from djl_trtllm.backends.scripted.executor import ScriptedExecutor, ScriptedPoolingExecutor, vector_of
from djl_trtllm.config import Backend
from djl_trtllm.config.options import OPTIONS
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.errors import ConfigError
from djl_trtllm.executor.protocol import Limits, Stats, Submit
from djl_trtllm.model import inspect
from djl_trtllm.request import FinishReason, Pooling, Sampling
from tests.engines.helpers import CPU_ONLY, configured
from tests.support import models
from tests.support.encoders import scripted_encoder
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
        ("end", ("kill", "the server", signal.SIGKILL)),
    ],
)
def test_a_fault_is_what_it_is_called(monkeypatch: pytest.MonkeyPatch, action: str, asked: tuple[object, ...]) -> None:
    calls: list[tuple[object, ...]] = []
    names = {os.getpid(): "itself", os.getppid(): "the server"}
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


def test_a_fault_is_at_its_token_and_of_the_requests_that_it_selects() -> None:
    executor = ScriptedExecutor(faults=[{"action": "raise", "at_token": 2, "max_new_tokens": 9}])
    submit(executor, 1, 5)
    assert len(run(executor)) == 5
    submit(executor, 2, 9)
    for _ in range(2):
        executor.step()
    with pytest.raises(RuntimeError, match="scripted engine failure"):
        executor.step()


def test_log_probabilities_are_there_where_they_are_asked_for() -> None:
    executor = ScriptedExecutor()
    executor.submit(Submit(1, [5, 6, 7], Sampling(2), logprobs=True, prompt_logprobs=1))
    submit(executor, 2, 1)
    first, second = executor.step(), executor.step()
    assert (first.prompts, second.prompts) == ({1: [None, -0.5, -0.5]}, {}), "once"
    assert [(each.request_id, each.logprobs) for each in deltas_of(first)] == [(1, [-0.5]), (2, None)]


@pytest.mark.parametrize(
    ("prompt", "goes_on"),
    [([1, 2, 3], [1, 2, 3, 1]), ([1, 2, 1, 2, 1], [2, 1, 2, 1]), ([4], [4, 4]), ([1, 1, 2, 1, 1], [2, 1, 1, 2])],
)
def test_a_prompt_that_repeats_itself_goes_on_with_its_period(prompt: list[int], goes_on: list[int]) -> None:
    executor = ScriptedExecutor()
    submit(executor, 1, len(goes_on), *prompt)
    assert [token for delta in run(executor) for token in delta.token_ids] == goes_on


def test_a_prefill_takes_its_time_for_requests_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(scripted, "time", SimpleNamespace(sleep=slept.append, monotonic=lambda: 0.0))
    executor = ScriptedExecutor(prefill_seconds=0.5)
    submit(executor, 1, 2)
    run(executor)
    submit(executor, 2, 1)
    run(executor)
    assert slept == [0, 0.5, 0.5]


def pooling(
    task: str, monkeypatch: pytest.MonkeyPatch, **script: object
) -> tuple[ScriptedPoolingExecutor, list[object]]:
    done: list[object] = []
    monkeypatch.setattr(scripted, "time", SimpleNamespace(sleep=done.append))
    monkeypatch.setattr(os, "kill", lambda pid, number: done.append((pid, number)))
    limits = {"max_sequences": 4, "max_seq_len": 99, "max_num_tokens": 64}
    return ScriptedPoolingExecutor(script=script, task=task, **limits), done


def test_vectors_follow_from_the_ids_and_have_length_1_unless_asked_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pooling("embed", monkeypatch)[0].limits.dimensions == 8
    executor, done = pooling("embed", monkeypatch, dimensions=3, step_seconds=0.25, fatal_token=9)
    assert (executor.limits.dimensions, executor.limits.max_sequences, executor.limits.max_seq_len) == (3, 4, 99)
    for number, more in enumerate(({}, {"activate": False})):
        executor.submit(Submit(number, [5, 6], Sampling(1), pooling=Pooling(**more)))  # type: ignore[arg-type]
    found = {number: np.frombuffer(data, np.float32) for number, data in executor.step().vectors.items()}
    assert found[1] == pytest.approx(vector_of([5, 6], 3)) and np.linalg.norm(found[0]) == pytest.approx(1)
    assert done == [0.25]
    expected = [np.cos(k * 5) + np.cos(2 * k * 6) for k in (1, 2, 3)]
    assert found[1] == pytest.approx(expected, rel=1e-5)
    executor.submit(Submit(2, [5, 9], Sampling(1), pooling=Pooling()))
    executor.step()
    assert done == [0.25, 0.25, (os.getpid(), signal.SIGKILL)]


def test_a_score_is_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, done = pooling("score", monkeypatch, dimensions=3)
    executor.submit(Submit(1, [5, 6], Sampling(1), pooling=Pooling(task="score")))
    (score,) = np.frombuffer(executor.step().vectors[1], np.float32)
    assert executor.limits.dimensions == 1 and 0 < score < 1 and done == [0]


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


def test_a_model_that_embeds_gets_the_script_and_its_own_length(tmp_path: Path) -> None:
    encoder = scripted_encoder(tmp_path)
    for tokens, given in ((None, 1024), ("512", 512)):
        plan = planned(encoder, script='{"dimensions": 3}', **({} if tokens is None else {"max_num_tokens": tokens}))
        length = inspect(encoder).shape.max_position_embeddings
        assert plan.executor_options() == {
            "script": {"dimensions": 3},
            "task": "embed",
            "max_sequences": plan.max_sequences,
            "max_seq_len": length,
            "max_num_tokens": given,
        }
        assert plan.max_input_len == length
