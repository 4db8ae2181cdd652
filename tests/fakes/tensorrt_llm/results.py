"""The future of a request, as the caller sees it (facts §2.6)."""

from __future__ import annotations

import asyncio
import enum
import json
import marshal
import traceback
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakMethod

from .queues import AsyncQueue
from .sampling import GenerationRequest
from .settings import SINCE_1_2

# -- responses ---------------------------------------------------------------------------------------------------------
# What comes from the worker, one object per response.
#
# The engine backend's are C++ objects behind pickling and properties; here a property that hands out a converted copy
# stands for one. The PyTorch backend's wrap a serialised C++ result that the consumer deserialises (`LlmResult`).


class FinishReason(enum.IntEnum):
    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


_REASONS = tuple(FinishReason)


class Result:
    """The engine backend's result: new tokens of one sequence, or all tokens of all beams."""

    __slots__ = _STATE = ("_output_token_ids", "_finish_reasons", "is_final", "cum_log_probs", "log_probs")

    if TYPE_CHECKING:
        _output_token_ids: list[list[int]]
        _finish_reasons: list[int]
        is_final: bool

        cum_log_probs: list[float] | None
        log_probs: list[list[dict[int, Any]]] | None

    def __init__(self, *state: Any) -> None:
        """The values of `_STATE`, in its order."""
        self.__setstate__(state)

    @property
    def output_token_ids(self) -> list[list[int]]:
        return [list(tokens) for tokens in self._output_token_ids]

    @property
    def finish_reasons(self) -> list[FinishReason]:
        return [_REASONS[reason] for reason in self._finish_reasons]

    def __getstate__(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in Result._STATE)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        for name, value in zip(Result._STATE, state, strict=True):
            setattr(self, name, value)


class LlmResult:
    """The PyTorch backend's result: `_result` is bytes until `deserialize`; log-probabilities stay Python objects."""

    _PYTHON_SIDE = frozenset(("log_probs", "cum_log_probs"))

    def __init__(self, result: Result, *, cached_tokens: int, began: bool) -> None:
        self._result: Any = marshal.dumps((*result.__getstate__()[:3], None, None))
        # `LogProbStorage` in llm_request.py has these attributes from the first token on.
        sampled = {"log_probs": result.log_probs, "cum_log_probs": result.cum_log_probs} if began else {}
        self._python_result = SimpleNamespace(**sampled)
        self.is_final = result.is_final
        self.cached_tokens = cached_tokens

    def __getattr__(self, item: str) -> Any:
        if item in LlmResult._PYTHON_SIDE:
            return getattr(object.__getattribute__(self, "_python_result"), item)
        return getattr(object.__getattribute__(self, "_result"), item)

    def deserialize(self) -> None:
        self._result = Result(*marshal.loads(self._result))


class Response(NamedTuple):
    """A result of one request."""

    client_id: int
    result: Any
    error_msg: str | None = None

    def has_error(self) -> bool:
        return self.error_msg is not None


class LogProbsResult(NamedTuple):
    """Of the prompt, and of new tokens."""

    prompt: list[dict[int, Any]] | None
    generation: list[dict[int, Any]] | None


@dataclass
class ResponseWrapper:
    """A response with log-probabilities that were computed behind the engine."""

    _response: Response
    logprobs: LogProbsResult

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_response"), name)

    def __reduce__(self) -> tuple[Any, ...]:
        return ResponseWrapper, (self._response, self.logprobs)


class ErrorResponse(NamedTuple):
    client_id: int
    error_msg: Any


def is_llm_response(instance: Any) -> bool:
    return hasattr(instance, "has_error")


# -- the iteration statistics, as the caller sees them (facts §2.6) ----------------------------------------------------


class IterationResult:
    """Iteration statistics as they come. Ended by a timeout, it stays ended until the next request (facts §2.6)."""

    def __init__(self) -> None:
        self._done = False
        self._timeout: float | None = 2
        self.aqueue = AsyncQueue()
        self.queue = self.aqueue.sync_q

    def set_timeout(self, timeout: float | None) -> None:
        self._timeout = timeout

    def mark_undone(self) -> None:
        self._done = False

    def __aiter__(self) -> IterationResult:
        return self

    async def __anext__(self) -> dict[str, Any]:
        if self._done:
            raise StopAsyncIteration
        try:
            statistics: dict[str, Any] = json.loads(await self.aqueue.get(timeout=self._timeout))
        except asyncio.TimeoutError:
            self._done = True
            raise StopAsyncIteration from None
        return statistics


