"""The bundled engine, every trap of OpenVINO GenAI that the executor guards against, and refused images."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from djl_trtllm.backends.openvino.executor import OpenVinoExecutor, generation_config, refusal
from djl_trtllm.backends.openvino.guides import read_vocabulary
from djl_trtllm.backends.openvino.kv_cache import BLOCK_TOKENS, PrefixCacheMirror
from djl_trtllm.backends.openvino.prompt_scorer import PromptScorer
from djl_trtllm.executor.protocol import Ranked, Refusal, Stats, Submit
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, Sampling
from tests.backends.openvino import executor_options
from tests.backends.promises import Promises, finish, generate
from tests.support.steps import Output, deltas_of, unreadable
from tests.support.tables import by_table

PROMPT = "Once upon a time there was a little wolf who lived in the dark wood."


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
            loaded[key] = OpenVinoExecutor(**executor_options(engine, **{"num_kv_blocks": 60, **options}))
        return loaded[key]

    return load_one


@pytest.fixture
def executor(load: Load) -> OpenVinoExecutor:
    return load()


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(PROMPT)


@pytest.fixture
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(PROMPT[: 10 + 8 * k]) for k in range(6)]


class TestOpenVino(Promises):
    pass


def test_a_cancelled_request_ends_late_and_gives_its_cache_back(executor: OpenVinoExecutor, prompt: list[int]) -> None:
    """Cancelling loses unread tokens and sends no event of its own; the blocks come back one step later."""
    outputs: dict[int, Output] = {}
    for round_ in range(4):
        # Each round takes nearly the whole cache of 60 blocks: what a cancel did not give back would be missed.
        for number in range(3):
            executor.submit(Submit(10 * round_ + number, (prompt * 40)[:500], Sampling(60)))
        for _ in range(30):
            for delta in deltas_of(executor.step()):
                outputs.setdefault(delta.request_id, Output()).deltas.append(delta)
        for number in range(3):
            executor.cancel(10 * round_ + number)
        executor.cancel(10 * round_)
        finish(executor, outputs)
        assert not executor.busy
        assert executor.stats().kv_usage == 0
    assert [output.end.finish for output in outputs.values()] == [FinishReason.CANCELLED] * 12
    assert generate(executor, (prompt * 60)[:900], 20).end.finish == FinishReason.LENGTH


def test_nothing_is_read_of_a_request_that_has_nothing(executor: OpenVinoExecutor, prompt: list[int]) -> None:
    """`read()` with nothing queued blocks for ever with the GIL held, as it would in each step of a long prefill."""
    executor.submit(Submit(1, (prompt * 40)[:500], Sampling(2)))
    silent = 0
    while not (deltas := deltas_of(executor.step())):
        silent += 1
    assert silent >= 500 // 64 - 1
    assert deltas[0].request_id == 1
    finish(executor)


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
    ends = [output.end for output in finish(executor).values()]
    assert len(ends) == 6
    assert all(end.finish == FinishReason.LENGTH or "over-committed" in str(end.error) for end in ends)
    assert generate(executor, prompt, 4).end.finish == FinishReason.LENGTH


def test_output_that_cannot_be_read_ends_its_request_and_no_other(
    executor: OpenVinoExecutor, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    unreadable(2, monkeypatch)
    for number in (1, 2):
        executor.submit(Submit(number, prompt, Sampling(8)))
    outputs = finish(executor)
    assert outputs[1].end.finish == FinishReason.LENGTH and len(outputs[1].ids) == 8
    assert "2 log-probabilities for 1 token" in str(outputs[2].end.error) and not outputs[2].ids


def test_a_request_that_goes_on_brings_only_new_tokens_and_ends_if_it_makes_others(
    executor: OpenVinoExecutor, prompt: list[int]
) -> None:
    ids = generate(executor, prompt, 8).ids
    assert generate(executor, prompt, 8, repeated_ids=ids[:3]).ids == ids[3:]
    other = generate(executor, prompt, 8, repeated_ids=[ids[0], ids[1] + 1])
    assert "other tokens" in str(other.end.error) and other.ids == []


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


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(16),
        Sampling(16, presence_penalty=1.0, frequency_penalty=0.5),
        Sampling(16, do_sample=True, top_k=5, seed=3),
        Sampling(16, min_new_tokens=4),
    ],
)
def test_prompts_with_different_salts_share_nothing_and_have_the_same_output(
    load: Load, executor: OpenVinoExecutor, prompt: list[int], sampling: Sampling
) -> None:
    caching, long = load(enable_prefix_caching=True, num_kv_blocks=59), (prompt * 20)[:200]
    salts = ["", "one", "two", "one", "", "two"]
    outputs = []
    for salt in salts:
        caching.submit(Submit(1, long, sampling, cache_salt=salt and f"{salt} {sampling}", logprobs=True))
        outputs.append(finish(caching)[1])
    executor.submit(Submit(1, long, sampling, logprobs=True))
    plain = finish(executor)[1]
    assert [output.ids for output in outputs] == [plain.ids] * len(salts)
    cached = [sum(delta.cached_tokens for delta in output.deltas) for output in outputs]
    assert cached[1:3] == [0, 0]
    assert cached[3:] == [192, 192, 192]


@pytest.mark.parametrize("keys", [False, True])
def test_without_keys_the_prefix_cache_stays_on_where_a_model_takes_no_salts(
    load: Load, prompt: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], keys: bool
) -> None:
    """A model whose embedding has other rows from its end: negative ids are other tokens."""
    read = "djl_trtllm.backends.openvino.executor.read_vocabulary"
    monkeypatch.setattr(read, lambda folder: read_vocabulary(folder) - 1)
    caching, long = load(enable_prefix_caching=True, keeps_keys_apart=keys), (prompt * 20)[:200]
    assert ("cache_salt" in caching.features) == keys
    assert ("is off" in capfd.readouterr().out) == keys
    cached = []
    for _ in range(2):
        caching.submit(Submit(1, long, Sampling(4)))
        cached.append(sum(delta.cached_tokens for delta in finish(caching)[1].deltas))
    assert cached == [0, 0 if keys else 192]


def test_a_penalised_prompt_is_as_fast_whatever_other_keys_have_sent(
    load: Load, executor: OpenVinoExecutor, prompt: list[int]
) -> None:
    caching, first = load(enable_prefix_caching=True, max_num_batched_tokens=32), (prompt * 40)[:200]
    second = [*first[:100], *reversed(first[:100])]
    found = []
    one_block = first[:BLOCK_TOKENS]  # there is nothing to find: the last token is computed anyway
    asked = [(first, "one"), (first, "two"), (first, "two"), (second, "three"), (second, "two"), (one_block, "four")]
    for ids, salt in asked:
        caching.submit(Submit(1, ids, Sampling(3, repetition_penalty=1.3), cache_salt=salt))
        steps = []
        while caching.busy:
            steps.append(caching.step())
        read = next(number for number, step in enumerate(steps) if step.ids)
        found.append((read, sum(step.cached.get(1, 0) for step in steps)))
        tokens = [token for step in steps for token in step.tokens]
        assert tokens == generate(executor, ids, 3, repetition_penalty=1.3).ids
    assert found == [(7, 0), (7, 0), (1, 192), (7, 0), (4, 96), (0, 0)]


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_a_penalised_request_is_cancelled_at_any_time(load: Load, prompt: list[int], steps: int) -> None:
    caching = load(enable_prefix_caching=True, max_num_batched_tokens=48)
    caching.submit(Submit(1, (prompt * 40)[:200], Sampling(9, repetition_penalty=1.3), cache_salt="one"))
    for _ in range(steps):
        caching.step()
    caching.cancel(1)
    assert finish(caching)[1].end.finish is FinishReason.CANCELLED
    caching.submit(Submit(2, prompt, Sampling(2)))
    assert finish(caching)[2].end.finish is FinishReason.LENGTH


def test_a_prompt_that_cannot_be_scored_costs_its_own_request_only(
    tiny_stories: Path, tmp_path: Path, prompt: list[int]
) -> None:
    engine = shutil.copytree(tiny_stories / "engine", tmp_path / "engine")
    executor = OpenVinoExecutor(**executor_options(engine, num_kv_blocks=60, scores_prompts=True))
    kept = (engine / "openvino_model.xml").rename(tmp_path / "kept")
    try:
        for number in range(2):
            executor.submit(Submit(2 * number, prompt, Sampling(2), prompt_logprobs=1))
            executor.submit(Submit(2 * number + 1, prompt, Sampling(30)))
        found = finish(executor)
        assert [found[number].end.finish for number in range(4)] == [FinishReason.ERROR, FinishReason.LENGTH] * 2
        kept.rename(engine / "openvino_model.xml")
        executor.submit(Submit(4, prompt, Sampling(2), prompt_logprobs=1))
        assert finish(executor)[4].end.finish is FinishReason.LENGTH
    finally:
        executor.close()


def test_a_prompt_has_the_log_probabilities_that_its_tokens_had_as_output(
    load: Load, executor: OpenVinoExecutor, prompt: list[int]
) -> None:
    scoring, long = load(scores_prompts=True, enable_prefix_caching=True), (prompt * 40)[:300]
    generated = generate(executor, long, 8, logprobs=True)
    logprobs = [logprob for delta in generated.deltas for logprob in delta.logprobs or ()]
    for salt in ("", "one", ""):  # a prompt in the prefix cache has them too
        scoring.submit(Submit(1, [*long, *generated.ids], Sampling(2), prompt_logprobs=3, cache_salt=salt))
        scoring.submit(Submit(2, prompt, Sampling(40)))
        steps = []
        while scoring.busy:
            steps.append(scoring.step())
        (scores,) = [step.prompts[1] for step in steps if step.prompts]
        assert len(scores) == len(long) + 8
        assert scores[0] is None
        assert all(isinstance(score, Ranked) for score in scores[1:])
        last = [score for score in scores[-8:] if isinstance(score, Ranked)]
        assert [score.logprob for score in last] == pytest.approx(logprobs, abs=2e-3)
        assert [score.ids[0] for score in last] == generated.ids
        assert all(score.logprobs == sorted(score.logprobs, reverse=True) and len(score.ids) == 3 for score in last)


def test_a_piece_of_a_prompt_has_a_bounded_number_of_tokens_and_of_logits(engine: Path, prompt: list[int]) -> None:
    scores = []
    for vocabulary, pieces in ((512, 3), (2**16, 10), (2**23, 599)):
        scorer = PromptScorer(engine, {}, vocabulary)
        scorer.hold(Submit(1, (prompt * 60)[:600], Sampling(1), prompt_logprobs=0))
        assert [scorer.advance(60.0) for _ in range(pieces - 1)] == [None] * (pieces - 1)
        done = scorer.advance(60.0)
        assert done is not None
        scores.append(done[1][1:])
    assert scores[1:] == [pytest.approx(scores[0], abs=2e-3)] * 2


def test_a_prompt_that_is_given_up_while_it_is_scored_leaves_the_next_one_whole(load: Load, prompt: list[int]) -> None:
    scoring, long = load(scores_prompts=True, enable_prefix_caching=True), (prompt * 60)[:600]
    alone = Submit(2, long, Sampling(1), prompt_logprobs=0)
    scoring.submit(alone)
    expected = next(step.prompts for step in iter(scoring.step, None) if step.prompts)
    finish(scoring)
    scoring.submit(Submit(1, (prompt[::-1] * 60)[:600], Sampling(1), prompt_logprobs=0))
    scoring.step()
    scoring.submit(alone)
    scoring.cancel(1)
    steps = []
    while scoring.busy:
        steps.append(scoring.step())
    assert [step.prompts for step in steps if step.prompts] == [expected]
    assert [end.finish for step in steps for end in step.ends] == [FinishReason.CANCELLED, FinishReason.LENGTH]


def test_limits_details_and_statistics(executor: OpenVinoExecutor, prompt: list[int]) -> None:
    limits = executor.limits
    assert (limits.max_sequences, limits.kv_blocks, limits.block_size, limits.max_seq_len) == (8, 60, 32, 1024)
    assert (limits.seeded, limits.repeats, limits.draft_tokens, limits.tries_guides) == (True, False, 0, True)
    details = {"KV cache": "f16", "inference": "f32"}
    assert executor.details == {"OpenVINO": executor.details["OpenVINO"], **details}
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
    stats = Stats(0, 0.0, kv_blocks=60, kv_blocks_used=0, guides_waiting=0, guide_trials=0, guide_seconds=0.0)
    assert executor.stats() == stats


# -- a request as OpenVINO's configuration -----------------------------------------------------------------------------


def test_only_a_sampled_sequence_has_sampling_arguments() -> None:
    plain = generation_config(Submit(1, [5], Sampling(9)))
    greedy = generation_config(Submit(1, [5], Sampling(9, temperature=0.5, top_k=3, top_p=0.5, seed=3)))
    sampling = Sampling(9, 2, True, 0.5, 3, 0.25, 1.5, 0.25, 0.75, seed=2**63)
    config = generation_config(Submit(1, [5], sampling, logprobs=True))
    names = ("temperature", "top_k", "top_p", "rng_seed")
    assert [getattr(greedy, name) for name in names] == [getattr(plain, name) for name in names]
    assert (greedy.do_sample, greedy.max_new_tokens, greedy.min_new_tokens, greedy.logprobs) == (False, 9, 0, 0)
    assert [getattr(config, name) for name in names] == [0.5, 3, 0.25, 2**63]
    assert (config.do_sample, config.max_new_tokens, config.min_new_tokens, config.logprobs) == (True, 9, 2, 1)
    assert (config.repetition_penalty, config.presence_penalty, config.frequency_penalty) == (1.5, 0.25, 0.75)


@pytest.mark.parametrize(("ids", "ignores"), [([], True), ([7, 8], False)])
def test_end_tokens_are_ignored_only_where_no_token_ends_the_sequence(ids: list[int], ignores: bool) -> None:
    config = generation_config(Submit(1, [5], Sampling(9, ignore_eos=True), ids))
    assert (config.ignore_eos, config.stop_token_ids) == (ignores, set(ids))
    assert config.eos_token_id == (ids[0] if ids else -1)


# -- which prompt tokens come from the prefix cache --------------------------------------------------------------------


@by_table("remembered", "prompt", "reused")
def test_whole_blocks_are_reused_up_to_the_first_difference(remembered: str, prompt: str, reused: int) -> None:
    cache = PrefixCacheMirror(capacity=2, block_size=4)
    for tokens in remembered.split():
        if tokens.startswith("?"):
            cache.reused_tokens([ord(token) for token in tokens[1:]])
        else:
            cache.remember([ord(token) for token in tokens])
    assert cache.reused_tokens([ord(token) for token in prompt]) == reused


@given(st.lists(st.lists(st.integers(0, 2), max_size=20), max_size=8), st.lists(st.integers(0, 2), max_size=20))
def test_without_eviction_it_reuses_the_longest_remembered_beginning(known: list[list[int]], prompt: list[int]) -> None:
    cache = PrefixCacheMirror(capacity=100, block_size=4)
    for token_ids in known:
        cache.remember(token_ids)
    whole = range(4, len(prompt), 4)
    expected = max((end for end in whole if any(ids[:end] == prompt[:end] for ids in known)), default=0)
    assert cache.reused_tokens(prompt) == expected


@pytest.mark.parametrize(
    ("error", "told"),
    [(RuntimeError("Check failed:\nno such image\n"), "no such image"), (IndexError(), "IndexError")],
)
def test_what_is_wrong_with_a_prompt_is_its_clients_to_change(error: Exception, told: str) -> None:
    found = refusal(error)
    assert isinstance(found, Refusal)
    assert told in str(found)


def test_too_little_memory_is_no_fault_of_the_prompt() -> None:
    found = refusal(MemoryError("std::bad_alloc"))
    assert not isinstance(found, Refusal)
    assert "std::bad_alloc" in found
