"""The engine's loop, in rank 0's process, or in the LLM's own where the worker is not a process of its own."""

from __future__ import annotations

import collections
import os
import signal
import time
from pathlib import Path
from typing import Any

from .errors import RequestError
from .guides import problem_of
from .iteration_statistics import describe_iteration
from .logger import logger
from .logprobs import likeliest, logprobs, of_most
from .lora import load_adapter
from .max_tokens import deduce_max_tokens
from .memory import ENGINE_OUT_OF_MEMORY, memory_model, torch_out_of_memory
from .requests import GenerationRequest
from .responses import ErrorResponse, FinishReason, LlmResult, LogProbsResult, Response, ResponseWrapper, Result
from .sampling_config import check_request
from .scheduler import Scheduler
from .sequence import Sequence, strike
from .settings import ASSERTS_BEAM_WIDTH, FAILS_GUIDED_REQUESTS, HAS_REQUEST_SEEDS, SINCE_1_3
from .worker_settings import WorkerSettings

_FORWARD_ERROR = "Encountered an error in forwardAsync function: "
_CUDA_ERROR = (
    "Encountered an error in forwardAsync function: [TensorRT-LLM][ERROR] CUDA runtime error in "
    "cudaEventSynchronize(get()): an illegal memory access was encountered "
    "(/src/tensorrt_llm/cpp/include/tensorrt_llm/runtime/cudaEvent.h:66)"
)