async def no_iterations() -> AsyncIterator[dict[str, Any]]:
    """Statistics before the first request."""
    none: list[dict[str, Any]] = []
    for statistics in none:
        yield statistics


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] | None = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: Any = None
    additional_context_outputs: Any = None
    additional_generation_outputs: Any = None
    disaggregated_params: Any = None
    request_perf_metrics: Any = None

    @property
    def length(self) -> int:
        return len(self.token_ids)


@dataclass
class EncoderOutput:
    """What `LLM.encode` makes of one prompt."""

    logits: Any
    prompt_token_ids: list[int]


class RequestOutput:
    """What the executor hands out for a request. Every step changes it in place."""

    def __init__(self, request: GenerationRequest, background_error_handler: Any, executor: Any) -> None:
        self.sampling_params = request.sampling_params
        self.cached_tokens = 0
        self.aqueue = AsyncQueue()
        self.queue = self.aqueue.sync_q
        self.outputs = [CompletionOutput(index) for index in range(self.sampling_params.best_of)]
        self.finished = False
        self.request_id = request.id
        self.prompt_token_ids = request.prompt_token_ids
        self._background_error_handler = WeakMethod(background_error_handler)
        self._executor: Callable[[], Any] = weakref.ref(executor)

    def abort(self) -> None:
        self._executor().abort_request(self.request_id)

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        self._handle_response(await self.aqueue.get())
        return self

    # -- responses -----------------------------------------------------------------------------------------------------

    def _raise(self, error: Any = None) -> None:
        handler = self._background_error_handler()
        if handler is not None:
            handler(error) if error is not None else handler()

    def _handle_response(self, response: Any) -> None:
        try:
            self._handle_engine_response(response)
        except Exception:
            traceback.print_exc()
            raise

    def _handle_engine_response(self, response: Any) -> None:
        logprobs = None
        if isinstance(response, ResponseWrapper):
            logprobs = response.logprobs
            response = response._response
        if isinstance(response, ErrorResponse):
            self._raise(response.error_msg)
        if response.has_error():
            self._raise(response.error_msg)
        result = response.result
        if hasattr(result, "_result") and isinstance(result._result, bytes):
            result.deserialize()
        self.finished = result.is_final
        self.cached_tokens = getattr(result, "cached_tokens", 0)
        for beam, _ in enumerate(result.output_token_ids):
            self._handle_sequence(result.finish_reasons, result, beam, logprobs)
        self._raise()

    def _handle_sequence(self, finish_reasons: list[FinishReason], result: Any, beam: int, logprobs: Any) -> None:
        output = self.outputs[beam]
        if self.sampling_params.use_beam_search:
            output.token_ids = result.output_token_ids[beam]
        else:
            output.token_ids.extend(result.output_token_ids[beam])
        if result.cum_log_probs is not None:
            output.cumulative_logprob = result.cum_log_probs[beam]
        if logprobs is not None and logprobs.prompt is not None:
            output.prompt_logprobs = logprobs.prompt
        if logprobs is not None and logprobs.generation is not None:
            output.logprobs = [*output.logprobs, *logprobs.generation] if SINCE_1_2 else logprobs.generation
        elif result.log_probs is not None:
            output.logprobs += result.log_probs[beam][len(output.logprobs) :]
            if finish_reasons[beam] != FinishReason.CANCELLED:
                del output.logprobs[output.length :]
                assert len(output.logprobs) == output.length
        if finish_reasons[beam] == FinishReason.CANCELLED:
            output.finish_reason = "cancelled"
        if self.finished:
            self._finish(output, finish_reasons[beam])

    def _finish(self, output: CompletionOutput, reason: FinishReason) -> None:
        if reason == FinishReason.END_ID:
            output.finish_reason = "stop"
        elif reason == FinishReason.STOP_WORDS:
            output.finish_reason = "stop"
            for stop_reason, stop_ids in self.sampling_params._get_stop_reasons_and_words():
                if output.token_ids[-len(stop_ids) :] == stop_ids:
                    output.stop_reason = stop_reason
                    if not self.sampling_params.include_stop_str_in_output:
                        output.token_ids = output.token_ids[: -len(stop_ids)]
                    break
        elif reason == FinishReason.LENGTH:
            output.finish_reason = "length"
        elif reason != FinishReason.CANCELLED:
            raise ValueError(f"Unknown finish reason: {reason}")
