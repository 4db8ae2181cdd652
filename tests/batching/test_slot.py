"""A sequence in the tables of the rolling batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from djl_trtllm.batching.clients import Client
from djl_trtllm.batching.places import Places
from djl_trtllm.batching.slot import Slot, states_of
from djl_trtllm.executor.protocol import Limits, Submit
from djl_trtllm.request import Sampling
from tests.batching.helpers import FakeExecutor

LIMITS = Limits(4, 0, 32, 100)


def slot(*beams: object, **sampling: Any) -> Slot:
    """A slot whose request has beams with these ends."""
    state = SimpleNamespace(sequences=[SimpleNamespace(finished=finished) for finished in beams])
    message = Submit(0, [1, 2], Sampling(**{"max_new_tokens": 3, **sampling}))
    return Slot(cast(Any, state), cast(Any, SimpleNamespace(token_ids=[])), message, 5, Client("a"))


def test_it_runs_in_the_executor_whose_place_it_has() -> None:
    executor, other = FakeExecutor(LIMITS), FakeExecutor(LIMITS)
    places, one = Places(executor, 4), slot()
    assert not one.runs_in(executor)
    one.enter(places)
    assert (places.sequences, places.blocks) == (1, 5)
    assert (one.runs_in(executor), one.runs_in(other)) == (True, False)
    one.leave()
    assert (places.sequences, places.blocks) == (0, 0)
    assert not one.runs_in(executor)


def test_it_starts_where_it_is() -> None:
    one = slot()
    assert one.start() == one.message
    one.sequence.token_ids += [7, 8]
    assert (one.start().prompt_ids, one.start().sampling.max_new_tokens) == ([1, 2, 7, 8], 1)


@pytest.mark.parametrize(("tokens", "complete"), [(2, False), (3, True)])
def test_it_is_complete_with_its_last_token(tokens: int, complete: bool) -> None:
    one = slot()
    one.sequence.token_ids += [9] * tokens
    assert one.complete is complete


def test_beams_begin_again_together_or_not_at_all() -> None:
    assert slot(None, None, beam_width=2).can_go_on(LIMITS)
    assert not slot("ended", None, beam_width=2).can_go_on(LIMITS)
    assert slot("ended", None).can_go_on(LIMITS)


def test_what_has_history_cannot_go_on() -> None:
    one = slot(None, presence_penalty=0.5)
    assert one.can_go_on(LIMITS)
    one.sequence.token_ids.append(9)
    assert not one.can_go_on(LIMITS)


def test_requests_are_named_once_and_in_order() -> None:
    first, second = slot(), slot()
    also_first = Slot(first.state, first.sequence, first.message, 5, first.client)
    assert states_of({1: first, 2: second, 3: also_first}) == [first.state, second.state]


def test_its_client_has_what_it_takes_and_is_given_what_it_got() -> None:
    places, one = Places(FakeExecutor(LIMITS), 4), slot()
    client = one.client
    one.enter(places)
    # Two tokens of the prompt, and twice the three that it may get.
    assert (client.running, client.blocks, client.service, client.expected) == (1, 5, 0, 8)
    one.sequence.token_ids += [7]
    one.leave()
    assert (client.running, client.blocks, client.service, client.expected) == (0, 0, 4, 0)


def test_a_sequence_that_goes_on_gets_its_prompt_once() -> None:
    places, one = Places(FakeExecutor(LIMITS), 4), slot()
    one.enter(places)
    assert one.begins
    one.sequence.token_ids += [7]
    one.leave()
    one.enter(places)
    assert (one.begins, one.client.expected) == (False, 4)
    one.sequence.token_ids += [8]
    one.leave()
    assert (one.client.service, one.client.expected) == (6, 0)
