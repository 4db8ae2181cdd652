"""How the news of a request's sequences reach its consumer."""

from __future__ import annotations

import gc
import weakref

import pytest

from djl_trtllm.batching.request_record import RequestRecord
from djl_trtllm.batching.request_state import RequestState
from djl_trtllm.batching.sequence import OutputSequence
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, Origin, Sampling
from tests.batching.helpers import Recorder

LENGTH, CANCELLED, ERROR = FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.ERROR


class Script:
    """A request whose sequences are played by hand."""

    def __init__(self, tokenizer: Tokenizer, **sampling: object) -> None:
        parameters = Sampling(**sampling)  # type: ignore[arg-type]
        self.consumer = Recorder()
        self.sequences = [
            OutputSequence(
                index=index,
                texts=tokenizer.texts,
                special_ids=frozenset(),
                prompt_ids=[5],
                stop=(),
                seed=None,
                logprobs=True,
            )
            for index in range(parameters.sequences)
        ]
        record = RequestRecord(Origin(), 7.5, 3, len(self.sequences))
        self.generation = RequestState(parameters, list(self.sequences), self.consumer, record)

    def say(self, number: int, *token_ids: int, logprob: float = -1.0, end: FinishReason | None = None) -> list[int]:
        """New tokens of a sequence, and perhaps its end; the ids of what was delivered."""
        before = len(self.consumer.updates)
        sequence = self.sequences[number]
        sequence.take(token_ids, [logprob] * len(token_ids))
        if end is not None:
            sequence.finish(end)
        self.generation.deliver(sequence)
        return [token.id for update in self.consumer.updates[before:] for token in update.tokens]

    @property
    def delivered(self) -> list[tuple[int, list[int], bool]]:
        return [
            (update.index, [token.id for token in update.tokens], update.finished is not None)
            for update in self.consumer.updates
        ]


def test_it_begins_with_what_it_was_made_of(tokenizer: Tokenizer) -> None:
    script = Script(tokenizer, n=2)
    generation = script.generation
    assert (generation.sequences, generation.ids) == (script.sequences, [])
    assert not generation.done


def test_news_are_delivered_as_they_come(tokenizer: Tokenizer) -> None:
    script = Script(tokenizer, n=2)
    assert script.say(1, 10, 11) == [10, 11]
    assert script.say(0, 20) == [20]
    assert script.say(1, 12, end=LENGTH) == [12]
    assert script.delivered == [(1, [10, 11], False), (0, [20], False), (1, [12], True)]


def test_an_end_says_how_long_its_request_waited(tokenizer: Tokenizer) -> None:
    script = Script(tokenizer, n=2)
    script.say(0, end=CANCELLED)
    script.generation.record.started = 9.75
    script.say(1, end=LENGTH)
    waited = [update.finished.queue_seconds for update in script.consumer.updates if update.finished]
    assert waited == [0.0, 2.25]


def test_where_nothing_is_new_nothing_is_delivered(tokenizer: Tokenizer) -> None:
    script = Script(tokenizer)
    assert script.say(0) == []
    assert script.delivered == []


def test_an_end_without_tokens_is_delivered(tokenizer: Tokenizer) -> None:
    script = Script(tokenizer)
    assert script.say(0, end=CANCELLED) == []
    assert script.delivered == [(0, [], True)]


def test_it_is_done_when_every_sequence_has_ended(tokenizer: Tokenizer) -> None:
    script = Script(tokenizer, n=3)
    done = []
    for number in range(3):
        assert not script.sequences[number].closed
        script.say(number, 10, end=LENGTH)
        assert script.sequences[number].closed
        done.append(script.generation.done)
    assert done == [False, False, True]


@pytest.mark.parametrize("best_of", [1, 3])
def test_with_best_of_nothing_is_delivered_before_all_have_ended(tokenizer: Tokenizer, best_of: int) -> None:
    script = Script(tokenizer, n=1, best_of=best_of)
    assert script.say(0, 10) == []
    for number in range(1, best_of):
        assert script.say(number, 20, end=LENGTH) == []
    assert script.delivered == []
    script.say(0, 11, end=LENGTH)
    assert len(script.delivered) == 1


def test_best_of_delivers_the_best_first_with_new_indices_and_the_others_not_at_all(tokenizer: Tokenizer) -> None:
    script = Script(tokenizer, n=2, best_of=3)
    script.say(0, 10, logprob=-3.0, end=LENGTH)
    script.say(1, 11, logprob=-1.0, end=LENGTH)
    assert script.say(2, 12, logprob=-2.0, end=LENGTH) == [11, 12]
    assert script.delivered == [(0, [11], True), (1, [12], True)]
    assert [sequence.index for sequence in script.sequences[1:]] == [0, 1]


@pytest.mark.parametrize("reason", [CANCELLED, ERROR])
def test_what_was_cut_short_ranks_last_whatever_its_log_probability(tokenizer: Tokenizer, reason: FinishReason) -> None:
    script = Script(tokenizer, n=1, best_of=2)
    script.say(0, end=reason)
    script.say(1, 11, logprob=-9.0, end=LENGTH)
    assert script.delivered == [(0, [11], True)]


def test_beams_keep_the_engines_order(tokenizer: Tokenizer) -> None:
    script = Script(tokenizer, n=1, beam_width=2)
    assert script.say(0, 10, logprob=-3.0, end=LENGTH) == []
    assert script.say(1, 11, logprob=-1.0, end=LENGTH) == [10]
    assert script.delivered == [(0, [10], True)]


def test_an_abandoned_request_calls_its_consumer_no_more(tokenizer: Tokenizer) -> None:
    script = Script(tokenizer)
    script.say(0, 10)
    script.generation.abandon()
    script.say(0, 11, end=LENGTH)
    assert script.delivered == [(0, [10], False)]
    assert script.generation.done


@pytest.mark.parametrize("best_of", [None, 2])
def test_the_consumer_of_a_request_that_has_ended_waits_for_no_garbage_collector(
    tokenizer: Tokenizer, best_of: int | None
) -> None:
    script = Script(tokenizer, n=1, best_of=best_of)
    script.consumer.request = script.generation  # type: ignore[attr-defined]
    consumer = weakref.ref(script.consumer)
    for number in range(best_of or 1):
        script.say(number, 10, end=LENGTH)
    assert script.delivered == [(0, [10], True)]
    gc.disable()
    try:
        del script
        assert consumer() is None
    finally:
        gc.enable()
