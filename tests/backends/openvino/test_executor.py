"""The bundled engine, and every trap of OpenVINO GenAI that the executor guards against."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.backends.openvino.executor import OpenVinoExecutor
from djl_trtllm.executor.protocol import Delta, Stats, Submit
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, Sampling

PROMPT = "Once upon a time there was a little wolf who lived in the dark wood."
END_ID = 2


@pytest.fixture(scope="module")
def engine(tiny_stories: Path) -> Path:
    """The bundled model's compiled engine."""
    return tiny_stories / "engine"


Load = Callable[..., OpenVinoExecutor]


@pytest.fixture(scope="module")
def load(engine: Path) -> Load:
    """`load(**options)`: an executor, the same for equal options."""
    loaded: dict[tuple[object, ...], OpenVinoExecutor] = {}

    def load_one(**options: object) -> OpenVinoExecutor:
        key = tuple(sorted(options.items()))
        if key not in loaded:
            values = {
                "engine_dir": str(engine),
                "max_num_batched_tokens": 64,
                "num_kv_blocks": 60,
                "enable_prefix_caching": False,
                "kv_cache_precision": "f16",
                "inference_precision": "f32",
                "max_sequences": 8,
                "max_seq_len": 1024,
                **options,
            }
            loaded[key] = OpenVinoExecutor(**values)  # type: ignore[arg-type]
        return loaded[key]

    return load_one


@pytest.fixture
def executor(load: Load) -> OpenVinoExecutor:
    return load()


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(PROMPT)


