"""Which requests are active, and which of them run in an iteration (facts §5.1)."""

from __future__ import annotations

import collections
import math
import os
import signal
import time
from collections.abc import Iterable
from typing import Any

from .results import FinishReason
from .sampling import GenerationRequest
from .settings import SINCE_1_3, CppExecutorError, WorkerSettings

# -- the paged KV cache, as far as scheduling and statistics see it (facts §5) -----------------------------------------


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
            block = hash((sequence.request.cache_keys, *sequence.prompt[:end]))
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


# -- sequence ----------------------------------------------------------------------------------------------------------
# One sequence: its k-th token is the prompt's token k modulo its length, or its period if it repeats itself.
#
# So a sequence whose prompt and first tokens are the prompt of another one goes on there (see the scripted executor).
# Beam number i begins i places later, and so does a request with an adapter of id i, so that a test sees both. The
# model ends beam number i also i tokens later: beams end one by one.


class Sequence:
    """A request's sequence; with beam search the best one, which stands for all others in the scheduler."""

    __slots__ = (
        "_bad",
        "_cycle",
        "_end_id",
        "_eos",
        "_faults",
        "_guided",
        "_includes_end",
        "_min_tokens",
        "_shift",
        "_stops",
        "beams",
        "cached",
        "emitted",
        "finish",
        "further",
        "in_context",
        "index",
        "iterations",
        "max_new_tokens",
        "params",
        "prompt",
        "reason",
        "request",
        "reserved",
        "sent",
        "tokens",
    )

    def __init__(self, request: GenerationRequest, settings: WorkerSettings, index: int = 0):
        params = request.sampling_params
        self.request = request
        self.params = params
        self.index = index

        self.prompt = request.prompt_token_ids
        self._cycle = _period(self.prompt)
        self.beams = params.best_of
        self.max_new_tokens = request.max_new_tokens
        self.emitted = self.sent = self.iterations = self.cached = self.reserved = 0
        self.tokens: list[int] = []
        self.in_context = True
        self.finish = int(FinishReason.NOT_FINISHED)
        self.reason = self.finish
        """Why it ended, where other beams may still run: `finish` is set when all have ended."""
        self._min_tokens = params.min_tokens or 0
        self._end_id = -1 if params.ignore_eos else params.end_id
        self._eos: int | None = params.end_id if params.end_id is not None and params.end_id >= 0 else settings.eos
        # The engine's sampling kernels do not count the end token as output; the PyTorch sampler does.
        self._includes_end = settings.pytorch
        self._stops = [] if params.ignore_eos and SINCE_1_3 else params._get_stop_words()
        self._bad = {word[0] for word in params._get_bad_words() if len(word) == 1}
        self._shift = index + request.drawn
        if settings.lora and request.lora_request is not None:
            self._shift += request.lora_request.adapter_id
        self._guided = self._scripted_end(settings)
        asked = (None, params.max_tokens)
        faults: list[dict[str, Any]] = settings.script["faults"]
        self._faults = [f for f in faults if f.get("max_new_tokens") in asked and not index]
        self.further = [] if index else [Sequence(request, settings, number) for number in range(1, params.best_of)]

    def _scripted_end(self, settings: WorkerSettings) -> dict[int, int]:
        """Place -> token, where it is not the prompt's: what a guide leads to, or the end token."""
        end_after = settings.script["end_after"]
        if self.params.guided_decoding is not None and self.params.guided_decoding._kind():
            end = [] if self._eos is None else [self._eos]
            return dict(enumerate([*settings.guided_ids, *end]))
        if end_after is None or self._eos is None:
            return {}
        return {max(end_after + self.index, self._min_tokens): self._eos}

    def advance(self) -> None:
        """Emit a token of it and of its further beams; `finish` is set where none goes on."""
        self.in_context = False
        self.iterations += 1
        if not self.reason:
            self._emit()
        for beam in self.further:
            if not beam.reason:
                beam._emit()
        if self.reason and all(beam.reason for beam in self.further):
            self.finish = self.reason

    def _emit(self) -> None:
        token_id = self._next_token()
        self.emitted += 1
        ended = token_id == self._end_id and self.emitted > self._min_tokens
        if not ended or self._includes_end:
            self.tokens.append(token_id)
        stopped = bool(self._stops) and any(self.tokens[-len(word) :] == word for word in self._stops)
        if ended:
            self.reason = int(FinishReason.END_ID)
        elif self.emitted >= self.max_new_tokens and (self._includes_end or not stopped):
            # The PyTorch sampler looks at the length before it looks at stop words.
            self.reason = int(FinishReason.LENGTH)
        elif stopped:
            self.reason = int(FinishReason.STOP_WORDS)

    def _next_token(self) -> int:
        if self.emitted in self._guided:
            return self._guided[self.emitted]
        bias = self.params.embedding_bias
        if bias is not None and bias[likeliest := int(bias.argmax())] >= 100:
            return likeliest
        cycle, place = self._cycle, self.emitted + self._shift
        token_id = cycle[place % len(cycle)]
        for offset in range(1, len(cycle)):
            if token_id not in self._bad:
                break
            token_id = cycle[(place + offset) % len(cycle)]
        return token_id

    def fault(self) -> dict[str, Any] | None:
        """What the script has for the token that comes next."""
        for fault in self._faults:
            if fault.get("at_token", 0) == self.emitted:
                return fault
        return None


def _period(token_ids: list[int]) -> list[int]:
    """The end of a sequence that it repeats; all of it if it does not (Knuth, Morris and Pratt's table)."""
    border, table = 0, [0]
    for token_id in token_ids[1:]:
        while border and token_id != token_ids[border]:
            border = table[border - 1]
        border += token_id == token_ids[border]
        table.append(border)
    return token_ids[border:]


def strike(action: str) -> None:
    """A fault of the worker; those that end or stop the process do not come back."""
    match action:
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            os._exit(3)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            time.sleep(1e9)
        case "raise":
            raise CppExecutorError("scripted engine failure")
        case "lose":
            raise ArithmeticError("scripted failure of the thread of responses")
        case _:
            raise ValueError(f"no such fault: {action}")


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
        while self.waiting and len(self.active) < self._settings.max_batch_size:
            self.active.append(Sequence(self.waiting.popleft(), self._settings))
            fetched += 1
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
        """End sequences before their time."""
        for sequence in sequences:
            sequence.finish = int(reason)

    def forget_finished(self) -> None:
        """Give back what finished sequences have."""
        for sequence in self.active:
            if sequence.finish:
                self.cache.release(sequence)
        self.active = [sequence for sequence in self.active if not sequence.finish]
