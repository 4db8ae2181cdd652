"""A sequence in the tables of the rolling batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from djl_trtllm.batching.clients import OUTPUT_WEIGHT, Client
from djl_trtllm.batching.places import ExecutorPort, Places
from djl_trtllm.batching.request_state import RequestState
from djl_trtllm.batching.resuming import can_resume, resumed
from djl_trtllm.batching.sequence import OutputSequence
from djl_trtllm.executor.protocol import Limits, Submit


@dataclass(slots=True, eq=False)
class Slot:
    """From `RollingBatch.submit` to the executor's terminal delta.

    The beams of a request share one message, and enter the executor together. `places` are those of the executor in
    which it runs, None while it waits. `movable`: it may give its place to another client's sequence, and go on later.
    """

    state: RequestState
    sequence: OutputSequence
    message: Submit
    blocks: int
    client: Client
    priority: int = 0
    movable: bool = False
    places: Places | None = None
    counted: int = 0
    """Tokens that are in the statistics, the last of them since `last_token_at`."""
    last_token_at: float | None = None
    overtaken: int = 0
    """Sequences that started before it when it was next and did not fit."""
    moves: int = 0
    """How often it has given its place away."""
    _had: int = 0
    """Tokens that it had when it took its place."""

    def runs_in(self, executor: ExecutorPort) -> bool:
        return self.places is not None and self.places.executor is executor

    @property
    def begins(self) -> bool:
        """Whether it had no tokens when it took its place. Its prompt counts then, and not when it goes on later."""
        return not self._had

    @property
    def beams(self) -> int:
        return self.message.sampling.beam_width

    def enter(self, places: Places) -> None:
        """Take a place; the executor gets `start` once for all beams."""
        places.take(self.blocks)
        self.places = places
        self._had = len(self.sequence.token_ids)
        client = self.client
        client.running += 1
        client.blocks += self.blocks
        client.expected += self._service(self.message.sampling.max_new_tokens)

    def leave(self) -> None:
        """Give the place back."""
        assert self.places is not None
        self.places.free(self.blocks)
        self.places = None
        client = self.client
        client.running -= 1
        client.blocks -= self.blocks
        client.expected -= self._service(self.message.sampling.max_new_tokens)
        client.service += self._service(len(self.sequence.token_ids))

    def _service(self, tokens: int) -> int:
        """What its client was given in this place once the sequence has this number of tokens."""
        prompt = len(self.message.prompt_ids) if self.begins else 0
        return prompt + OUTPUT_WEIGHT * (tokens - self._had)

    def start(self) -> Submit:
        """The message that starts it where it is."""
        return resumed(self.message, self.sequence.token_ids)

    @property
    def complete(self) -> bool:
        """Whether it has all its tokens."""
        return len(self.sequence.token_ids) >= self.message.sampling.max_new_tokens

    def can_go_on(self, limits: Limits) -> bool:
        """Whether it can go on in another executor with these limits; beams do so together or not at all."""
        if self.message.sampling.beam_width > 1 and any(beam.finished for beam in self.state.sequences):
            return False
        return can_resume(self.message, len(self.sequence.token_ids), limits)


def states_of(slots: Mapping[int, Slot]) -> list[RequestState]:
    """The requests of these slots, each once, in their order."""
    return list({id(slot.state): slot.state for slot in slots.values()}.values())