class Output:
    """What came of one request."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    @property
    def ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def end(self) -> Delta:
        """The terminal delta: there is one, and it is the last."""
        assert [bool(delta.finish) for delta in self.deltas] == [False] * (len(self.deltas) - 1) + [True]
        return self.deltas[-1]


def finish(
    executor: OpenVinoExecutor, outputs: dict[int, Output] | None = None, steps: int = 2000
) -> dict[int, Output]:
    """Step until nothing is to do, at most so often."""
    outputs = {} if outputs is None else outputs
    for _ in range(steps):
        if not executor.busy:
            break
        for delta in executor.step():
            outputs.setdefault(delta.request_id, Output()).deltas.append(delta)
    else:
        assert steps < 2000, "still busy"
    return outputs


def generate(
    executor: OpenVinoExecutor,
    prompt: list[int],
    tokens: int = 16,
    stop: tuple[int, ...] = (),
    logprobs: bool = False,
    **s: Any,
) -> Output:
    """One request, alone."""
    executor.submit(Submit(1, prompt, Sampling(tokens, **s), list(stop), logprobs=logprobs))
    return finish(executor)[1]


def test_greedy_output_is_the_same_alone_and_among_others(executor: OpenVinoExecutor, tokenizer: Tokenizer) -> None:
    prompts = [tokenizer.encode(PROMPT[: 10 + 8 * k]) for k in range(6)]
    alone = [generate(executor, prompt).ids for prompt in prompts]
    for number, prompt in enumerate(prompts):
        executor.submit(Submit(number, prompt, Sampling(16)))
    together = finish(executor)
    assert [together[number].ids for number in range(6)] == alone
    assert all(output.end.finish == FinishReason.LENGTH for output in together.values())


def test_a_prompt_longer_than_an_iteration_is_taken_in_parts(executor: OpenVinoExecutor, prompt: list[int]) -> None:
    long = (prompt * 40)[:600]
    output = generate(executor, long, 4)
    assert (len(output.ids), output.end.finish) == (4, FinishReason.LENGTH)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(4, do_sample=True, temperature=0.0),
        Sampling(4, do_sample=True, top_p=0.0),
        Sampling(4, presence_penalty=3.0),
        Sampling(4, repetition_penalty=0.0),
        Sampling(0),
    ],
    ids=["temperature", "top_p", "presence_penalty", "repetition_penalty", "max_new_tokens"],
)
def test_a_value_out_of_range_ends_its_request_with_an_error_and_no_other(
    executor: OpenVinoExecutor, prompt: list[int], sampling: Sampling
) -> None:
    executor.submit(Submit(1, prompt, Sampling(6)))
    executor.step()
    executor.submit(Submit(2, prompt, sampling))
    outputs = finish(executor)
    assert outputs[2].end.finish == FinishReason.ERROR
    assert outputs[2].end.error
    assert outputs[1].end.finish == FinishReason.LENGTH
    assert generate(executor, prompt, 3).end.finish == FinishReason.LENGTH


def test_an_empty_prompt_is_a_terminal_error(executor: OpenVinoExecutor) -> None:
    executor.submit(Submit(1, [], Sampling(4)))
    assert executor.busy
    assert finish(executor)[1].end.finish == FinishReason.ERROR


def test_a_finished_id_may_be_used_again(executor: OpenVinoExecutor, prompt: list[int]) -> None:
    assert generate(executor, prompt).ids == generate(executor, prompt).ids


def test_a_cancelled_request_ends_late_and_gives_its_cache_back(executor: OpenVinoExecutor, prompt: list[int]) -> None:
    """Cancelling loses unread tokens and sends no event of its own; the blocks come back one step later."""
    outputs: dict[int, Output] = {}
    for round_ in range(4):
        # Each round takes nearly the whole cache of 60 blocks: what a cancel did not give back would be missed.
        for number in range(3):
            executor.submit(Submit(10 * round_ + number, (prompt * 40)[:500], Sampling(60)))
        for _ in range(30):
            for delta in executor.step():
                outputs.setdefault(delta.request_id, Output()).deltas.append(delta)
        for number in range(3):
            executor.cancel(10 * round_ + number)
        executor.cancel(10 * round_)
        finish(executor, outputs)
        assert not executor.busy
        assert executor.stats().kv_usage == 0
    assert [output.end.finish for output in outputs.values()] == [FinishReason.CANCELLED] * 12
    assert generate(executor, (prompt * 60)[:900], 20).end.finish == FinishReason.LENGTH


def test_cancelling_one_does_not_disturb_another(executor: OpenVinoExecutor, prompt: list[int]) -> None:
    alone = generate(executor, prompt, 20).ids
    for number in (1, 2, 3):
        executor.submit(Submit(number, prompt, Sampling(20)))
    outputs = finish(executor, steps=4)
    executor.cancel(2)
    finish(executor, outputs)
    assert [outputs[number].ids for number in (1, 3)] == [alone, alone]
    assert outputs[2].end.finish == FinishReason.CANCELLED


def test_a_cancel_before_the_first_step_and_of_unknown_ids(executor: OpenVinoExecutor, prompt: list[int]) -> None:
    executor.submit(Submit(1, prompt, Sampling(20)))
    executor.cancel(1)
    executor.cancel(77)
    assert finish(executor)[1].end == Delta(1, [], finish=FinishReason.CANCELLED)


def test_nothing_is_read_of_a_request_that_has_nothing(executor: OpenVinoExecutor, prompt: list[int]) -> None:
    """`read()` with nothing queued blocks for ever with the GIL held, as it would in each step of a long prefill."""
    executor.submit(Submit(1, (prompt * 40)[:500], Sampling(2)))
    silent = 0
    while not (deltas := executor.step()):
        silent += 1
    assert silent >= 500 // 64 - 1
    assert deltas[0].request_id == 1
    finish(executor)


def test_the_end_id_ends_a_sequence_and_is_its_last_token(executor: OpenVinoExecutor, prompt: list[int]) -> None:
    third = generate(executor, prompt, 8).ids[2]
    output = generate(executor, prompt, 8, stop=(third,))
    assert (output.ids[-1], output.end.finish) == (third, FinishReason.STOP)
    assert output.ids.count(third) == 1


def test_every_stop_id_counts_and_not_only_the_first(executor: OpenVinoExecutor, prompt: list[int]) -> None:
    third = generate(executor, prompt, 8).ids[2]
    output = generate(executor, prompt, 8, stop=(END_ID, third))
    assert (output.ids[-1], output.end.finish) == (third, FinishReason.STOP)


def test_ignoring_the_end_leaves_stop_ids_in_force(executor: OpenVinoExecutor, prompt: list[int]) -> None:
    """OpenVINO's ignore_eos switches stop ids off as well."""
    third = generate(executor, prompt, 8).ids[2]
    output = generate(executor, prompt, 8, stop=(third,), ignore_eos=True)
    assert (output.ids[-1], output.end.finish) == (third, FinishReason.STOP)


def test_ignoring_the_end_goes_on_to_the_length(executor: OpenVinoExecutor, prompt: list[int]) -> None:
    tokens = 300
    ended = generate(executor, prompt, tokens, stop=(END_ID,))
    ignored = generate(executor, prompt, tokens, ignore_eos=True)
    assert (len(ignored.ids), ignored.end.finish) == (tokens, FinishReason.LENGTH)
    if ended.end.finish == FinishReason.STOP:
        assert ended.ids[-1] == END_ID
        assert ignored.ids[: len(ended.ids)] == ended.ids


def test_min_new_tokens_keeps_the_end_away(executor: OpenVinoExecutor, prompt: list[int]) -> None:
    first = generate(executor, prompt, 8).ids[0]
    assert len(generate(executor, prompt, 8, stop=(first,)).ids) == 1
    output = generate(executor, prompt, 8, stop=(first,), min_new_tokens=5)
    assert len(output.ids) >= 5
    assert first not in output.ids[:4]


