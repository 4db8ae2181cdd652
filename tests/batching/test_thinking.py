"""The budget of a request's reasoning: it is ended where it is spent, and the sequence goes on with the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from djl_trtllm.batching.admission import supported
from djl_trtllm.batching.sequence import ThinkingMeter
from djl_trtllm.errors import GenerationError, PromptTooLongError, UnsupportedParameterError
from djl_trtllm.executor.protocol import Limits, Ranked
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, GenerationRequest, RankedToken, Sampling, ThinkingBudget
from tests.batching.helpers import Bench, FakeExecutor
from tests.support.steps import Delta
from tests.support.tables import by_rows

BUDGET = ThinkingBudget(3, "<think>", ("</think>",))
CLOSING = "\n</think>\n\n"
CANCELLED = FinishReason.CANCELLED


@pytest.fixture
def bench(tokenizer: Tokenizer) -> Bench:
    return Bench(tokenizer)


def thinking_prompt(bench: Bench) -> list[int]:
    return bench.encode("Why?<think>")


def pieces(budget: ThinkingBudget, texts: Sequence[str], prompt: str = "") -> list[bool]:
    meter = ThinkingMeter(budget, prompt, [], 1000)
    return [meter.spend(text) for text in texts]


@by_rows(
    ("budget", "prompt", "texts", "ended"),
    [
        (BUDGET, "<think>\n", ["a", "b", "c"], 2),
        (BUDGET, "", ["<think>", "a", "b", "c"], 3),
        (BUDGET, "", ["\n", "<th", "ink>", "a", "b", "c"], 5),
        (BUDGET, "", ["a", "<think>", "b", "c", "d", "e"], None),  # no reasoning: the answer has begun
        (replace(BUDGET, anywhere=True), "", ["a", "<think>", "b", "c", "d"], 4),
        (replace(BUDGET, anywhere=True), "", ["<think>", "a", "</think>", "b", "<think>", "c", "d"], 5),  # begun again
        (BUDGET, "", ["<think>", "a", "</think>", "b", "<think>", "c", "d"], None),  # text of the answer
        (replace(BUDGET, starts=True), "", ["a", "b", "c"], 2),
        (replace(BUDGET, starts=True), "<think></think>", ["a", "b", "c", "d"], None),
        (BUDGET, "<think>", ["a", "</think>", "c", "d", "e"], None),  # ended by the model
        (BUDGET, "<think>", ["a", "b", "</", "think", ">", "c"], None),  # the budget ends inside the model's own end
        (BUDGET, "<think>", ["a", "b", "</", "div", ">"], 3),  # no end of reasoning after all
        (replace(BUDGET, closers=("</think>", "<call>")), "<think>", ["a", "<call>", "c", "d"], None),
    ],
)
def test_reasoning_is_counted_from_its_beginning_to_its_end(
    budget: ThinkingBudget, prompt: str, texts: list[str], ended: int | None
) -> None:
    found = pieces(budget, texts, prompt)
    assert (found.index(True) if True in found else None) == ended


def spent(bench: Bench, **fields: Any) -> tuple[Any, Any, list[int]]:
    """A request whose budget has just been spent, its consumer, and the tokens that it has."""
    state, consumer = bench.submit(thinking_prompt(bench), thinking=BUDGET, **fields)
    thoughts = bench.encode(" a b c")
    assert len(thoughts) == BUDGET.tokens
    for token_id in thoughts:
        bench.step(Delta(0, [token_id]))
    return state, consumer, [*thoughts, *bench.encode(CLOSING)]


def test_a_sequence_whose_budget_is_spent_goes_on_behind_the_end_of_its_reasoning(bench: Bench) -> None:
    _, consumer, tokens = spent(bench)
    assert bench.executor.cancelled == [0]
    assert consumer.text() == f" a b c{CLOSING}"  # before the engine goes on
    bench.step(Delta(0, bench.encode(" more")))  # it was under way
    bench.step(Delta(0, [], finish=CANCELLED))
    again = bench.executor.submitted[1]
    assert again.prompt_ids == [*thinking_prompt(bench), *tokens]
    assert again.sampling.max_new_tokens == 30 - len(tokens)
    bench.step(Delta(0, bench.encode(" So!"), finish=FinishReason.LENGTH))
    assert consumer.text() == f" a b c{CLOSING} So!"
    assert consumer.finished().reason is FinishReason.LENGTH
    assert bench.batch.idle


def test_no_character_is_cut_in_two(bench: Bench) -> None:
    _, consumer = bench.submit(thinking_prompt(bench), thinking=BUDGET)
    fox = bench.encode("🦊")
    assert len(fox) > BUDGET.tokens
    for token_id in fox:
        assert not bench.executor.cancelled
        bench.step(Delta(0, [token_id]))
    assert consumer.text() == f"🦊{CLOSING}"


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH, CANCELLED])
def test_it_goes_on_however_the_engine_ended_it_meanwhile(bench: Bench, reason: FinishReason) -> None:
    _, consumer, _ = spent(bench)
    bench.step(Delta(0, bench.encode(" more"), finish=reason))
    assert len(bench.executor.submitted) == 2
    assert all(update.finished is None for update in consumer.updates)


def test_an_error_of_the_engine_ends_it_all_the_same(bench: Bench) -> None:
    _, consumer, _ = spent(bench)
    bench.step(Delta(0, [], finish=FinishReason.ERROR, error="out of memory"))
    assert consumer.finished().reason is FinishReason.ERROR


def test_it_goes_before_what_waits(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=1)
    spent(bench)
    bench.submit(client="another one, which has had nothing")
    bench.step(Delta(0, [], finish=CANCELLED))
    assert bench.executor.ids == [0, 0]


def test_a_client_that_leaves_meanwhile_ends_it(bench: Bench) -> None:
    state, consumer, _ = spent(bench)
    bench.batch.cancel(state)
    bench.step(Delta(0, [], finish=CANCELLED))
    assert len(bench.executor.submitted) == 1
    assert consumer.finished().reason is CANCELLED
    assert bench.batch.idle


def test_the_loss_of_the_engine_process_meanwhile_changes_nothing(bench: Bench) -> None:
    _, consumer, tokens = spent(bench)
    bench.batch.lose(bench.executor, GenerationError("lost"))
    another = FakeExecutor(bench.executor.limits)
    bench.batch.attach(another)
    assert another.submitted[0].prompt_ids == [*thinking_prompt(bench), *tokens]
    bench.step(Delta(0, [9]))
    assert consumer.ids() == [*tokens, 9]


def test_a_seed_gives_the_same_tokens_again(bench: Bench) -> None:
    _, consumer, _ = spent(bench, do_sample=True, seed=3)
    bench.step(Delta(0, [], finish=CANCELLED))
    bench.step(Delta(0, [9], finish=FinishReason.LENGTH))
    assert not consumer.finished().reseeded


def test_no_token_comes_after_the_last_one_that_the_client_wants(bench: Bench) -> None:
    closing = len(bench.encode(CLOSING))
    _, consumer, tokens = spent(bench, max_new_tokens=BUDGET.tokens + closing)
    bench.step(Delta(0, [], finish=CANCELLED))
    assert consumer.finished().reason is FinishReason.LENGTH and consumer.ids() == tokens
    assert len(bench.executor.submitted) == 1


@pytest.mark.parametrize("more", [0, 1])
def test_reasoning_whose_end_has_no_room_ends_with_the_last_token_that_the_client_wants(
    bench: Bench, more: int
) -> None:
    wanted = BUDGET.tokens + more
    assert wanted < BUDGET.tokens + len(bench.encode(CLOSING))
    _, consumer = bench.submit(thinking_prompt(bench), thinking=BUDGET, max_new_tokens=wanted)
    ids = bench.encode(" a b c d")[:wanted]
    for token_id in ids:
        bench.step(Delta(0, [token_id]))
    bench.step(Delta(0, [], finish=FinishReason.LENGTH))
    assert (consumer.ids(), consumer.finished().reason) == (ids, FinishReason.LENGTH)
    assert not bench.executor.cancelled


def test_reasoning_that_may_begin_again_is_ended_again(bench: Bench) -> None:
    anywhere = replace(BUDGET, anywhere=True)
    _, consumer = bench.submit(thinking_prompt(bench), thinking=anywhere, max_new_tokens=40)
    for token_id in bench.encode(" a b c"):
        bench.step(Delta(0, [token_id]))
    bench.step(Delta(0, [], finish=CANCELLED))
    for token_id in bench.encode(" So<think> d"):
        bench.step(Delta(0, [token_id]))
    assert bench.executor.cancelled == [0, 0]
    assert consumer.text() == f" a b c{CLOSING} So<think> d{CLOSING}"


def test_a_place_that_is_wanted_by_another_client_is_given_away_although_reasoning_ends(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=2)
    for _ in range(2):
        bench.submit(thinking_prompt(bench), thinking=BUDGET, client="one")
    bench.submit(client="another")
    assert bench.executor.cancelled == [1]
    for token_id in bench.encode(" a b c"):
        bench.step(Delta(1, [token_id]))
    bench.step(Delta(1, [], finish=CANCELLED))
    assert bench.executor.ids == [0, 1, 2]


def test_the_end_that_was_not_generated_is_certain(bench: Bench) -> None:
    _, consumer = bench.submit(thinking_prompt(bench), thinking=BUDGET, logprobs=True, top_logprobs=1)
    for token_id in bench.encode(" a b c"):
        bench.step(Delta(0, [token_id], logprobs=[Ranked(-0.5, [token_id], [-0.5])]))
    tokens = [token for update in consumer.updates for token in update.tokens if isinstance(token, RankedToken)]
    assert [token.id for token in tokens] == consumer.ids()
    assert {token.logprob for token in tokens[3:]} == {0.0}
    assert {len(token.top) for token in tokens[:3]} == {1}


LIMITS = Limits(max_sequences=4, kv_blocks=0, block_size=10, max_seq_len=60)
FEATURES = frozenset({"max_new_tokens", "min_new_tokens", "repetition_penalty"})


@pytest.mark.parametrize(
    ("sampling", "limits", "named"),
    [
        (Sampling(repetition_penalty=1.1), LIMITS, "repetition_penalty"),
        (Sampling(min_new_tokens=4), LIMITS, "at least 4 tokens"),
        (Sampling(), replace(LIMITS, repeats=True), "images"),
    ],
)
def test_what_could_not_go_on_is_refused_by_name(sampling: Sampling, limits: Limits, named: str) -> None:
    plain = GenerationRequest(prompt="Why?", sampling=sampling)
    assert supported(plain, limits, FEATURES) == plain
    with pytest.raises(UnsupportedParameterError, match=f"thinking_token_budget.*{named}"):
        supported(replace(plain, thinking=BUDGET), limits, FEATURES)
    assert supported(replace(plain, thinking=replace(BUDGET, optional=True)), limits, FEATURES) == plain


def test_a_budget_that_the_engine_could_not_take_back_as_a_prompt_is_refused(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    bench.batch.attach(FakeExecutor(replace(bench.executor.limits, max_prompt_len=10)))
    bench.submit(thinking=replace(BUDGET, tokens=30))  # more than it generates
    with pytest.raises(PromptTooLongError, match="thinking_token_budget"):
        bench.submit(thinking=BUDGET)


@pytest.mark.parametrize(("missing", "ended"), [(0, [0]), (1, [])])
def test_an_optional_budget_has_no_effect_where_the_engine_could_not_take_it_back(
    bench: Bench, missing: int, ended: list[int]
) -> None:
    prompt = thinking_prompt(bench)
    longest = len(prompt) + BUDGET.tokens + len(bench.encode(CLOSING)) - missing
    executor = FakeExecutor(replace(bench.executor.limits, max_prompt_len=longest))
    bench.batch.attach(executor)
    bench.submit(prompt, thinking=replace(BUDGET, optional=True))
    for token_id in bench.encode(" a b c d"):
        bench.step(Delta(0, [token_id]))
    assert executor.cancelled == ended
