"""Requests whose executor is lost go on in the next one."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from msgspec.structs import replace

from djl_trtllm.batching.blame import Loss
from djl_trtllm.batching.rolling_batch import can_resume, resumed
from djl_trtllm.errors import GenerationError, HarmfulRequestError
from djl_trtllm.executor.protocol import Limits, Step, Submit
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FIELDS, Adapter, FinishReason, Guide, GuideKind, Resume, Sampling
from tests.batching.helpers import Bench, FakeExecutor
from tests.support.steps import Delta
from tests.support.tables import by_rows, by_table

# -- Which sequences can go on in another engine process, and with what message.


LIMITS = Limits(max_sequences=4, kv_blocks=0, block_size=32, max_seq_len=100)


def message(sampling: dict[str, Any] | None = None, **fields: Any) -> Submit:
    return Submit(7, [1, 2, 3], Sampling(**{"max_new_tokens": 20, **(sampling or {})}), **fields)


STATEFUL = [
    message({"repetition_penalty": 1.1}),
    message({"presence_penalty": 0.5}),
    message({"frequency_penalty": -0.5}),
    message({"no_repeat_ngram_size": 2}),
    message({"min_new_tokens": 6}),
    message({"beam_width": 2}),
    message(guide=Guide(GuideKind.JSON_OBJECT)),
    message(bad=("wolf",)),
]


@by_rows("one", STATEFUL)
def test_what_an_engine_remembers_beside_the_tokens_would_be_lost(one: Submit) -> None:
    assert can_resume(one, 0, LIMITS)
    assert not can_resume(one, 5, LIMITS)


def test_a_minimum_length_is_no_matter_once_it_is_reached() -> None:
    one = message({"min_new_tokens": 6})
    assert can_resume(one, 6, LIMITS)
    assert resumed(one, [9] * 6).sampling.min_new_tokens == 0


@pytest.mark.parametrize(
    "one",
    [
        message(),
        message({"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3}),
        message({"ignore_eos": True}),
        message(stop=["wolf"], stop_token_ids=[2], logprobs=True, top_logprobs=3),
        message(adapter=Adapter("tales", 1, "/tales")),
    ],
    ids=str,
)
def test_everything_else_goes_on(one: Submit) -> None:
    assert can_resume(one, 5, LIMITS)


@pytest.mark.parametrize(("longest", "possible"), [(0, True), (8, True), (7, False)])
def test_the_new_prompt_has_to_be_short_enough_for_the_engine(longest: int, possible: bool) -> None:
    assert can_resume(message(), 5, replace(LIMITS, max_prompt_len=longest)) is possible


def test_where_an_engine_makes_the_same_again_neither_length_nor_minimum_matters() -> None:
    repeating = replace(LIMITS, max_prompt_len=3, repeats=True)
    assert can_resume(message({"min_new_tokens": 6}), 5, repeating)
    assert not can_resume(message({"beam_width": 2}), 5, repeating)


def test_it_goes_on_after_the_tokens_that_it_has() -> None:
    one = message({"ignore_eos": True}, stop=["wolf"], logprobs=True)
    assert resumed(one, []) == one
    assert resumed(replace(one, prompt_ids=array("i", [1, 2, 3])), []) == one  # as a list
    new = resumed(one, [4, 5])
    assert new.prompt_ids == [1, 2, 3, 4, 5]
    assert new.sampling == replace(one.sampling, max_new_tokens=18)
    assert replace(new, prompt_ids=one.prompt_ids, sampling=one.sampling) == one


def test_where_an_engine_takes_no_tokens_after_prompts_it_makes_the_same_again() -> None:
    one = replace(message({"do_sample": True, "seed": 3}), prompt_ids=array("i", [1, 2, 3]))
    again = replace(one, prompt_ids=[1, 2, 3], repeated_ids=[4, 5])
    assert resumed(one, [4, 5], repeats=True) == again
    assert resumed(one, [], repeats=True) == replace(one, prompt_ids=[1, 2, 3])


def test_exactly_the_fields_that_say_so_are_adjusted() -> None:
    one = replace(message({"min_new_tokens": 1, "do_sample": True, "seed": 3}), prompt_logprobs=1)
    one = replace(one, logit_bias=((4, 1.0),), cache_salt="team")
    before, after = (
        {
            name: field.read(each)
            for name, field in FIELDS.items()
            if hasattr(each, name) or hasattr(each.sampling, name)
        }
        for each in (one, resumed(one, [4]))
    )
    adjusted = {name for name, field in FIELDS.items() if field.trait.resume is Resume.ADJUSTED}
    assert {name for name in before if before[name] != after[name]} == adjusted | {"prompt_ids", "sampling"}


def test_a_seeded_one_does_not_draw_the_numbers_of_its_beginning_again() -> None:
    one = message({"do_sample": True, "seed": 3})
    seeds = [resumed(one, [9] * generated).sampling.seed for generated in range(5)]
    assert seeds[0] == 3
    assert len(set(seeds)) == 5
    assert all(seed is not None and 0 <= seed < 2**64 for seed in seeds)
    assert resumed(one, [9, 9]) == resumed(one, [9, 9])
    neighbour = message({"do_sample": True, "seed": 4})
    assert resumed(neighbour, [9]).sampling.seed not in seeds


LENGTH, CANCELLED, ERROR = FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.ERROR
GONE = GenerationError("gone")


def replaced(bench: Bench) -> Loss:
    """Lose the executor, and get another one."""
    loss = bench.batch.lose(bench.executor, GONE)
    attach(bench)
    return loss


def attach(bench: Bench) -> FakeExecutor:
    """Another executor; the one before."""
    old, bench.executor = bench.executor, FakeExecutor(bench.executor.limits)
    bench.batch.attach(bench.executor)
    return old


@pytest.mark.parametrize("tokens", [[], [7]])
def test_a_prompt_is_scored_once(tokenizer: Tokenizer, tokens: list[int]) -> None:
    bench = Bench(tokenizer)
    _, consumer = bench.submit(max_new_tokens=4, prompt_logprobs=0)
    scores: list[Any] = [None, *[-1.0] * (len(bench.executor.submitted[0].prompt_ids) - 1)]
    bench.batch.process([Step(prompts={0: scores}, ids=[0] * len(tokens), tokens=tokens)])
    replaced(bench)
    assert bench.executor.submitted[0].prompt_logprobs is None
    bench.batch.process([Step(prompts={0: scores}, ids=[0], tokens=[8])])
    assert sum(chunk.prompt is not None for chunk in consumer.updates) == 1


def test_scores_that_do_not_fit_the_prompt_end_their_own_request_only(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    (_, wrong), (_, other) = bench.submit(prompt_logprobs=0), bench.submit(max_new_tokens=1)
    bench.batch.process([Step(prompts={0: [None]}, ids=[0, 1], tokens=[8, 9])])
    bench.step(Delta(0, [], finish=CANCELLED), Delta(1, [], finish=LENGTH))
    assert (wrong.finished().reason, other.finished().reason) == (ERROR, LENGTH)
    assert bench.batch.idle


def test_prompt_and_tokens_are_the_new_prompt(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    generation, consumer = bench.submit(max_new_tokens=4)
    bench.step(Delta(0, [8, 9]))
    assert replaced(bench) == Loss(resumed=1, ended=0)
    (message,) = bench.executor.submitted
    assert (message.prompt_ids, message.sampling.max_new_tokens) == ([5, 6, 7, 8, 9], 2)
    bench.step(Delta(0, [10]), Delta(0, [11], finish=LENGTH))
    assert consumer.ids() == [8, 9, 10, 11]
    assert consumer.finished().generated_tokens == 4
    assert (generation.record.resumes, bench.statistics.resumed, bench.batch.idle) == (1, 1, True)


def test_the_lost_come_before_those_that_wait_and_in_their_order(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=2)
    for _ in range(4):
        bench.submit()
    bench.step(Delta(0, [8] * 4), Delta(1, [8] * 4))
    bench.batch.lose(bench.executor, GONE)
    assert (bench.batch.running, bench.batch.waiting) == (0, 4)
    attach(bench)
    assert bench.executor.ids == [0, 1]
    bench.step(Delta(0, [8], finish=LENGTH), Delta(1, [8], finish=LENGTH))
    assert bench.executor.ids == [0, 1, 2, 3]


def test_nothing_starts_while_there_is_no_executor_and_requests_may_come(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    bench.batch.lose(bench.executor, GONE)
    generation, consumer = bench.submit()
    assert (bench.executor.ids, bench.batch.waiting) == ([], 1)
    bench.batch.cancel(generation)
    assert (consumer.finished().reason, bench.batch.idle) == (CANCELLED, True)
    bench.submit()
    attach(bench)
    assert bench.executor.ids == [1]


def test_what_cannot_go_on_ends_with_the_error_and_all_its_sequences(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=2)
    _, penalised = bench.submit(n=3, do_sample=True, presence_penalty=0.5)
    bench.step(Delta(0, [8]))
    assert replaced(bench) == Loss(resumed=0, ended=1)
    assert [penalised.finished(index).error for index in range(3)] == [GONE] * 3
    assert (bench.executor.ids, bench.batch.idle) == ([], True)


def test_without_resuming_what_runs_ends_and_what_waits_stays(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=1, resume=False)
    _, running = bench.submit()
    bench.submit()
    assert replaced(bench) == Loss(resumed=0, ended=1)
    assert running.finished().error is GONE
    assert bench.executor.ids == [1]


@by_table("sampling", "tokens", "reseeded")
def test_a_seeded_request_that_went_on_says_so(
    tokenizer: Tokenizer, sampling: dict[str, Any], tokens: int, reseeded: bool
) -> None:
    bench = Bench(tokenizer)
    generation, consumer = bench.submit(**sampling)
    bench.step(Delta(0, [8] * tokens))
    assert not generation.record.reseeded
    replaced(bench)
    bench.step(Delta(0, [9], finish=LENGTH))
    assert (generation.record.reseeded, consumer.finished().reseeded) == (reseeded, reseeded)


def test_reused_prompt_tokens_are_counted_once(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    _, consumer = bench.submit()
    bench.step(Delta(0, [8], cached_tokens=2))
    replaced(bench)
    bench.step(Delta(0, [9], cached_tokens=4, finish=LENGTH))
    assert (bench.statistics.reused_prompt_tokens, consumer.finished().cached_tokens) == (2, 2)


# -- a request that ends each executor it runs in ----------------------------------------------------------------------


LONG: dict[str, Any] = {"max_output_len": 200, "max_seq_len": 300}


def passing(bench: Bench, times: int = 4, but: tuple[int, ...] = ()) -> None:
    """Tokens for all that runs, except some."""
    for _ in range(times):
        bench.step(*(Delta(each, [8]) for each in bench.executor.ids if each not in but))


def test_it_alone_ends_and_the_same_request_is_refused(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, **LONG)
    streams = [bench.submit([5, number], max_new_tokens=200)[1] for number in range(3)]
    passing(bench)
    _, poison = bench.submit([9, 9])
    assert replaced(bench) == Loss(resumed=4, ended=0, proved=True)
    for steps in (16, 64):
        passing(bench, steps - 1)
        assert bench.executor.ids == [0, 1, 2], "the poison waits"
        passing(bench, 1)
        assert bench.executor.ids == [0, 1, 2, 3]
        last = replaced(bench)
    assert last.guilty is not None and last.guilty.explains
    assert (last.resumed, last.ended, last.proved) == (3, 1, True)
    assert isinstance(poison.finished().error, GenerationError)
    assert bench.executor.ids == [0, 1, 2]
    with pytest.raises(HarmfulRequestError, match=last.guilty.key):
        bench.submit([9, 9])
    bench.now += 600
    bench.step(*(Delta(each, [8], finish=LENGTH) for each in bench.executor.ids))
    assert [stream.finished().reason for stream in streams] == [LENGTH] * 3
    assert bench.batch.idle
    bench.submit([9, 9])


def test_its_copies_end_with_it(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=2)
    consumers = [bench.submit([9, 9], seed=number, do_sample=True, n=2)[1] for number in range(3)]
    for _ in range(3):
        replaced(bench)
    for consumer in consumers:
        assert [consumer.finished(index).reason for index in range(2)] == [ERROR, ERROR]
    assert bench.batch.idle


def test_it_is_found_although_its_clients_give_up(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, **LONG)
    bench.submit([5, 6], max_new_tokens=200)
    passing(bench)
    for loss, steps in enumerate((1, 16, 64)):
        poison, _ = bench.submit([9, 9])
        passing(bench, steps, but=(loss + 1,))
        assert bench.executor.ids[-1] == loss + 1
        found = replaced(bench).guilty
        assert (found is None) == (loss < 2)
        bench.batch.cancel(poison)
    assert bench.executor.ids == [0]


def test_a_suspect_that_ends_as_it_should_is_none_any_more(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    for _ in range(2):
        bench.submit([9, 9], max_new_tokens=1)
        for _ in range(2):
            assert replaced(bench).guilty is None
        bench.step(Delta(bench.executor.ids[-1], [8], finish=LENGTH))
    assert (bench.batch.idle, bench.batch.searching) == (True, False)


def test_a_suspect_that_leaves_holds_nothing_back(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    suspect, _ = bench.submit([9, 9])
    replaced(bench)
    bench.submit([5, 6])
    assert bench.executor.ids == [0]
    bench.batch.cancel(suspect)
    assert bench.executor.ids == [0, 1]


def test_a_suspect_that_comes_again_while_all_places_are_taken_is_tried_alone_too(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=3, **LONG)
    bench.submit([5, 6], max_new_tokens=200)
    passing(bench)
    suspect, _ = bench.submit([9, 9])
    replaced(bench)
    bench.batch.cancel(suspect)
    running = [bench.submit([6, number])[0].ids[0] for number in range(2)]
    suspect, _ = bench.submit([9, 9])
    bench.submit([7, 7])
    passing(bench, 16)
    assert bench.executor.ids == [0, *running]
    bench.step(*(Delta(each, [8], finish=LENGTH) for each in running))
    assert bench.executor.ids == [0, *running, *suspect.ids]


def test_what_is_new_starts_before_a_suspect_is_tried(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    bench.submit([9, 9])
    bench.batch.lose(bench.executor, GONE)
    bench.submit([5, 6])
    attach(bench)
    assert bench.executor.ids == [1]
    passing(bench, 16)
    bench.submit([5, 7])
    assert bench.executor.ids == [1, 0]
    passing(bench)
    assert bench.executor.ids == [1, 0, 2]


# -- two executors at a time -------------------------------------------------------------------------------------------


def test_sequences_end_where_they_run_and_new_ones_start_in_the_newest(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=1)
    old_generation, consumer = bench.submit()
    bench.submit()
    old = attach(bench)
    assert (old.ids, bench.executor.ids) == ([0], [1])
    assert (bench.batch.running_in(old), bench.batch.running_in(bench.executor)) == (1, 1)
    assert (bench.batch.submitted, bench.batch.running, bench.batch.waiting) == (1, 1, 1)
    bench.step(Delta(0, [8]))
    bench.batch.cancel(old_generation)
    assert (old.cancelled, bench.executor.cancelled) == ([0], [])
    bench.step(Delta(0, [], finish=CANCELLED))
    assert (consumer.finished().reason, bench.batch.running_in(old)) == (CANCELLED, 0)


def test_what_an_old_executor_loses_goes_on_in_the_newest(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    bench.submit()
    old = attach(bench)
    bench.submit()
    assert bench.batch.lose(old, GONE).resumed == 1
    assert bench.executor.ids == [1, 0]


def test_the_newest_executors_limits_count(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, kv_blocks=5, block_size=32)
    assert (bench.batch.block_size, bench.batch.speculates) == (32, False)
    bench.batch.attach(FakeExecutor(Limits(4, 50, 10, 60, draft_tokens=1)))
    for _ in range(2):
        bench.submit([5] * 30, max_new_tokens=10)
    assert bench.batch.running == 2
    assert (bench.batch.block_size, bench.batch.speculates) == (10, True)
