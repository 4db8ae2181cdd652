"""What comes from the worker, one object per response.

The engine backend's are C++ objects behind pickling and properties; here a property that hands out a converted copy
stands for one. The PyTorch backend's wrap a serialised C++ result that the consumer deserialises (`LlmResult`).
"""

from __future__ import annotations

import enum
import marshal
from typing import Any, NamedTuple


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

    __slots__ = (
        "_finish_reasons",
        "_output_token_ids",
        "avg_decoded_tokens_per_iter",
        "context_logits",
        "context_phase_params",
        "cum_log_probs",
        "decoding_iter",
        "generation_logits",
        "is_final",
        "log_probs",
        "request_perf_metrics",
        "sequence_index",
    )

    def __init__(
        self,
        output_token_ids: list[list[int]],
        finish_reasons: list[int],
        *,
        is_final: bool,
        sequence_index: int,
        decoding_iter: int,
        cum_log_probs: list[float] | None = None,
        log_probs: list[list[dict[int, Any]]] | None = None,
    ) -> None:
        self._output_token_ids = output_token_ids
        self._finish_reasons = finish_reasons
        self.is_final = is_final
        self.sequence_index = sequence_index
        self.decoding_iter = decoding_iter
        self.cum_log_probs = cum_log_probs
        self.log_probs = log_probs
        self.avg_decoded_tokens_per_iter = 1.0
        self.context_logits = None
        self.generation_logits = None
        self.context_phase_params = None
        self.request_perf_metrics = None

    @property
    def output_token_ids(self) -> list[list[int]]:
        return [list(tokens) for tokens in self._output_token_ids]

    @property
    def finish_reasons(self) -> list[FinishReason]:
        return [_REASONS[reason] for reason in self._finish_reasons]

    def __getstate__(self) -> tuple[Any, ...]:
        return (
            self._output_token_ids,
            self._finish_reasons,
            self.is_final,
            self.sequence_index,
            self.decoding_iter,
            self.cum_log_probs,
            self.log_probs,
        )

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        tokens, reasons, is_final, sequence_index, decoding_iter, cum_log_probs, log_probs = state
        self._output_token_ids = tokens
        self._finish_reasons = reasons
        self.is_final = is_final
        self.sequence_index = sequence_index
        self.decoding_iter = decoding_iter
        self.cum_log_probs = cum_log_probs
        self.log_probs = log_probs
        self.avg_decoded_tokens_per_iter = 1.0
        self.context_logits = None
        self.generation_logits = None
        self.context_phase_params = None
        self.request_perf_metrics = None


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
        result = Result.__new__(Result)
        result.__setstate__(marshal.loads(self._result))
        self._result = result


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
    """That of a request with log-probabilities which ended before its first token (`LogProbStorage` in llm_request.py
    has these attributes from the first one on)."""

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
