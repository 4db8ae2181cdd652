"""What every executor that generates promises: an engine's test module has a class that derives from `Promises`.

The module has two fixtures: `executor`, which is idle, and `prompts`, six of different lengths.
"""

from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.executor.protocol import Submit
from djl_trtllm.request import FinishReason, Sampling
from tests.support.steps import Output, deltas_of

END = 2
"""The end token of the bundled model."""


def step(executor: Any, steps: int, outputs: dict[int, Output] | None = None) -> dict[int, Output]:
    """Run at most this number of iterations, and none where nothing is to do."""
    outputs = {} if outputs is None else outputs
    for _ in range(steps):
        if not executor.busy:
            break
        for delta in deltas_of(executor.step()):
            outputs.setdefault(delta.request_id, Output()).deltas.append(delta)
    return outputs


def finish(executor: Any, outputs: dict[int, Output] | None = None) -> dict[int, Output]:
    """Step until nothing is to do."""
    outputs = step(executor, 20_000, outputs)
    assert not executor.busy
    return outputs


def generate(executor: Any, prompt: list[int], tokens: int = 16, **given: Any) -> Output:
    """One request, alone. What `Submit` has no field for is of its sampling."""
    own = {name: given.pop(name) for name in Submit.__struct_fields__ if name in given}
    executor.submit(Submit(1, prompt, Sampling(tokens, **given), **own))
    return finish(executor)[1]


class Promises:
    error: type = str
    """What ends a request whose parameters the engine finds wrong."""

    def test_greedy_output_is_the_same_alone_and_among_others(self, executor: Any, prompts: list[list[int]]) -> None:
        alone = [generate(executor, prompt).ids for prompt in prompts]
        for number, prompt in enumerate(prompts):
            executor.submit(Submit(number, prompt, Sampling(16)))
        together = finish(executor)
        assert [together[number].ids for number in range(6)] == alone
        assert all(output.end.finish in (FinishReason.LENGTH, FinishReason.STOP) for output in together.values())

    @pytest.mark.parametrize(
        "sampling",
        [
            Sampling(4, do_sample=True, temperature=-1.0),
            Sampling(4, do_sample=True, top_p=0.0),
            Sampling(4, presence_penalty=3.0),
            Sampling(4, repetition_penalty=0.0),
            Sampling(0),
        ],
        ids=["temperature", "top_p", "presence_penalty", "repetition_penalty", "max_new_tokens"],
    )
    def test_a_request_that_the_engine_finds_wrong_ends_alone(
        self, executor: Any, prompts: list[list[int]], sampling: Sampling
    ) -> None:
        executor.submit(Submit(1, prompts[0], Sampling(6, ignore_eos=True)))
        outputs = step(executor, 1)
        executor.submit(Submit(2, prompts[0], sampling))
        finish(executor, outputs)
        assert outputs[2].end.finish == FinishReason.ERROR
        assert outputs[2].end.error and isinstance(outputs[2].end.error, self.error)
        assert (outputs[1].end.finish, len(outputs[1].ids)) == (FinishReason.LENGTH, 6)

    @pytest.mark.parametrize(("before", "ignore_eos"), [((), False), ((END,), False), ((), True), ((END,), True)])
    def test_a_stop_id_ends_a_sequence_and_is_its_last_token(
        self, executor: Any, prompts: list[list[int]], before: tuple[int, ...], ignore_eos: bool
    ) -> None:
        free = generate(executor, prompts[0], 8, ignore_eos=True).ids
        output = generate(executor, prompts[0], 8, stop_token_ids=[*before, free[2]], ignore_eos=ignore_eos)
        assert output.ids == free[: free.index(free[2]) + 1] and output.end.finish == FinishReason.STOP

    def test_log_probabilities_come_only_when_asked_for(self, executor: Any, prompts: list[list[int]]) -> None:
        silent, told = (generate(executor, prompts[1], 6, ignore_eos=True, logprobs=wanted) for wanted in (False, True))
        assert all(delta.logprobs is None for delta in silent.deltas) and silent.ids == told.ids
        values = [value for delta in told.deltas for value in delta.logprobs or []]
        assert len(values) == 6 and all(isinstance(value, float) and value <= 0 for value in values) and any(values)

    def test_a_seed_gives_the_same_tokens_alone_and_among_others(self, executor: Any, prompts: list[list[int]]) -> None:
        sampled: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "ignore_eos": True}
        alone = generate(executor, prompts[0], 24, seed=7, **sampled).ids
        for number, seed in enumerate((7, 8, 2**64 - 1, 7)):
            executor.submit(Submit(number, prompts[0], Sampling(24, seed=seed, **sampled)))
        outputs = finish(executor)
        assert outputs[0].ids == outputs[3].ids == alone
        assert len({tuple(output.ids) for output in outputs.values()}) == 3
