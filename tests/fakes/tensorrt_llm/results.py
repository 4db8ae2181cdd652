"""The future of a request, as the caller sees it (facts §2.6)."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import json
import marshal
import traceback
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakMethod

from .queues import NO_LOOP, AsyncQueue, has_event_loop
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

    _STATE = (
        *("_output_token_ids", "_finish_reasons", "is_final", "sequence_index", "decoding_iter"),
        *("cum_log_probs", "log_probs"),
    )
    _CONSTANT = ("context_logits", "generation_logits", "context_phase_params", "request_perf_metrics")
    __slots__ = (*_STATE, *_CONSTANT, "avg_decoded_tokens_per_iter")

    if TYPE_CHECKING:
        _output_token_ids: list[list[int]]
        _finish_reasons: list[int]
        is_final: bool
        sequence_index: int
        decoding_iter: int
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
        for name in Result._CONSTANT:
            setattr(self, name, None)
        self.avg_decoded_tokens_per_iter = 1.0


class LlmResult:
    """The PyTorch backend's result: `_result` is bytes until `deserialize`; log-probabilities stay Python objects."""

    _PYTHON_SIDE = frozenset(
        (
            "context_logits",
            "generation_logits",
            "log_probs",
            "cum_log_probs",
            "mm_embedding_handle",
            "additional_context_outputs",
            "additional_generation_outputs",
        )
    )

    def __init__(self, result: Result, *, cached_tokens: int, began: bool) -> None:
        self._result: Any = marshal.dumps((*result.__getstate__()[:5], None, None))
        made = PyResult if began else BarePyResult
        self._python_result = made(result.log_probs, result.cum_log_probs)
        self.is_final = result.is_final
        self.cached_tokens = cached_tokens

    def __getattr__(self, item: str) -> Any:
        if item in LlmResult._PYTHON_SIDE:
            return getattr(object.__getattribute__(self, "_python_result"), item)
        return getattr(object.__getattribute__(self, "_result"), item)

    def deserialize(self) -> None:
        self._result = Result(*marshal.loads(self._result))


class PyResult:
    """What the PyTorch sampler adds to a result."""

    context_logits = None
    generation_logits = None
    mm_embedding_handle = None
    additional_context_outputs = None
    additional_generation_outputs = None

    def __init__(self, log_probs: list[Any] | None, cum_log_probs: list[float] | None) -> None:
        self.log_probs = log_probs
        self.cum_log_probs = cum_log_probs