def test_log_probabilities_come_only_when_asked_for(executor: OpenVinoExecutor, prompt: list[int]) -> None:
    silent, told = generate(executor, prompt), generate(executor, prompt, logprobs=True)
    assert all(delta.logprobs is None for delta in silent.deltas)
    logprobs = [value for delta in told.deltas for value in delta.logprobs or []]
    assert told.ids == silent.ids
    assert len(logprobs) == len(told.ids)
    assert all(isinstance(value, float) and value <= 0 for value in logprobs)
    assert any(logprobs)


def test_a_seed_gives_the_same_tokens_alone_and_among_others(executor: OpenVinoExecutor, prompt: list[int]) -> None:
    sampled: dict[str, Any] = {"do_sample": True, "temperature": 1.5}
    alone = generate(executor, prompt, 24, seed=7, **sampled).ids
    for number, seed in enumerate((7, 8, 2**64 - 1, 7)):
        executor.submit(Submit(number, prompt, Sampling(24, seed=seed, **sampled)))
    outputs = finish(executor)
    assert outputs[0].ids == outputs[3].ids == alone
    assert len({tuple(output.ids) for output in outputs.values()}) == 3


@pytest.mark.parametrize("top_k", [0, 1])
def test_top_k_0_is_the_whole_vocabulary_and_1_is_greedy(
    executor: OpenVinoExecutor, prompt: list[int], top_k: int
) -> None:
    greedy = generate(executor, prompt).ids
    sampled = generate(executor, prompt, do_sample=True, temperature=3.0, top_k=top_k, seed=3).ids
    assert (sampled == greedy) == (top_k == 1)


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 2.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}]
)
def test_each_penalty_changes_the_output(
    executor: OpenVinoExecutor, prompt: list[int], penalty: dict[str, Any]
) -> None:
    plain = generate(executor, prompt, 60, ignore_eos=True).ids
    assert generate(executor, prompt, 60, ignore_eos=True, **penalty).ids != plain


def test_a_request_that_the_engine_dropped_ends_with_an_error(load: Load, prompt: list[int]) -> None:
    """More than fits, which the rolling batch never submits: no request may hang."""
    executor = load(num_kv_blocks=12)
    for number in range(6):
        executor.submit(Submit(number, (prompt * 40)[:350], Sampling(30)))
    outputs = finish(executor)
    assert len(outputs) == 6
    for output in outputs.values():
        assert output.end.finish in (FinishReason.LENGTH, FinishReason.ERROR)
        if output.end.finish == FinishReason.ERROR:
            assert "over-committed" in str(output.end.error)
    assert generate(executor, prompt, 4).end.finish == FinishReason.LENGTH


def test_what_fits_to_its_end_is_never_dropped(load: Load, prompt: list[int]) -> None:
    executor = load(num_kv_blocks=24)
    # Six sequences of ceil((64 + 32) / 32) + 1 = 4 blocks each.
    for number in range(6):
        executor.submit(Submit(number, (prompt * 9)[:64], Sampling(32)))
    outputs = finish(executor, steps=8)
    executor.cancel(0)
    finish(executor, outputs)
    assert [outputs[number].end.finish for number in range(1, 6)] == [FinishReason.LENGTH] * 5


def test_reused_prefixes_are_reported_once_and_change_nothing(
    load: Load, executor: OpenVinoExecutor, prompt: list[int]
) -> None:
    caching = load(enable_prefix_caching=True)
    long = (prompt * 20)[:200]
    plain = generate(executor, long)
    first, second = generate(caching, long), generate(caching, long)
    assert sum(delta.cached_tokens for delta in plain.deltas + first.deltas) == 0
    assert [delta.cached_tokens for delta in second.deltas] == [192] + [0] * (len(second.deltas) - 1)
    assert first.ids == second.ids == plain.ids


def test_limits_details_and_statistics(executor: OpenVinoExecutor, prompt: list[int]) -> None:
    limits = executor.limits
    assert (limits.max_sequences, limits.kv_blocks, limits.block_size, limits.max_seq_len) == (8, 60, 32, 1024)
    assert executor.details
    executor.submit(Submit(1, prompt, Sampling(4)))
    executor.step()
    assert executor.stats().running == 1
    # A block for the prompt and the first token, and what OpenVINO takes besides.
    used = executor.stats().kv_blocks_used
    assert used
    assert -(-len(prompt) // 32) <= used <= -(-len(prompt) // 32) + 2
    assert executor.stats().kv_blocks == 60
    assert executor.stats().kv_usage == pytest.approx(used / 60)
    finish(executor)
    assert executor.stats() == Stats(0, 0.0, kv_blocks=60, kv_blocks_used=0)


def test_torch_is_not_imported_for_serving(engine: Path) -> None:
    import subprocess
    import sys

    program = "import sys, djl_trtllm.backends.openvino.executor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
