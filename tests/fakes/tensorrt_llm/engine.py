"""The engine's loop, in rank 0's process, or in the LLM's own where the worker is not a process of its own."""

from __future__ import annotations

import collections
import json
import os
import re
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import xgrammar

from . import gpu
from .results import ErrorResponse, FinishReason, LlmResult, Logprob, LogProbsResult, Response, ResponseWrapper, Result
from .sampling import GenerationRequest, check_request
from .scheduler import Scheduler, Sequence, strike
from .settings import (
    ASSERTS_BEAM_WIDTH,
    ENGINE_OUT_OF_MEMORY,
    FAILS_GUIDED_REQUESTS,
    HAS_REQUEST_SEEDS,
    MIXES_POSITIONS,
    SINCE_1_3,
    RequestError,
    WorkerSettings,
    logger,
    memory_model,
    torch_out_of_memory,
)

# -- how many tokens a request gets (base_worker.py, `_deduce_max_tokens`; facts §7.1) ---------------------------------


def deduce_max_tokens(request: GenerationRequest, settings: WorkerSettings) -> int:
    max_tokens: int | None = request.sampling_params.max_tokens
    limit = settings.max_seq_len
    length = len(request.prompt_token_ids)
    if not settings.pytorch and length > limit:
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


# -- log-probabilities, which are all the same -------------------------------------------------------------------------


def likeliest(token_id: int, params: Any) -> dict[int, Logprob]:
    """The likeliest tokens only: a sampled one need not be among them (TorchSampler of about 1.2, by torch.topk)."""
    if params._greedy_decoding or token_id % 2:
        return logprobs(token_id, params.logprobs)
    return {
        other: Logprob(-0.1, rank + 1) for rank, other in enumerate(range(token_id + 1, token_id + 1 + params.logprobs))
    }


def logprobs(token_id: int, most: int) -> dict[int, Logprob]:
    """The token's own, and of as many others as were asked for."""
    count = most or 1
    others = [other for other in range(count + 1) if other != token_id][: count - 1]
    return {token_id: Logprob(-0.5, 1), **{other: Logprob(-2.0, rank + 2) for rank, other in enumerate(others)}}


# -- guides, of which the decoder makes matchers in the iteration that computes a request's prompt ---------------------


def problem_of(params: Any, package: str) -> str | None:
    """Why no matcher can be made of a request's guide (grammar_matcher.py); None if one can, or without a guide."""
    kind, text = (params.guided_decoding and params.guided_decoding._kind()) or ("", "")
    if package == "llguidance":
        problem = _problem_for_llguidance(kind, text)
        return f"LLGuidance matcher error: {problem}" if problem else None
    try:
        match kind:
            case "JSON_SCHEMA":
                xgrammar.Grammar.from_json_schema(text)
            case "REGEX":
                xgrammar.Grammar.from_regex(text)
            case "EBNF_GRAMMAR":
                xgrammar.Grammar.from_ebnf(text)
    except RuntimeError as error:
        return str(error)
    return None


def _problem_for_llguidance(kind: str, text: str) -> str:
    """The package itself, without the model's tokens. EBNF_GRAMMAR is one of Lark."""
    from llguidance import LLMatcher

    match kind:
        case "JSON_SCHEMA":
            grammar = LLMatcher.grammar_from_json_schema(text)
        case "REGEX":
            grammar = LLMatcher.grammar_from_regex(text)
        case "EBNF_GRAMMAR":
            grammar = LLMatcher.grammar_from_lark(text)
        case _:
            return ""
    return str(LLMatcher.validate_grammar(grammar))


# -- loading adapters: `lora_manager.py` and `lora_helper.py` of about 1.2 ---------------------------------------------

_PATTERN = re.compile(r"(.*)\.(\d+)\.(\w+)\.(\w+|\w+\.\w+|(\w+)\.(\d+)\.(\w+))\.(?:lora_(?:(A|B)\.weight))")
_MODULES = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_dense": "o_proj",
    "mlp_h_to_4h": "gate_proj",
    "mlp_4h_to_h": "down_proj",
    "mlp_gate": "up_proj",
    "moe_h_to_4h": "w1",
    "moe_4h_to_h": "w2",
    "moe_gate": "w3",
    "moe_router": "gate",
}