class BarePyResult:
    """The result of a request with log-probabilities which ended before its first token (`LogProbStorage` in
    llm_request.py has these attributes from the first one on)."""

    context_logits = generation_logits = mm_embedding_handle = None
    additional_context_outputs = additional_generation_outputs = None

    def __init__(self, log_probs: list[Any] | None, cum_log_probs: list[float] | None) -> None:
        """Nothing is kept."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"'LogProbStorage' object has no attribute '{name}'")


class Response:
    """A result, or an error, of one request."""

    __slots__ = ("client_id", "error_msg", "request_id", "result")

    def __init__(self, client_id: int, result: Any, error_msg: str | None = None) -> None:
        self.client_id = client_id
        self.request_id = client_id
        self.result = result
        self.error_msg = error_msg

    def has_error(self) -> bool:
        return self.error_msg is not None

    def __getstate__(self) -> tuple[Any, ...]:
        return self.client_id, self.result, self.error_msg

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.client_id, self.result, self.error_msg = state
        self.request_id = self.client_id


class LogProbsResult(NamedTuple):
    prompt: list[dict[int, Any]] | None = None
    generation: list[dict[int, Any]] | None = None


class ResponseWrapper:
    """A response with log-probabilities that were computed behind the engine."""

    def __init__(self, response: Response, logprobs: LogProbsResult | None = None) -> None:
        self._response = response
        self.logprobs = logprobs
        self.request_perf_metrics = None

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_response"), name)

    def __getstate__(self) -> tuple[Any, ...]:
        return self._response, self.logprobs

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._response, self.logprobs = state
        self.request_perf_metrics = None


class ErrorResponse(NamedTuple):
    client_id: int
    error_msg: Any
    request_id: int


def is_llm_response(instance: Any) -> bool:
    return hasattr(instance, "has_error")


# -- the iteration statistics, as the caller sees them (facts §2.6) ----------------------------------------------------


class IterationResult:
    """Iteration statistics as they come. Ended by a timeout, it stays ended until the next request (facts §2.6)."""

    def __init__(self) -> None:
        self._done = False
        self._timeout: float | None = 2
        if has_event_loop():
            self.aqueue: AsyncQueue | None = AsyncQueue()
            self.queue: Any = self.aqueue.sync_q
        else:
            self.queue = Queue()
            self.aqueue = None

    def set_timeout(self, timeout: float | None) -> None:
        self._timeout = timeout

    def mark_undone(self) -> None:
        self._done = False

    def get_results(self) -> list[dict[str, Any]]:
        results = []
        while not self._done:
            try:
                results.append(json.loads(self.queue.get(timeout=self._timeout)))
            except Empty:
                self._done = True
        return results

    def __aiter__(self) -> IterationResult:
        return self

    async def __anext__(self) -> dict[str, Any]:
        if self._done:
            raise StopAsyncIteration
        assert self.aqueue is not None, NO_LOOP
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


@contextlib.contextmanager
def _nvtx_range() -> Iterator[None]:
    yield


def _print_traceback_on_error(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception:
            traceback.print_exc()
            raise

    return wrapper


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

    _last_text_len: int = field(default=0, init=False, repr=False)
    _last_token_ids_len: int = field(default=0, init=False, repr=False)
    _last_logprobs_len: int = field(default=0, init=False, repr=False)
    _incremental_states: dict[str, Any] | None = field(default=None, init=False, repr=False)
    _postprocess_result: Any = None

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def text_diff(self) -> str:
        return self.text[self._last_text_len :]

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._last_token_ids_len :]

    @property
    def logprobs_diff(self) -> list[Any]:
        return self.logprobs[self._last_logprobs_len :]


class GenerationResult:
    """What the executor hands out for a request. Every step changes it in place."""

    def __init__(self, request: GenerationRequest, background_error_handler: Any, executor: Any) -> None:
        self.id = request.id
        self.sampling_params = request.sampling_params
        self.disaggregated_params = None
        self.decoding_iter = 0
        self.cached_tokens = 0
        self.avg_decoded_tokens_per_iter: float | None = None
        self._done = False
        self.metrics_dict: dict[str, float] = {}
        if has_event_loop():
            self.aqueue: AsyncQueue | None = AsyncQueue()
            self.queue: Any = self.aqueue.sync_q
        else:
            self.queue = Queue()
            self.aqueue = None
        self._outputs = [CompletionOutput(index) for index in range(self.sampling_params.best_of)]
        self._context_logits = None
        self._background_error_handler = WeakMethod(background_error_handler)
        self._generation_request = request
        self._streaming = request.streaming
        self._executor: Callable[[], Any] = weakref.ref(executor)
        self._aborted = False
        self.tokenizer: Any = None

    # -- what the caller reads -----------------------------------------------------------------------------------------

    @property
    def request_id(self) -> int:
        return self._generation_request.id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._generation_request.prompt_token_ids

    @property
    def finished(self) -> bool:
        return self._done

    @property
    def context_logits(self) -> Any:
        return self._context_logits

    @property
    def mm_embedding_handle(self) -> None:
        return None

    @property
    def outputs(self) -> list[CompletionOutput]:
        params = self.sampling_params
        if params.use_beam_search or params.n == params.best_of:
            return self._outputs[: params.n]
        best = sorted(
            self._outputs,
            key=lambda output: float("-inf") if output.cumulative_logprob is None else output.cumulative_logprob,
            reverse=True,
        )
        for index, output in enumerate(best):
            output.index = index
        return best[: params.n]

    def abort(self) -> None:
        assert self._executor is not None, "The executor is not set for this result."
        self._executor().abort_request(self.request_id)
        self._aborted = True

    def aborted(self) -> bool:
        return self._aborted

    def clear_logprob_params(self) -> None:
        """Nothing is kept here."""

    def record_stats(self, output: CompletionOutput, stats: dict[str, float] | None = None) -> None:
        """Only requests with performance metrics have any."""
        if not stats:
            return
        self.metrics_dict = stats

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _result_step(self, timeout: float | None = None) -> None:
        self._handle_response(self.queue.get())

    async def _aresult_step(self) -> None:
        assert self.aqueue is not None, NO_LOOP
        self._handle_response(await self.aqueue.get())

    def result(self, timeout: float | None = None) -> GenerationResult:
        while not self._done:
            self._result_step(timeout)
        return self

    async def aresult(self) -> GenerationResult:
        while not self._done:
            await self._aresult_step()
        return self

    def __await__(self) -> Any:
        return self.aresult().__await__()

    def __iter__(self) -> GenerationResult:
        return self

    def __next__(self) -> GenerationResult:
        if self._done:
            raise StopIteration
        self._result_step()
        return self

    def __aiter__(self) -> GenerationResult:
        return self

    async def __anext__(self) -> GenerationResult:
        if self._done:
            raise StopAsyncIteration
        await self._aresult_step()
        return self

    def __hash__(self) -> int:
        return hash(self.request_id)

    # -- responses -----------------------------------------------------------------------------------------------------

    def _raise(self, error: Any = None) -> None:
        handler = self._background_error_handler()
        if handler is not None:
            handler(error) if error is not None else handler()

    @_print_traceback_on_error
    @_nvtx_range()
    def _handle_engine_response(self, response: Any) -> None:
        logprobs = None
        if isinstance(response, ResponseWrapper):
            logprobs = response.logprobs
            response = response._response
        if is_llm_response(response):
            if response.has_error():
                self._raise(response.error_msg)
            result = response.result
            if hasattr(result, "_result") and isinstance(result._result, bytes):
                result.deserialize()
            self._done = result.is_final
            context_phase_params = result.context_phase_params
            self.decoding_iter = result.decoding_iter
            self.cached_tokens = getattr(result, "cached_tokens", 0)
            self.avg_decoded_tokens_per_iter = result.avg_decoded_tokens_per_iter
            assert context_phase_params is None
            finish_reasons = result.finish_reasons
            if self.sampling_params.use_beam_search:
                for beam, _ in enumerate(result.output_token_ids):
                    self._handle_sequence(finish_reasons, result, beam, logprobs)
            else:
                self._handle_sequence(finish_reasons, result, result.sequence_index, logprobs)
            if result.context_logits is not None:
                self._context_logits = result.context_logits
            if hasattr(result, "mm_embedding_handle") and result.mm_embedding_handle is not None:
                raise NotImplementedError
            self._raise()
        elif isinstance(response, ErrorResponse):
            self._raise(response.error_msg)
        else:
            raise ValueError(f"Unknown response type: {response}")

    def _handle_sequence(self, finish_reasons: list[FinishReason], result: Any, index: int, logprobs: Any) -> None:
        source = index if self.sampling_params.use_beam_search else 0
        output = self._outputs[index]
        output.disaggregated_params = self.disaggregated_params
        output._last_token_ids_len = len(output.token_ids)
        if self.sampling_params.use_beam_search:
            output.token_ids = result.output_token_ids[source]
        else:
            output.token_ids.extend(result.output_token_ids[source])
        if result.cum_log_probs is not None:
            output.cumulative_logprob = result.cum_log_probs[source]
        if logprobs or result.log_probs is not None:
            self._add_logprobs(output, result.log_probs, source, finish_reasons, logprobs)
        if result.generation_logits is not None:
            output.generation_logits = result.generation_logits[source, : output.length]
        if getattr(result, "additional_context_outputs", None) is not None:
            output.additional_context_outputs = result.additional_context_outputs
        if getattr(result, "additional_generation_outputs", None) is not None:
            output.additional_generation_outputs = result.additional_generation_outputs
        if finish_reasons and finish_reasons[source] == FinishReason.CANCELLED:
            output.finish_reason = "cancelled"
        if result.request_perf_metrics is not None:
            output.request_perf_metrics = result.request_perf_metrics
        # Only the response that ends the request sets a reason: with n > 1 the sequences that ended before keep None.
        if self._done:
            self._finish(output, finish_reasons[source])
            self.record_stats(output)

    def _add_logprobs(
        self, output: CompletionOutput, beams: Any, source: int, finish_reasons: list[FinishReason], logprobs: Any
    ) -> None:
        if logprobs and logprobs.prompt is not None:
            output.prompt_logprobs = logprobs.prompt
        if logprobs and logprobs.generation is not None:
            if SINCE_1_2:
                output._last_logprobs_len = len(output.logprobs)
                output.logprobs += logprobs.generation
            else:
                output.logprobs = logprobs.generation
        elif beams is not None:
            output._last_logprobs_len = len(output.logprobs)
            output.logprobs += beams[source][output._last_logprobs_len :]
            if finish_reasons[source] != FinishReason.CANCELLED:
                if len(output.logprobs) > output.length:
                    output.logprobs = output.logprobs[: output.length]
                assert len(output.logprobs) == output.length

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
        elif reason == FinishReason.TIMED_OUT:
            output.finish_reason = "timeout"
        elif reason != FinishReason.CANCELLED:
            raise ValueError(f"Unknown finish reason: {reason}")

    def _handle_response(self, response: Any) -> None:
        self._handle_engine_response(response)
        options = {
            "skip_special_tokens": self.sampling_params.skip_special_tokens,
            "spaces_between_special_tokens": self.sampling_params.spaces_between_special_tokens,
        }
        if self.sampling_params.detokenize and self.tokenizer is not None:
            for output in self.outputs:
                self._detokenize(output, options)

    def _detokenize(self, output: CompletionOutput, options: dict[str, bool]) -> None:
        output._last_text_len = len(output.text)
        if self._streaming and not self.sampling_params.use_beam_search:
            output.text, output._incremental_states = self.tokenizer.decode_incrementally(
                output.token_ids_diff, prev_text=output.text, states=output._incremental_states, **options
            )
        else:
            output.text = self.tokenizer.decode(output.token_ids, **options)
        if not self._done or output.finish_reason in ("stop", "length"):
            for stop_reason, _ in self.sampling_params._get_stop_reasons_and_words():
                if isinstance(stop_reason, str) and stop_reason in output.text:
                    end = output.text.find(stop_reason)
                    if self.sampling_params.include_stop_str_in_output:
                        end += len(stop_reason)
                    output.text = output.text[:end]
                    output.finish_reason = "stop"
                    output.stop_reason = stop_reason
                    self.abort()
                    self._done = True
                    break


class RequestOutput(GenerationResult):
    """The executor's result with the prompt and a tokenizer: the same state in another object."""

    def __init__(self) -> None:
        raise RuntimeError(
            "RequestOutput is designed to be instantiated using RequestOutput._from_generation_result by "
            "GenerationExecutor. Users are not expected to create RequestOutput directly."
        )

    _prompt: str | None

    @classmethod
    def _from_generation_result(cls, result: GenerationResult, prompt: str | None, tokenizer: Any) -> RequestOutput:
        output = cls.__new__(cls)
        output.__dict__.update(result.__dict__)
        output.tokenizer = tokenizer
        output._prompt = prompt
        return output

    @property
    def prompt(self) -> str | None:
        return self._prompt

    def __repr__(self) -> str:
        names = ("request_id", "prompt", "prompt_token_ids", "outputs", "finished", "mm_embedding_handle")
        return f"RequestOutput({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"
