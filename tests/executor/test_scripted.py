from __future__ import annotations

import time

import msgspec
import pytest

from djl_trtllm.executor.protocol import Delta, Finish, Limits, Sampling, Stats, Submit
from djl_trtllm.executor.scripted import ScriptedExecutor


def run(executor: ScriptedExecutor) -> list[Delta]:
    deltas = []
    while executor.busy:
        deltas += executor.step()
    return deltas


def submit(executor: ScriptedExecutor, request_id: int, tokens: int, *prompt: int, **more: object) -> None:
    stop = more.pop("stop", [])
    executor.submit(Submit(request_id, list(prompt or (5, 6, 7)), Sampling(tokens, **more), stop))  # type: ignore[arg-type]


def test_it_repeats_the_prompt_and_ends_at_the_length() -> None:
    executor = ScriptedExecutor()
    submit(executor, 1, 5)
    deltas = run(executor)
    assert [token for delta in deltas for token in delta.token_ids] == [5, 6, 7, 5, 6]
    assert [delta.finish for delta in deltas] == [0, 0, 0, 0, Finish.LENGTH]


def test_a_stop_id_in_the_prompt_ends_the_sequence_unless_it_is_ignored() -> None:
    executor = ScriptedExecutor()
    submit(executor, 1, 5, stop=[6])
    submit(executor, 2, 3, stop=[6], ignore_eos=True)
    by_id = {1: [], 2: []}
    for delta in run(executor):
        by_id[delta.request_id].append((*delta.token_ids, delta.finish))
    assert by_id == {1: [(5, 0), (6, Finish.END)], 2: [(5, 0), (6, 0), (7, Finish.LENGTH)]}


def test_end_after_emits_the_first_stop_id() -> None:
    executor = ScriptedExecutor(end_after=2)
    submit(executor, 1, 9, stop=[2, 3])
    assert [(delta.token_ids, delta.finish) for delta in run(executor)] == [([5], 0), ([6], 0), ([2], Finish.END)]


def test_a_cancelled_request_gets_its_terminal_delta_with_the_next_step() -> None:
    executor = ScriptedExecutor()
    submit(executor, 1, 9)
    executor.step()
    executor.cancel(1)
    executor.cancel(99)
    assert executor.step() == [Delta(1, [], finish=Finish.CANCELLED)]
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
    assert ends[1] == Delta(1, [], finish=Finish.ERROR, error="scripted error")
    assert ends[2].finish == Finish.LENGTH


def test_raise_comes_out_of_step() -> None:
    executor = ScriptedExecutor(faults=[{"action": "raise", "at_token": 0}])
    submit(executor, 1, 3)
    with pytest.raises(RuntimeError, match="scripted engine failure"):
        executor.step()


def test_a_pace_is_kept_and_not_caught_up_with() -> None:
    executor = ScriptedExecutor(steps_per_second=100)
    submit(executor, 1, 5)
    started = time.monotonic()
    run(executor)
    assert time.monotonic() - started >= 0.04


def test_limits_and_statistics_are_those_of_the_script() -> None:
    executor = ScriptedExecutor(max_sequences=4, kv_blocks=9, block_size=16, max_seq_len=100)
    assert executor.limits == Limits(max_sequences=4, kv_blocks=9, block_size=16, max_seq_len=100)
    submit(executor, 1, 5)
    executor.step()
    assert executor.stats() == Stats(running=1, kv_usage=0.25)


@pytest.mark.parametrize("options", [{"stepspersecond": 3}, {"faults": [{"action": "explode"}]}])
def test_a_script_with_a_mistake_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        ScriptedExecutor(**options)


def test_a_start_error_comes_out_of_loading() -> None:
    with pytest.raises(RuntimeError, match="no such engine"):
        ScriptedExecutor(start_error="no such engine")
