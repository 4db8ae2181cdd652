"""Which requests are active, and which of them run in an iteration (facts §5.1)."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from .kv_cache import KvCache
from .requests import GenerationRequest
from .responses import FinishReason
from .sequence import Sequence
from .worker_settings import WorkerSettings


class Scheduler:
    """Requests wait in order; up to max_batch_size sequences are active; those that have their KV cache run."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self.cache = KvCache(settings)
        self.waiting: collections.deque[GenerationRequest] = collections.deque()
        self.active: list[Sequence] = []
        self.paused = 0

    def fetch(self) -> int:
        """Move requests from the queue to the active list; how many sequences that made."""
        fetched = 0
        while self.waiting:
            request = self.waiting[0]
            params = request.sampling_params
            count = 1 if params.use_beam_search else params.best_of
            if len(self.active) + count > self._settings.max_batch_size:
                break
            self.waiting.popleft()
            siblings: list[Sequence] = []
            for index in range(count):
                siblings.append(Sequence(request, index, siblings, self._settings))
            self.active += siblings
            fetched += count
        return fetched

    def schedule(self) -> list[Sequence]:
        """Generation first, then contexts that fit the batch's tokens and the cache, in order."""
        settings = self._settings
        evicting = settings.policy == "MAX_UTILIZATION"
        if evicting:
            self._grow()
        running = [sequence for sequence in self.active if not sequence.in_context]
        if len(running) == len(self.active) or (settings.policy == "STATIC_BATCH" and running):
            return running
        budget = settings.max_num_tokens - len(running)
        contexts: list[Sequence] = []
        for sequence in self.active:
            if not sequence.in_context:
                continue
            length = len(sequence.prompt) + sequence.emitted
            tokens = length + 1 if evicting else len(sequence.prompt) + sequence.max_new_tokens
            if budget <= 0 or (length > budget and not settings.chunked_prefill):
                break
            if not self.cache.reserve(sequence, tokens):
                break
            self.cache.note_prompt(sequence)
            budget -= length
            contexts.append(sequence)
        return running + contexts

    def _grow(self) -> None:
        """A block more where needed; where there is none, the youngest are paused."""
        running = [sequence for sequence in self.active if not sequence.in_context]
        for sequence in running:
            tokens = len(sequence.prompt) + sequence.emitted + 1
            # Those paused for an older one are in their context phase again.
            while not sequence.in_context and not self.cache.reserve(sequence, tokens):
                youngest = next(other for other in reversed(running) if not other.in_context)
                youngest.in_context = True
                self.cache.release(youngest)
                self.paused += 1

    def end(self, sequences: Iterable[Sequence], reason: FinishReason) -> None:
        """Before their time."""
        for sequence in sequences:
            sequence.finish = int(reason)

    def forget_finished(self) -> None:
        """Give back what finished sequences have."""
        for sequence in self.active:
            if sequence.finish:
                self.cache.release(sequence)
        self.active = [sequence for sequence in self.active if not sequence.finish]
