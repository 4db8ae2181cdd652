"""The paged KV cache, as far as scheduling and statistics see it (facts §5)."""

from __future__ import annotations

import math
from typing import Any

from .sequence import Sequence
from .worker_settings import WorkerSettings


class KvCache:
    """Blocks that sequences have reserved."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._blocks = settings.kv_blocks
        self._size = settings.tokens_per_block
        self._reuse = settings.block_reuse
        self._seen: set[int] = set()
        self._reused = self._missed = 0
        self.used = 0

    def reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Room for this number of tokens of every beam; False where there is none."""
        need = math.ceil(tokens / self._size) * sequence.beams
        if self.used - sequence.reserved + need > self._blocks:
            return False
        self.used += need - sequence.reserved
        sequence.reserved = need
        return True

    def release(self, sequence: Sequence) -> None:
        self.used -= sequence.reserved
        sequence.reserved = 0

    def note_prompt(self, sequence: Sequence) -> None:
        """Whole blocks that were seen before count as reused, as long as the worker lives."""
        hit = self._reuse
        for end in range(self._size, len(sequence.prompt) + 1, self._size):
            block = hash(tuple(sequence.prompt[:end]))
            hit = hit and block in self._seen
            self._seen.add(block)
            if hit:
                sequence.cached += self._size
                self._reused += 1
            else:
                self._missed += 1

    def statistics(self) -> dict[str, Any]:
        """`kvCacheStats` of an iteration."""
        looked_up = self._reused + self._missed
        return {
            "allocNewBlocks": self._missed,
            "allocTotalBlocks": looked_up,
            "cacheHitRate": self._reused / looked_up if looked_up else 0.0,
            "freeNumBlocks": self._blocks - self.used,
            "maxNumBlocks": self._blocks,
            "missedBlocks": self._missed,
            "reusedBlocks": self._reused,
            "tokensPerBlock": self._size,
            "usedNumBlocks": self.used,
        }
