"""The places in one engine process: how many sequences run in it, and how much of its KV cache they take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from djl_trtllm.executor.protocol import Limits, Submit


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
    """`max_sequences` run in it, or wait inside it. `submitted` counts its messages since it started."""

    executor: ExecutorPort
    max_sequences: int
    sequences: int = 0
    blocks: int = 0
    submitted: int = 0

    def fit(self, sequences: int, blocks: int) -> bool:
        """Whether there is room for N more sequences, which take this number of KV cache blocks together."""
        available = self.executor.limits.kv_blocks
        if self.sequences + sequences > self.max_sequences:
            return False
        return not available or self.blocks + blocks <= available

    def take(self, blocks: int) -> None:
        """A sequence takes a place."""
        self.sequences += 1
        self.blocks += blocks

    def free(self, blocks: int) -> None:
        """A sequence has left its place."""
        self.sequences -= 1
        self.blocks -= blocks
