"""The engine's loop: in-flight batching over sequences whose k-th token is the prompt's token k modulo its length.

Runs in rank 0's process, or in the LLM's own where the worker is not a process of its own. `iterate` is one iteration.
With an adapter, every token comes from as many places later as the adapter's id says, so that a test sees it applied.
"""

from __future__ import annotations

import collections
import math
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from .errors import CppExecutorError, RequestError
from .logger import logger
from .requests import GenerationRequest
from .responses import ErrorResponse, FinishReason, LlmResult, LogProbsResult, Response, ResponseWrapper, Result
from .results import Logprob

_CUDA_ERROR = (
    "Encountered an error in forwardAsync function: [TensorRT-LLM][ERROR] CUDA runtime error in "
    "cudaEventSynchronize(get()): an illegal memory access was encountered "
    "(/src/tensorrt_llm/cpp/include/tensorrt_llm/runtime/cudaEvent.h:66)"
)


@dataclass
class Settings:
    """What the worker needs of the LLM's arguments; plain data."""

    backend: str
    engine_dir: str | None
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int | None
    max_beam_width: int
    chunked_prefill: bool
    policy: str
    tokens_per_block: int
    kv_blocks: int
    block_reuse: bool
    stream_interval: int
    iteration_stats: bool
    stats_max_iterations: int
    guided: bool
    guided_ids: list[int]
    lora: bool
    max_lora_rank: int
    eos: int | None
    vocab_size: int
    script: dict[str, Any]

    @property
    def pytorch(self) -> bool:
        return self.backend != "tensorrt"


@dataclass(eq=False)
class Sequence:
    """One sequence of a request; with n > 1 there are several, with beam search one of several beams."""

    request: GenerationRequest
    index: int
    siblings: list[Sequence]
    max_new_tokens: int
    emitted: int = 0
    sent: int = 0
    iterations: int = 0
    cached: int = 0
    tokens: list[int] = field(default_factory=list)
    reserved: int = 0
    in_context: bool = True
    finish: int = FinishReason.NOT_FINISHED

    @property
    def prompt(self) -> list[int]:
        return self.request.prompt_token_ids

    @property
    def beams(self) -> int:
        params = self.request.sampling_params
        return params.best_of if params.use_beam_search else 1


