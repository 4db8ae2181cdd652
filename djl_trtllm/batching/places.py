"""The places in one engine process: how many sequences run in it, and how much of its KV cache they take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from djl_trtllm.batching.clients import Client
from djl_trtllm.executor.protocol import Limits, Submit

_RESERVE = 16
"""One of this number of places, and of KV cache blocks, is kept free for clients that ask for little."""


class ExecutorPort(Protocol):
    """The executor as the rolling batch sees it."""

    @property
    def limits(self) -> Limits:
        """What it can hold."""

    def submit(self, request: Submit) -> None:
        """Start a sequence."""

    def cancel(self, request_id: int) -> None:
        """End a sequence early; its terminal delta comes later."""


@dataclass(slots=True, eq=False)
class Places:
    """`max_running` sequences run in it, `lookahead` more wait inside it. `submitted` counts its messages since it
    started."""

    executor: ExecutorPort
    max_running: int
    lookahead: int = 0
    sequences: int = 0
    blocks: int = 0
    submitted: int = 0
    reserve: int = field(init=False)
    reserved_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        self.reserve = max(1, self.max_running // _RESERVE) if self.max_running > 1 else 0
        self.reserved_blocks = self.executor.limits.kv_blocks // _RESERVE

    @property
    def max_sequences(self) -> int:
        return self.max_running + self.lookahead

    def fit(self, sequences: int, blocks: int) -> bool:
        """Whether there is room for N more sequences, which take this number of KV cache blocks together."""
        available = self.executor.limits.kv_blocks
        if self.sequences + sequences > self.max_sequences:
            return False
        return not available or self.blocks + blocks <= available

    def fit_alone(self, client: Client, sequences: int, blocks: int) -> bool:
        """Whether they would fit if nothing of their client ran."""
        return self.fit(sequences - client.running, blocks - client.blocks)

    def fit_among_others(self, client: Client, sequences: int, blocks: int) -> bool:
        """Whether there is room for them while there are other clients.

        The reserve is for clients that ask for little, and for what would not fit without it. Nothing waits inside the
        executor, where it would be behind what others have there, and before what they send later.
        """
        if not self.fit(sequences, blocks) or (self.sequences and self.sequences + sequences > self.max_running):
            return False
        places, kv_blocks = self.max_running - self.reserve, self.executor.limits.kv_blocks
        available = kv_blocks - self.reserved_blocks
        little = client.admitted <= max(1, self.max_running // 2)
        if not client.running and (little or sequences > places or blocks > available > 0):
            return True
        return (self.sequences + sequences <= places or (little and client.running + sequences <= self.reserve)) and (
            not kv_blocks
            or self.blocks + blocks <= available
            or (little and client.blocks + blocks <= self.reserved_blocks)
        )

    def take(self, blocks: int) -> None:
        """A sequence takes a place."""
        self.sequences += 1
        self.blocks += blocks

    def free(self, blocks: int) -> None:
        """A sequence has left its place."""
        self.sequences -= 1
        self.blocks -= blocks