def load_adapter(folder: Path) -> tuple[int, int | None]:
    """The largest rank and what its first modules take; raises whatever the real one does."""
    config = json.loads((folder / "adapter_config.json").read_text())
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        if not (folder / "adapter_model.bin").is_file():
            raise ValueError(f"Failed to load adapter_model from {folder}")
        return int(config["r"]), None
    shapes = _shapes(file)
    modules: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for key, shape in shapes.items():
        match = _PATTERN.match(key)
        if match is None:
            if "lm_head" not in key and "embed_tokens" not in key:
                raise KeyError(f"unsupported key {key} from HF LoRA weights")
            continue
        module = match[7] or match[4]
        assert module in _MODULES.values(), f"hf_module {module} is not in supported list {set(_MODULES.values())}"
        modules[key.rpartition(".lora_")[0]][match[8]] = shape
    for name, sides in modules.items():
        if missing := {"A", "B"} - sides.keys():
            raise ValueError(f"{name} is missing required matrices: {missing}")
    float(config["lora_alpha"])
    return max(sides["A"][0] for sides in modules.values()), next(iter(modules.values()))["A"][1]


def _shapes(file: Path) -> dict[str, list[int]]:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    if 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0) != len(content):
        raise OSError("Error while deserializing header: incomplete metadata, file not fully covered")
    return {name: entry["shape"] for name, entry in header.items()}


# -- the statistics of an iteration, as JSON has them ------------------------------------------------------------------


