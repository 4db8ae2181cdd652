"""An executor without a model: it repeats the prompt at a given speed, and fails where the script says so."""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from djl_trtllm.executor.pooling import PoolingExecutor, Vectors
from djl_trtllm.executor.protocol import Feature, Limits, Stats, Step, Submit
from djl_trtllm.request import FinishReason


class PoolingScript(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The behaviour of the executor.

    An iteration takes `step_seconds`. A text with the token `fatal_token` ends the process.
    """

    dimensions: int = 8
    step_seconds: float = 0
    fatal_token: int | None = None


class ScriptedPoolingExecutor(PoolingExecutor):
    """See `PoolingExecutor`. `script` has the members of `PoolingScript`.

    The vector of a text follows from its token ids.
    """

    def __init__(self, *, script: dict[str, Any], **limits: Any) -> None:
        self._script = msgspec.convert(script, PoolingScript)
        self._dimensions = 1 if limits["task"] == "score" else self._script.dimensions
        super().__init__(activates=True, dimensions=self._dimensions, **limits)

    def compute(self, batch: Sequence[Submit]) -> Vectors:
        time.sleep(self._script.step_seconds)
        if any(self._script.fatal_token in request.prompt_ids for request in batch):
            os.kill(os.getpid(), signal.SIGKILL)
        return np.stack([vector_of(request.prompt_ids, self._dimensions) for request in batch])


def vector_of(ids: Sequence[int], dimensions: int) -> Vectors:
    """Return the vector of a text with these ids, before it is normalised."""
    weights = np.outer(np.arange(1, dimensions + 1), np.arange(1, len(ids) + 1))
    return np.asarray(np.cos(weights * np.asarray(ids)).sum(axis=1), np.float32)


FEATURES: frozenset[str] = frozenset(
    {
        *("max_new_tokens", "min_new_tokens", "ignore_eos", "stop_token_ids", "do_sample", "temperature", "top_k"),
        *("top_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("logit_bias", "cache_salt", "prompt_logprobs", Feature.LOGPROBS, Feature.FREE_LOGPROBS),
    }
)
"""The features that it accepts, see `Ready.features`. Its script decides the tokens: sampling has no effect on them."""


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A failure that happens when a request is about to emit token number `at_token` (the first is 0).

    `max_new_tokens`, if given, selects the requests that fail. `raise`: the engine raises; `die`: SIGKILL; `exit`: the
    process ends with status 3; `hang`: it sleeps for ever; `stop`: SIGSTOP; `error`: only this request fails; `end`:
    the server gets SIGKILL.
    """

    action: Literal["raise", "die", "exit", "hang", "stop", "error", "end"]
    at_token: int = 0
    max_new_tokens: int | None = None


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The behaviour of the executor.

    `steps_per_second`: iterations, each with one token for every request (0: as fast as the reader reads).
    `prefill_seconds`: of the first iteration of a request. `end_after`: tokens after which the first of the request's
    stop ids is emitted. `start_seconds` is how long loading takes, `start_error` the error with which it fails.
    `kv_blocks` 0: it admits all requests. `features` are accepted beside `FEATURES`, and have no effect either.
    `memory_tokens` is the largest `max_num_tokens` that it has memory for: a larger one fails in `memory_phase`.
    """

    max_sequences: int = 256
    kv_blocks: int = 0
    block_size: int = 32
    max_seq_len: int = 1 << 20
    steps_per_second: float = 0
    prefill_seconds: float = 0
    end_after: int | None = None
    start_seconds: float = 0
    start_error: str | None = None
    features: list[str] = []
    memory_tokens: int | None = None
    memory_phase: Literal["load", "requests"] = "load"
    max_num_tokens: int | None = None
    faults: list[Fault] = []


@dataclass(slots=True)
class _Sequence:
    request: Submit
    period: list[int]
    emitted: int = 0
    cancelled: bool = False


class ScriptedExecutor:
    """See `djl_trtllm.executor.process.Executor`; the options are those of `Script`.

    It is for tests (faults at a chosen token) and benchmarks (an engine of known speed). Every request's k-th token is
    the prompt's token k modulo its length, so that a test knows the expected text. As with a model, the next token
    follows from all tokens so far: a prompt that repeats itself, such as that of a request which goes on in another
    engine process, is repeated with its period.
    """

    def __init__(self, **options: Any) -> None:
        self._script = script = msgspec.convert(options, Script)
        time.sleep(script.start_seconds)
        if script.start_error is not None:
            raise RuntimeError(script.start_error)
        if script.memory_phase == "load":
            self._require_memory()
        self._sequences: dict[int, _Sequence] = {}
        self._next_step = 0.0
        self.limits = Limits(
            max_sequences=script.max_sequences,
            kv_blocks=script.kv_blocks,
            block_size=script.block_size,
            max_seq_len=script.max_seq_len,
        )
        self.details: dict[str, Any] = {}
        self.features = FEATURES.union(script.features)

    @property
    def busy(self) -> bool:
        return bool(self._sequences)

    def submit(self, request: Submit) -> None:
        if not self._sequences:
            self._next_step = time.monotonic()
        self._sequences[request.request_id] = _Sequence(request, _period(list(request.prompt_ids)))

    def cancel(self, request_id: int) -> None:
        if request_id in self._sequences:
            self._sequences[request_id].cancelled = True

    def step(self) -> Step:
        self._wait_for_turn()
        self._require_memory()
        step = Step()
        for sequence in self._sequences.values():
            self._advance(sequence, step)
        for end in step.ends:
            del self._sequences[end.request_id]
        return step

    def stats(self) -> Stats:
        running = len(self._sequences)
        return Stats(running=running, kv_usage=min(1.0, running / self._script.max_sequences))

    def _require_memory(self) -> None:
        bound, asked = self._script.memory_tokens, self._script.max_num_tokens
        if bound is not None and asked is not None and asked > bound:
            raise MemoryError(f"std::bad_alloc (scripted: max_num_tokens={asked} is more than {bound})")

    def _wait_for_turn(self) -> None:
        if self._script.prefill_seconds and any(not sequence.emitted for sequence in self._sequences.values()):
            time.sleep(self._script.prefill_seconds)
        if self._script.steps_per_second:
            # It catches up after a delay, so that the rate is right on a busy machine.
            self._next_step += 1 / self._script.steps_per_second
            time.sleep(max(0.0, self._next_step - time.monotonic()))

    def _advance(self, sequence: _Sequence, step: Step) -> None:
        request = sequence.request
        if sequence.cancelled:
            step.end(request.request_id, FinishReason.CANCELLED)
            return
        for fault in self._script.faults:
            if fault.at_token == sequence.emitted and fault.max_new_tokens in (None, request.sampling.max_new_tokens):
                if fault.action == "error":
                    step.end(request.request_id, FinishReason.ERROR, "scripted error")
                    return
                _fail(fault)
        if request.prompt_logprobs is not None and not sequence.emitted:
            step.prompts[request.request_id] = [None, *[-0.5] * (len(request.prompt_ids) - 1)]
        token_id = sequence.period[sequence.emitted % len(sequence.period)]
        finish: FinishReason | None = None
        if sequence.emitted == self._script.end_after and request.stop_token_ids:
            token_id = request.stop_token_ids[0]
        if token_id in request.stop_token_ids:
            finish = FinishReason.STOP
        sequence.emitted += 1
        if finish is None and sequence.emitted >= request.sampling.max_new_tokens:
            finish = FinishReason.LENGTH
        step.add(request.request_id, (token_id,), (-0.5,) if request.logprobs else None)
        if finish is not None:
            step.end(request.request_id, finish)


def _period(token_ids: list[int]) -> list[int]:
    """The end of a sequence that it repeats; all of it if it does not."""
    # Knuth, Morris and Pratt's table: how long the longest end is that the sequence also begins with.
    border, table = 0, [0]
    for token_id in token_ids[1:]:
        while border and token_id != token_ids[border]:
            border = table[border - 1]
        border += token_id == token_ids[border]
        table.append(border)
    return token_ids[border:]


def _fail(fault: Fault) -> None:
    match fault.action:
        case "raise":
            raise RuntimeError("scripted engine failure")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "end":
            os.kill(os.getppid(), signal.SIGKILL)
        case "hang":
            time.sleep(1e9)