class Engine:
    """All state of the loop."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._waiting: collections.deque[GenerationRequest] = collections.deque()
        self._active: list[Sequence] = []
        self._cancelled: dict[int, int] = {}
        self._known: set[int] = set()
        self._errors: list[ErrorResponse] = []
        self._seen_blocks: set[int] = set()
        self._iteration = 0
        self._completed = 0
        self._paused = 0
        self._next_step = 0.0
        self._broken = False
        self._reused = 0
        self._missed = 0
        self.stats: collections.deque[dict[str, Any]] = collections.deque(maxlen=settings.stats_max_iterations)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._active or self._errors)

    # -- requests ------------------------------------------------------------------------------------------------------

    def enqueue(self, request: GenerationRequest) -> None:
        """RequestError where the runtime refuses it."""
        try:
            request.max_new_tokens = self._deduce_max_tokens(request)
            self._validate(request)
        except Exception as error:
            raise RequestError(str(error)) from error
        if not self.busy:
            self._next_step = time.monotonic()
        self._known.add(request.id)
        self._waiting.append(request)

    def fail(self, request_id: int, error: Exception) -> None:
        """A refused request's answer."""
        self._errors.append(ErrorResponse(request_id, error, request_id))

    def cancel(self, request_id: int) -> None:
        """Takes effect in a later iteration; unknown and ended requests are only logged."""
        if request_id not in self._known:
            logger.warning(f"Request of client_id {request_id} is finished, cannot abort it.")
            return
        self._cancelled.setdefault(request_id, self._iteration + self.settings.script["cancel_latency"])

    def _deduce_max_tokens(self, request: GenerationRequest) -> int:
        max_tokens = request.sampling_params.max_tokens
        limit = self.settings.max_seq_len
        length = len(request.prompt_token_ids)
        if limit is None:
            logger.warning("`default_max_tokens` cannot be deduced")
            if max_tokens is None:
                raise ValueError("`max_tokens` must be set when `default_max_tokens` cannot be deduced")
            return max_tokens
        if not self.settings.pytorch and length > limit:
            raise AssertionError(f"`prompt_token_ids` length ({length}) is greater than `max_seq_len` ({limit})")
        default = limit - length
        if default <= 0:
            logger.warning(
                f"`default_max_tokens` ({default}) should be greater than 0, `default_max_tokens` ({default}) = "
                f"max_seq_len ({limit}) - `splited_prompt_len` ({length}) - `query_token_len` (0)"
            )
            if max_tokens is None:
                raise ValueError("`max_tokens` must be set when `default_max_tokens` is illegal")
        if max_tokens is None:
            return default
        if max_tokens > default:
            logger.warning(
                f"User-specified `max_tokens` ({max_tokens}) is greater than deduced `default_max_tokens` "
                f"({default}), using default_max_tokens instead."
            )
            return default
        return max_tokens

    def _validate(self, request: GenerationRequest) -> None:
        settings, params = self.settings, request.sampling_params
        params._get_bad_words(), params._get_stop_words()
        if request.max_new_tokens <= 0:
            raise RuntimeError(
                "[TensorRT-LLM][ERROR] Assertion failed: mMaxNewTokens > 0 "
                "(/src/tensorrt_llm/cpp/tensorrt_llm/executor/requestImpl.h:94)"
            )
        if params.guided_decoding is not None and params.guided_decoding._kind() and not settings.guided:
            raise RuntimeError(
                "[TensorRT-LLM][ERROR] Assertion failed: Request is specified with GuidedDecodingParams, but "
                "GuidedDecodingConfig is not setup. Please setup GuidedDecodingConfig for Executor to enable guided "
                "decoding. (/src/tensorrt_llm/cpp/tensorrt_llm/batch_manager/guidedDecoder.cpp)"
            )
        if settings.pytorch:
            width = params.best_of if params.use_beam_search else 1
            if width != settings.max_beam_width:
                raise ValueError(
                    f"Request beam width {width} is not equal to max_beam_width {settings.max_beam_width}. "
                    "This is not supported!"
                )
        longest = settings.max_num_tokens if not settings.chunked_prefill else settings.max_seq_len or 1 << 30
        if not settings.pytorch and len(request.prompt_token_ids) > longest:
            raise RuntimeError(
                f"Prompt length ({len(request.prompt_token_ids)}) exceeds maximum input length ({longest}). Set log "
                "level to info and check TRTGptModel logs for how maximum input length is set"
            )
        if settings.lora and request.lora_request is not None:
            self._load_adapter(request.lora_request)

    def _load_adapter(self, adapter: Any) -> None:
        import json

        with open(os.path.join(adapter.path, "adapter_config.json")) as file:
            rank = json.load(file)["r"]
        if rank > self.settings.max_lora_rank:
            raise RuntimeError(
                f"[TensorRT-LLM][ERROR] Assertion failed: Invalid low_rank ({rank}). low_rank must be smaller than "
                f"mMaxLowRank ({self.settings.max_lora_rank})"
            )

    # -- one iteration -------------------------------------------------------------------------------------------------

    def iterate(self) -> list[Any]:
        """The responses of one iteration; errors of refused requests come with the next."""
        started = time.monotonic()
        responses: list[Any] = list(self._errors)
        for error in self._errors:
            self._known.discard(error.client_id)
        self._errors.clear()
        responses += self._terminate_cancelled()
        admitted = self._fetch()
        responses += self._terminate_cancelled()
        scheduled = self._schedule()
        self._pace(scheduled)
        self._iteration += 1
        for sequence in scheduled:
            responses += self._advance(sequence)
        if self._broken:
            responses += self._fail_active()
        self._active = [sequence for sequence in self._active if not sequence.finish]
        if self.settings.iteration_stats:
            self._note_iteration(started, scheduled, admitted)
        return responses

    def _terminate_cancelled(self) -> list[Any]:
        responses: list[Any] = []
        due = {request for request, at in self._cancelled.items() if self._iteration >= at}
        if due and self.settings.pytorch:
            # Dropped from the waiting queue without a response (PyExecutor.update_waiting_queue).
            for request in [request for request in self._waiting if request.id in due]:
                self._waiting.remove(request)
                self._known.discard(request.id)
                del self._cancelled[request.id]
        # The C++ executor looks at active requests only: one that waits is ended once it has become active.
        for sequence in [sequence for sequence in self._active if sequence.request.id in due]:
            self._crash_on_logits(sequence)
            sequence.finish = FinishReason.CANCELLED
            responses.append(self._respond(sequence))
            self._cancelled.pop(sequence.request.id, None)
        self._active = [sequence for sequence in self._active if not sequence.finish]
        return responses

    def _crash_on_logits(self, sequence: Sequence) -> None:
        """NVIDIA/TensorRT-LLM#10810 (facts §7.2)."""
        params = sequence.request.sampling_params
        if not self.settings.pytorch and sequence.request.streaming and params.logprobs and sequence.emitted:
            os.kill(os.getpid(), signal.SIGSEGV)

    def _fetch(self) -> int:
        """Move requests from the queue to the active list; how many sequences that made."""
        admitted = 0
        while self._waiting:
            request = self._waiting[0]
            params = request.sampling_params
            count = 1 if params.use_beam_search else params.best_of
            if len(self._active) + count > self.settings.max_batch_size:
                break
            self._waiting.popleft()
            siblings: list[Sequence] = []
            for index in range(count):
                siblings.append(Sequence(request, index, siblings, request.max_new_tokens))
            self._active += siblings
            admitted += count
        return admitted

    def _blocks(self, tokens: int) -> int:
        return math.ceil(tokens / self.settings.tokens_per_block)

    def _schedule(self) -> list[Sequence]:
        """Generation first, then contexts that fit both budgets, in order."""
        settings = self.settings
        running = [sequence for sequence in self._active if not sequence.in_context]
        if settings.policy == "MAX_UTILIZATION":
            self._grow(running)
            running = [sequence for sequence in running if not sequence.in_context]
        used = sum(sequence.reserved for sequence in self._active)
        budget = settings.max_num_tokens - len(running)
        contexts: list[Sequence] = []
        if not (settings.policy == "STATIC_BATCH" and running):
            for sequence in self._active:
                if not sequence.in_context:
                    continue
                length = len(sequence.prompt) + sequence.emitted
                full = settings.policy != "MAX_UTILIZATION"
                need = self._blocks(len(sequence.prompt) + sequence.max_new_tokens if full else length + 1)
                need *= sequence.beams
                if used + need > settings.kv_blocks or (length > budget and not settings.chunked_prefill):
                    break
                used += need
                budget -= length
                sequence.reserved = need
                self._note_reuse(sequence)
                contexts.append(sequence)
                if budget <= 0:
                    break
        return running + contexts

    def _grow(self, running: list[Sequence]) -> None:
        """MAX_UTILIZATION: a block more where needed; the youngest are paused when there is none."""
        used = sum(sequence.reserved for sequence in self._active)
        for sequence in running:
            sequence_need = self._blocks(len(sequence.prompt) + sequence.emitted + 1) * sequence.beams
            used += sequence_need - sequence.reserved
            sequence.reserved = sequence_need
        for sequence in reversed(running):
            if used <= self.settings.kv_blocks:
                return
            used -= sequence.reserved
            sequence.reserved = 0
            sequence.in_context = True
            self._paused += 1

    def _note_reuse(self, sequence: Sequence) -> None:
        """Prefix blocks that were seen before count as reused, as long as the process lives."""
        size = self.settings.tokens_per_block
        hit = True
        for start in range(0, len(sequence.prompt) - size + 1, size):
            block = hash(tuple(sequence.prompt[: start + size]))
            hit = hit and self.settings.block_reuse and block in self._seen_blocks
            self._seen_blocks.add(block)
            if hit:
                sequence.cached += size
                self._reused += 1
            else:
                self._missed += 1

    def _pace(self, scheduled: list[Sequence]) -> None:
        script = self.settings.script
        if script["prefill_seconds"] and any(sequence.in_context for sequence in scheduled):
            time.sleep(script["prefill_seconds"])
        if script["steps_per_second"]:
            # Held up, it catches up, so that the rate holds on a busy machine.
            self._next_step += 1 / script["steps_per_second"]
            time.sleep(max(0.0, self._next_step - time.monotonic()))

    # -- one token -----------------------------------------------------------------------------------------------------

    def _advance(self, sequence: Sequence) -> list[Any]:
        request = sequence.request
        if (error := self._fault(sequence)) is not None:
            for sibling in sequence.siblings:
                sibling.finish = FinishReason.CANCELLED
            self._known.discard(request.id)
            return [ErrorResponse(request.id, error, request.id)]
        sequence.in_context = False
        sequence.iterations += 1
        token_id = self._token(sequence)
        params = request.sampling_params
        end_id = -1 if params.ignore_eos else params.end_id
        sequence.emitted += 1
        ended = token_id == end_id and sequence.emitted > (params.min_tokens or 0)
        if not ended or self.settings.pytorch:
            # The engine's sampling kernels do not count the end token as output; the PyTorch sampler does.
            sequence.tokens.append(token_id)
        stopped = any(sequence.tokens[-len(word) :] == word for word in params._get_stop_words())
        full = sequence.emitted >= sequence.max_new_tokens
        if ended:
            sequence.finish = FinishReason.END_ID
        elif full and (self.settings.pytorch or not stopped):
            sequence.finish = FinishReason.LENGTH
        elif stopped:
            sequence.finish = FinishReason.STOP_WORDS
        response = self._respond(sequence)
        return [] if response is None else [response]

    def _token(self, sequence: Sequence) -> int:
        settings, request, prompt = self.settings, sequence.request, sequence.prompt
        params = request.sampling_params
        eos = params.end_id if params.end_id is not None and params.end_id >= 0 else settings.eos
        if params.guided_decoding is not None and params.guided_decoding._kind():
            ids = settings.guided_ids
            return ids[sequence.emitted] if sequence.emitted < len(ids) else eos
        end_after = settings.script["end_after"]
        if end_after is not None and sequence.emitted == max(end_after, params.min_tokens or 0) and eos is not None:
            return eos
        shift = sequence.index
        if settings.lora and request.lora_request is not None:
            shift += request.lora_request.adapter_id
        bad = {word[0] for word in params._get_bad_words() if len(word) == 1}
        place = sequence.emitted + shift
        for offset in range(len(prompt)):
            token_id = prompt[(place + offset) % len(prompt)]
            if token_id not in bad:
                return token_id
        return prompt[place % len(prompt)]

    def _fault(self, sequence: Sequence) -> str | None:
        """The message of a request's own failure; other faults do not come back."""
        for fault in self.settings.script["faults"]:
            picked = fault.get("max_new_tokens") in (None, sequence.request.sampling_params.max_tokens)
            if picked and sequence.index == 0 and fault.get("at_token", 0) == sequence.emitted:
                match fault["action"]:
                    case "error":
                        return fault.get("message", "Request failed: scripted error")
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
                    case "cuda":
                        self._broken = True
                    case "raise":
                        raise CppExecutorError("scripted engine failure")
                    case action:
                        raise ValueError(f"no such fault: {action}")
        return None

    def _fail_active(self) -> list[Any]:
        """The C++ executor catches the error of an iteration: every active request fails, and so do all that follow."""
        requests = {sequence.request.id for sequence in self._active}
        for sequence in self._active:
            sequence.finish = FinishReason.CANCELLED
        self._known -= requests
        return [ErrorResponse(request, _CUDA_ERROR, request) for request in requests]

    # -- responses -----------------------------------------------------------------------------------------------------

    def _respond(self, sequence: Sequence) -> Any:
        """None where nothing is sent in this iteration."""
        request, params, settings = sequence.request, sequence.request.sampling_params, self.settings
        if not sequence.finish:
            if not request.streaming:
                return None
            interval = settings.stream_interval
            if sequence.iterations > 1 and sequence.iterations % interval:
                return None
        else:
            sequence.reserved = 0
            self._completed += 1
        new = sequence.tokens[sequence.sent :]
        sequence.sent = len(sequence.tokens)
        is_final = all(sibling.finish for sibling in sequence.siblings)
        if is_final:
            self._known.discard(request.id)
        wrapped = None
        log_probs = None
        if params.logprobs:
            if settings.pytorch:
                log_probs = [[self._logprobs(sequence, token_id) for token_id in sequence.tokens]]
            else:
                wrapped = [self._logprobs(sequence, token_id) for token_id in new]
        prompt_logprobs = None
        if params.prompt_logprobs:
            prompt_logprobs = [self._logprobs(sequence, token_id) for token_id in sequence.prompt]
        beams = params.n if params.use_beam_search else 1
        if params.use_beam_search:
            output_token_ids = [self._beam(sequence, beam) for beam in range(beams)]
            if log_probs is not None:
                log_probs = [[self._logprobs(sequence, token_id) for token_id in beam] for beam in output_token_ids]
        else:
            output_token_ids = [new]
        result: Any = Result(
            output_token_ids,
            [int(sequence.finish)] * beams,
            is_final=is_final,
            sequence_index=sequence.index,
            decoding_iter=sequence.iterations,
            cum_log_probs=[-0.5 * sequence.emitted - beam for beam in range(beams)] if log_probs is not None else None,
            log_probs=log_probs,
        )
        if settings.pytorch:
            result = LlmResult(result, cached_tokens=sequence.cached)
        response = Response(request.id, result)
        if wrapped is not None or prompt_logprobs is not None:
            return ResponseWrapper(response, LogProbsResult(prompt_logprobs, wrapped))
        return response

    def _beam(self, sequence: Sequence, beam: int) -> list[int]:
        """All tokens of a beam: the best is the plain sequence, each further one begins a place later."""
        if not beam:
            return list(sequence.tokens)
        prompt = sequence.prompt
        return [prompt[(place + beam) % len(prompt)] for place in range(len(sequence.tokens))]

    def _logprobs(self, sequence: Sequence, token_id: int) -> dict[int, Logprob]:
        count = sequence.request.sampling_params.logprobs or 1
        others = [other for other in range(count + 1) if other != token_id][: count - 1]
        return {token_id: Logprob(-0.5, 1), **{other: Logprob(-2.0, rank + 2) for rank, other in enumerate(others)}}

    # -- statistics ----------------------------------------------------------------------------------------------------

    def _note_iteration(self, started: float, scheduled: list[Sequence], admitted: int) -> None:
        settings = self.settings
        contexts = [sequence for sequence in scheduled if sequence.iterations == 1]
        used = sum(sequence.reserved for sequence in self._active)
        looked_up = self._reused + self._missed
        self.stats.append(
            {
                "cpuMemUsage": 0,
                "gpuMemUsage": 0,
                "pinnedMemUsage": 0,
                "iter": self._iteration,
                "iterLatencyMS": (time.monotonic() - started) * 1e3,
                "newActiveRequestsQueueLatencyMS": 0.0,
                "maxBatchSizeRuntime": settings.max_batch_size,
                "maxBatchSizeStatic": settings.max_batch_size,
                "maxBatchSizeTunerRecommended": 0,
                "maxNumActiveRequests": settings.max_batch_size,
                "maxNumTokensRuntime": settings.max_num_tokens,
                "maxNumTokensStatic": settings.max_num_tokens,
                "maxNumTokensTunerRecommended": 0,
                "numActiveRequests": len(self._active),
                "numCompletedRequests": self._completed,
                "numNewActiveRequests": admitted,
                "numQueuedRequests": len(self._waiting),
                "timestamp": time.strftime("%m-%d-%Y %H:%M:%S.000000"),
                "kvCacheStats": {
                    "allocNewBlocks": self._missed,
                    "allocTotalBlocks": looked_up,
                    "cacheHitRate": self._reused / looked_up if looked_up else 0.0,
                    "freeNumBlocks": settings.kv_blocks - used,
                    "maxNumBlocks": settings.kv_blocks,
                    "missedBlocks": self._missed,
                    "reusedBlocks": self._reused,
                    "tokensPerBlock": settings.tokens_per_block,
                    "usedNumBlocks": used,
                },
                "inflightBatchingStats": {
                    "avgNumDecodedTokensPerIter": 1.0,
                    "microBatchId": 0,
                    "numContextRequests": len(contexts),
                    "numCtxTokens": sum(len(sequence.prompt) for sequence in contexts),
                    "numGenRequests": len(scheduled) - len(contexts),
                    "numPausedRequests": self._paused,
                    "numScheduledRequests": len(scheduled),
                },
            }
        )
        self._completed = 0
        self._paused = 0