class Engine:
    """All state of the loop."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self._scheduler = Scheduler(settings)
        self._known: set[int] = set()
        self._cancelled: dict[int, int] = {}
        self._errors: list[ErrorResponse] = []
        self._iteration = 0
        self._next_step = 0.0
        self._failure: str | None = None
        self._broken = False
        self._assertion: str | None = None
        self._ended = False
        self._drawn = 0
        self.stats: collections.deque[dict[str, Any]] = collections.deque(maxlen=settings.stats_max_iterations)

    @property
    def busy(self) -> bool:
        """Refused requests are answered by another thread, also when the loop has ended."""
        computing = not self._ended and (self._scheduler.waiting or self._scheduler.active)
        return bool(computing or self._errors)

    # -- requests ------------------------------------------------------------------------------------------------------

    def enqueue(self, request: GenerationRequest) -> None:
        """RequestError where the runtime refuses it; what loading its adapter raises, which is the worker's end."""
        adapter = self._load_adapter(request)
        try:
            request.max_new_tokens = deduce_max_tokens(request, self.settings)
            self._validate(request)
        except Exception as error:
            raise RequestError(str(error)) from error
        if adapter is not None:
            self._cache_adapter(*adapter)
        request.drawn = self._draw(request.sampling_params)
        if not self.busy:
            self._next_step = time.monotonic()
        self._known.add(request.id)
        self._scheduler.waiting.append(request)

    def _load_adapter(self, request: GenerationRequest) -> tuple[int, int | None] | None:
        """Before the request is validated (base_worker.py, `_enqueue_request`), in front of any handler of errors."""
        if not self.settings.lora or request.lora_request is None:
            return None
        return load_adapter(Path(request.lora_request.path))

    def _cache_adapter(self, rank: int, takes: int | None) -> None:
        """The C++ executor refuses the request; PyExecutor prepares it in the loop, outside of its handlers of errors
        (`PeftCacheManager.prepare_resources`), which ends the loop."""
        settings, message = self.settings, None
        if rank > settings.max_lora_rank:
            message = f"Invalid low_rank ({rank}). low_rank must be smaller than mMaxLowRank ({settings.max_lora_rank})"
        elif takes is not None and takes != settings.hidden_size:
            message = f"Expected shape[-1] of {settings.hidden_size} but got {takes}"
        if message is not None:
            message = f"[TensorRT-LLM][ERROR] Assertion failed: {message}"
            if not settings.pytorch:
                raise RequestError(message)
            self._assertion = message

    def fail(self, request_id: int, error: Exception) -> None:
        """A refused request's answer."""
        self._errors.append(ErrorResponse(request_id, error, request_id))

    def cancel(self, request_id: int) -> None:
        """Takes effect in a later iteration; unknown and ended requests are only logged."""
        if request_id in self._known:
            self._cancelled.setdefault(request_id, self._iteration + self.settings.script["cancel_latency"])
        else:
            logger.warning(f"Request of client_id {request_id} is finished, cannot abort it.")

    def _draw(self, params: Any) -> int:
        """What chance adds to the place where a request begins, if the script samples.

        The C++ sampler takes the request's seed, by default 0. TorchSampler has one generator with the seed 42 for all
        (_torch/pyexecutor/sampler.py, about 1.2), and one for each seeded request since #17172.
        """
        if not self.settings.script["sampled"] or params._greedy_decoding or params.use_beam_search:
            return 0
        if not self.settings.torch_sampler or (HAS_REQUEST_SEEDS and params.seed is not None):
            return (params.seed or 0) % 97
        self._drawn += 1
        return 42 + self._drawn

    def _validate(self, request: GenerationRequest) -> None:
        settings, params = self.settings, request.sampling_params
        # They raise where the strings were not tokenised.
        params._get_bad_words()
        params._get_stop_words()
        check_request(params, request.max_new_tokens)
        if params.guided_decoding is not None and params.guided_decoding._kind() and not settings.guided:
            raise RuntimeError(
                "[TensorRT-LLM][ERROR] Assertion failed: Request is specified with GuidedDecodingParams, but "
                "GuidedDecodingConfig is not setup. Please setup GuidedDecodingConfig for Executor to enable guided "
                "decoding."
            )
        if settings.pytorch:
            self._validate_beams(params)
        length = len(request.prompt_token_ids)
        if not settings.pytorch and not settings.chunked_prefill and length > settings.max_num_tokens:
            raise RuntimeError(
                f"Prompt length ({length}) exceeds maximum input length ({settings.max_num_tokens}). Set log level to "
                "info and check TRTGptModel logs for how maximum input length is set"
            )

    def _validate_beams(self, params: Any) -> None:
        """An assert of the loop itself in executor_request_queue.py (@a98a9061, about 1.2.0rc3; 1.1.0rc1 too, #7368).

        #9228 (November 2025) made it an error of the request: `PyExecutor._validate_request`. Which release of 1.2 was
        the first was not seen; here it is 1.2.1.
        """
        settings = self.settings
        width = params.best_of if params.use_beam_search else 1
        if width != settings.max_beam_width:
            message = (
                f"Request beam width {width} is not equal to max_beam_width {settings.max_beam_width}. "
                "This is not supported!"
            )
            if not ASSERTS_BEAM_WIDTH:
                raise ValueError(message)
            self._assertion = message
        elif settings.torch_sampler and width > 1 and SINCE_1_3 and params.logprobs:
            # TorchSampler.validate_request in _torch/pyexecutor/sampler (#11584, about 1.3.0rc5).
            raise ValueError("Beam search only supports returning the sampled logprob per token")

    # -- one iteration -------------------------------------------------------------------------------------------------

    def iterate(self) -> list[Any]:
        """The responses of one iteration; errors of refused requests come with the next."""
        responses: list[Any] = list(self._errors)
        self._errors.clear()
        if self._assertion is not None:
            self._end_loop(self._assertion)
        if self._ended:
            return responses
        started = time.monotonic()
        scheduler = self._scheduler
        pytorch = self.settings.pytorch
        if not pytorch:
            responses += self._terminate_cancelled()
        fetched = scheduler.fetch()
        if not pytorch:
            responses += self._terminate_cancelled()
        if pytorch and fetched:
            responses += self._fail_unknown_tokens()
        scheduled = scheduler.schedule()
        self._pace(scheduled)
        self._iteration += 1
        if pytorch and scheduled:
            # `_handle_canceled_requests` comes behind the forward step, and in iterations that have one.
            responses += self._terminate_cancelled()
            scheduled = [sequence for sequence in scheduled if not sequence.finish]
        contexts = [sequence for sequence in scheduled if sequence.in_context]
        if not self._fits(scheduled):
            error = torch_out_of_memory() if self.settings.pytorch else f"{_FORWARD_ERROR}{ENGINE_OUT_OF_MEMORY}"
            return responses + self._fail_forward(error)
        responses += self._fail_guides(contexts)
        completed = 0
        for sequence in scheduled:
            if not sequence.finish and (response := self._advance(sequence)) is not None:
                responses.append(response)
                completed += bool(sequence.finish)
        failure = _CUDA_ERROR if self._broken else self._failure
        if failure is not None:
            self._failure = None
            return responses + self._fail_forward(failure)
        scheduler.forget_finished()
        if self.settings.iteration_stats:
            self.stats.append(
                describe_iteration(
                    settings=self.settings,
                    scheduler=scheduler,
                    number=self._iteration,
                    seconds=time.monotonic() - started,
                    scheduled=len(scheduled),
                    contexts=contexts,
                    fetched=fetched,
                    completed=completed,
                )
            )
        return responses

    def _terminate_cancelled(self) -> list[Any]:
        due = {request for request, at in self._cancelled.items() if self._iteration >= at}
        if not due:
            return []
        scheduler = self._scheduler
        responses: list[Any] = []
        if self.settings.pytorch:
            # Dropped from the waiting queue without a response (PyExecutor: update_waiting_queue).
            for request in [request for request in scheduler.waiting if request.id in due]:
                scheduler.waiting.remove(request)
                self._forget(request.id)
        # The C++ executor looks at active requests only: one that waits is ended once it has become active.
        for sequence in [sequence for sequence in scheduler.active if sequence.request.id in due]:
            if not self.settings.pytorch and sequence.request.streaming and sequence.params.logprobs:
                # NVIDIA/TensorRT-LLM#10810 (facts §7.2).
                os.kill(os.getpid(), signal.SIGSEGV)
            scheduler.end([sequence], FinishReason.CANCELLED)
            responses.append(self._respond(sequence))
        scheduler.forget_finished()
        return responses

    def _pace(self, scheduled: list[Sequence]) -> None:
        script = self.settings.script
        if script["prefill_seconds"] and any(sequence.in_context for sequence in scheduled):
            time.sleep(script["prefill_seconds"])
        if script["steps_per_second"]:
            # Held up, it catches up, so that the rate holds on a busy machine.
            self._next_step += 1 / script["steps_per_second"]
            time.sleep(max(0.0, self._next_step - time.monotonic()))
        elif not scheduled:
            time.sleep(0.001)

    def _advance(self, sequence: Sequence) -> Any:
        """The response to the next token; None where none is sent."""
        fault = sequence.fault()
        if fault is not None:
            if fault["action"] in ("cuda", "forward"):
                self._broken = self._broken or fault["action"] == "cuda"
                self._failure = fault.get("message", "scripted error")
                return None
            if fault["action"] == "error":
                self._scheduler.end(sequence.siblings, FinishReason.CANCELLED)
                return self._error(sequence.request.id, fault.get("message", "scripted error"))
            strike(fault["action"])  # goes on where it was stopped, and is continued
        sequence.advance()
        if sequence.finish or self._is_sent(sequence):
            return self._respond(sequence)
        return None

    def _is_sent(self, sequence: Sequence) -> bool:
        interval = self.settings.stream_interval
        return sequence.request.streaming and (sequence.iterations == 1 or not sequence.iterations % interval)

    def _fits(self, scheduled: list[Sequence]) -> bool:
        memory, settings = memory_model(), self.settings
        if memory is None:
            return True
        tokens = sum(len(sequence.prompt) if sequence.in_context else 1 for sequence in scheduled)
        kv_bytes = settings.kv_blocks * settings.tokens_per_block * (memory.kv_cache or 0)
        return memory.runs(min(tokens, settings.max_num_tokens), settings.max_num_tokens, kv_bytes)

    def _fail_unknown_tokens(self) -> list[Any]:
        """`PyExecutor._validate_request`, when a request becomes active."""
        limit = self.settings.vocab_size
        if limit is None:
            return []
        unknown = [sequence for sequence in self._scheduler.active if max(sequence.prompt) >= limit]
        self._scheduler.end(unknown, FinishReason.CANCELLED)
        self._scheduler.forget_finished()
        return [self._error(request, "Token ID out of range") for request in {each.request.id for each in unknown}]

    def _fail_guides(self, contexts: list[Sequence]) -> list[Any]:
        """Matchers are made for the first token. Since #9078 (November 2025) a bad guide is its request's own error in
        PyExecutor; before, and in the C++ executor, it is raised in the loop."""
        responses: list[Any] = []
        for sequence in contexts:
            problem = problem_of(sequence.params, self.settings.guided)
            if problem is None:
                continue
            if self.settings.pytorch and FAILS_GUIDED_REQUESTS:
                self._scheduler.end(sequence.siblings, FinishReason.CANCELLED)
                responses.append(self._error(sequence.request.id, f"Guided decoding error: {problem}"))
            elif self.settings.pytorch:
                self._assertion = problem
            else:
                self._failure = f"{_FORWARD_ERROR}{problem}"
        return responses

    def _fail_forward(self, message: str) -> list[Any]:
        """An iteration raises: every active request fails. The C++ executor goes on (executorImpl.cpp).

        PyExecutor goes on only without what needs the iteration's output (`_executor_loop_overlap` and `_executor_loop`
        of 1.2.0rc3 and 1.3): "assert sample_state is not None", and before it the guided decoder's `outputs['logits']`.
        """
        failed = [sequence for sequence in self._scheduler.active if not sequence.finish]
        self._scheduler.end(failed, FinishReason.CANCELLED)
        responses = [self._error(request, message) for request in {sequence.request.id for sequence in failed}]
        self._scheduler.forget_finished()
        if self.settings.pytorch and self.settings.guided:
            self._end_loop("'NoneType' object is not subscriptable")
        elif self.settings.overlap:
            self._end_loop("Sampling failed")
        return responses

    def _end_loop(self, message: str) -> None:
        """py_executor.py, `_event_loop_wrapper`: it is logged, and requests are taken as before."""
        logger.error(f"Error in event loop: {message}")
        self.end()

    def end(self) -> None:
        """Compute nothing any more."""
        self._ended = True

    # -- responses -----------------------------------------------------------------------------------------------------

    def _error(self, request_id: int, message: str) -> ErrorResponse:
        self._forget(request_id)
        return ErrorResponse(request_id, message, request_id)

    def _forget(self, request_id: int) -> None:
        self._known.discard(request_id)
        self._cancelled.pop(request_id, None)

    def _respond(self, sequence: Sequence) -> Any:
        params = sequence.params
        is_final = bool(sequence.finish) and all(sibling.finish for sibling in sequence.siblings)
        if is_final:
            self._forget(sequence.request.id)
        new = sequence.tokens[sequence.sent :]
        sequence.sent = len(sequence.tokens)
        beams = [sequence, *sequence.further][: params.n] if params.use_beam_search else [sequence]
        tokens = [list(beam.tokens) for beam in beams] if params.use_beam_search else [new]
        # Of beams, from 1.3 on, also where it is 0.
        wants = params.logprobs or (params.logprobs == 0 and SINCE_1_3 and params.use_beam_search)
        pytorch_logprobs = wants and self.settings.pytorch
        result: Any = Result(
            tokens,
            # A beam that has ended keeps its reason, also where the others are cancelled.
            [beam.reason or sequence.finish for beam in beams],
            is_final=is_final,
            sequence_index=sequence.index,
            decoding_iter=sequence.iterations,
        )
        if pytorch_logprobs:
            # The whole list each time (facts §2.6); the engine backend's come with the wrapper, new ones only.
            kept = tokens if params.use_beam_search else [sequence.tokens]
            of = logprobs if params.use_beam_search or not self.settings.torch_sampler else likeliest
            result.log_probs = [[of(token_id, params) for token_id in beam] for beam in kept]
            result.cum_log_probs = [-0.5 * beam.emitted - number for number, beam in enumerate(beams)]
        if self.settings.pytorch:
            began = bool(sequence.emitted or not pytorch_logprobs)
            result = LlmResult(result, cached_tokens=sequence.cached, began=began)
        response = Response(sequence.request.id, result)
        if not params.prompt_logprobs and (pytorch_logprobs or not params.logprobs):
            return response
        prompt = generation = None
        if params.prompt_logprobs:
            prompt = [of_most(token_id, params.prompt_logprobs) for token_id in sequence.prompt]
        if params.logprobs and not self.settings.pytorch:
            if params.use_beam_search and params.best_of > 1:
                # compute_logprobs in executor/result.py (about 1.2) takes logits of [1, tokens, vocabulary]; those of
                # beams are [beams, tokens, vocabulary], so that the token is looked up among the places.
                raise IndexError(
                    f"index {max(sequence.tokens)} is out of bounds for dimension 0 with size {len(sequence.tokens)}"
                )
            generation = [logprobs(token_id, params) for token_id in new]
        return ResponseWrapper(response, LogProbsResult(prompt, generation))