def describe_iteration(
    *,
    settings: WorkerSettings,
    scheduler: Scheduler,
    number: int,
    seconds: float,
    scheduled: int,
    contexts: list[Sequence],
    fetched: int,
    completed: int,
) -> dict[str, Any]:
    paused, scheduler.paused = scheduler.paused, 0
    return {
        "cpuMemUsage": 0,
        "gpuMemUsage": 0,
        "pinnedMemUsage": 0,
        "iter": number,
        "iterLatencyMS": seconds * 1e3,
        "newActiveRequestsQueueLatencyMS": 0.0,
        "maxBatchSizeRuntime": settings.max_batch_size,
        "maxBatchSizeStatic": settings.max_batch_size,
        "maxBatchSizeTunerRecommended": 0,
        "maxNumActiveRequests": settings.max_batch_size,
        "maxNumTokensRuntime": settings.max_num_tokens,
        "maxNumTokensStatic": settings.max_num_tokens,
        "maxNumTokensTunerRecommended": 0,
        "numActiveRequests": len(scheduler.active) + completed,
        "numCompletedRequests": completed,
        "numNewActiveRequests": fetched,
        # PyExecutor's `request_queue.qsize()`: its inbox, which an iteration empties; those that wait are elsewhere.
        "numQueuedRequests": 0 if settings.pytorch else len(scheduler.waiting),
        "timestamp": time.strftime("%m-%d-%Y %H:%M:%S.000000"),
        "kvCacheStats": scheduler.cache.statistics(),
        "inflightBatchingStats": {
            "avgNumDecodedTokensPerIter": 1.0,
            "microBatchId": 0,
            "numContextRequests": len(contexts),
            "numCtxTokens": sum(len(sequence.prompt) for sequence in contexts),
            "numGenRequests": scheduled - len(contexts),
            "numPausedRequests": paused,
            "numScheduledRequests": scheduled,
        },
    }


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
        """Load it before the request is validated (base_worker.py, `_enqueue_request`): nothing handles errors."""
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
        self._errors.append(ErrorResponse(request_id, error))

    def cancel(self, request_id: int) -> None:
        """Takes effect in a later iteration; unknown and ended requests are only logged."""
        if request_id in self._known:
            self._cancelled.setdefault(request_id, self._iteration + 1)
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
        if refused := [name for name in settings.refused_by_drafts if getattr(params, name)]:
            raise ValueError(f"{', '.join(refused)} beside speculative decoding")
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
        width = params.best_of
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
        if (error := self._forward_error(scheduled)) is not None:
            return responses + self._fail_forward(error)
        responses += self._fail_guides(contexts)
        self._sample(scheduled)
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

    def _sample(self, scheduled: list[Sequence]) -> None:
        """TorchSampler raises what compiling its kernel raises (`_sample_async` of py_executor.py handles it)."""
        compiles = self.settings.script["compiles"]
        if not (compiles and self.settings.torch_sampler):
            return
        if all(sequence.params._greedy_decoding for sequence in scheduled):
            return
        try:
            gpu.sample(compiles)
        except Exception as error:
            self._failure = str(error)

    def _advance(self, sequence: Sequence) -> Any:
        """The response to the next token; None where none is sent."""
        fault = sequence.fault()
        if fault is not None:
            if fault["action"].startswith("gpu_"):
                try:
                    gpu.fail(fault["action"])
                except RuntimeError as error:  # torch's of memory is one
                    self._failure = str(error)
                return None
            if fault["action"] in ("cuda", "forward"):
                self._broken = self._broken or fault["action"] == "cuda"
                self._failure = fault.get("message", "scripted error")
                return None
            if fault["action"] == "error":
                self._scheduler.end([sequence], FinishReason.CANCELLED)
                return self._error(sequence.request.id, fault.get("message", "scripted error"))
            if fault["action"] == "lose":
                sequence.advance()  # what is lost is the response
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

    def _forward_error(self, scheduled: list[Sequence]) -> str | None:
        """Why an iteration fails as a whole, None if it does not.

        Where some requests of a batch have no places of their tokens in images, others get theirs: a shape that does
        not fit, or a wrong position (#16944).
        """
        positions = {sequence.request.has_positions for sequence in scheduled}
        if self.settings.mrope and MIXES_POSITIONS and len(positions) > 1:
            return "Sizes of tensors must match except in dimension 2."
        if self._fits(scheduled):
            return None
        return torch_out_of_memory() if self.settings.pytorch else f"{_FORWARD_ERROR}{ENGINE_OUT_OF_MEMORY}"

    def _fail_unknown_tokens(self) -> list[Any]:
        """`PyExecutor._validate_request`, when a request becomes active."""
        limit = self.settings.vocab_size
        if limit is None:
            return []
        unknown = [
            sequence
            for sequence in self._scheduler.active
            if not sequence.request.has_images and max(sequence.prompt) >= limit
        ]
        self._scheduler.end(unknown, FinishReason.CANCELLED)
        self._scheduler.forget_finished()
        return [self._error(each.request.id, "Token ID out of range") for each in unknown]

    def _fail_guides(self, contexts: list[Sequence]) -> list[Any]:
        """Matchers are made for the first token. Since #9078 (November 2025) a bad guide is its request's own error in
        PyExecutor; before, and in the C++ executor, it is raised in the loop."""
        responses: list[Any] = []
        for sequence in contexts:
            problem = problem_of(sequence.params, self.settings.guided)
            if problem is None:
                continue
            if self.settings.pytorch and FAILS_GUIDED_REQUESTS:
                self._scheduler.end([sequence], FinishReason.CANCELLED)
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
        responses = [self._error(sequence.request.id, message) for sequence in failed]
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
        return ErrorResponse(request_id, message)

    def _forget(self, request_id: int) -> None:
        self._known.discard(request_id)
        self._cancelled.pop(request_id, None)

    def _respond(self, sequence: Sequence) -> Any:
        params = sequence.params
        is_final = bool(sequence.finish)
        if is_final:
            self._forget(sequence.request.id)
        new = sequence.tokens[sequence.sent :]
        sequence.sent = len(sequence.tokens)
        beams = [sequence, *sequence.further]
        tokens = [list(beam.tokens) for beam in beams] if params.use_beam_search else [new]
        # Of beams, from 1.3 on, also where it is 0.
        wants = params.logprobs or (params.logprobs == 0 and SINCE_1_3 and params.use_beam_search)
        pytorch_logprobs = wants and self.settings.pytorch
        result: Any = Result(
            tokens,
            # A beam that has ended keeps its reason, also where the others are cancelled.
            [beam.reason or sequence.finish for beam in beams],
            is_final,
            None,
            None,
        )
        if pytorch_logprobs:
            # The whole list each time (facts §2.6); the engine backend's come with the wrapper, new ones only.
            kept = tokens if params.use_beam_search else [sequence.tokens]
            by_torch = self.settings.torch_sampler and not params.use_beam_search
            result.log_probs = [
                [likeliest(each, params) if by_torch else logprobs(each, params.logprobs) for each in beam]
                for beam in kept
            ]
            result.cum_log_probs = [-0.5 * beam.emitted - number for number, beam in enumerate(beams)]
        if self.settings.pytorch:
            began = bool(sequence.emitted or not pytorch_logprobs)
            result = LlmResult(result, cached_tokens=sequence.cached, began=began)
        response = Response(sequence.request.id, result)
        if self.settings.pytorch and SINCE_1_3 and params.prompt_logprobs is not None:
            # `_compute_pytorch_prompt_logprobs` of base_worker.py (about 1.3), in the thread of all responses.
            assert sequence.tokens, "first generation token must not be empty when prompt_logprobs is requested."
            following = [*sequence.prompt[1:], sequence.tokens[0]]
            scores = [logprobs(token_id, params.prompt_logprobs) for token_id in following]
            return ResponseWrapper(response, LogProbsResult(scores, None))
        if pytorch_logprobs or not params.logprobs:
            return response
        if params.use_beam_search and params.best_of > 1:
            # compute_logprobs in executor/result.py (about 1.2) takes logits of [1, tokens, vocabulary]; those of
            # beams are [beams, tokens, vocabulary], so that the token is looked up among the places.
            raise IndexError(
                f"index {max(sequence.tokens)} is out of bounds for dimension 0 with size {len(sequence.tokens)}"
            )
        scores = [logprobs(token_id, params.logprobs) for token_id in new]
        return ResponseWrapper(response, LogProbsResult(None, scores))
