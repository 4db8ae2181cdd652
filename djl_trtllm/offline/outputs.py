"""What `LLM.generate` returns, in TensorRT-LLM's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from djl_trtllm.api.lmi.finish_reasons import FINISH_REASONS
from djl_trtllm.api.output import CollectedSequence
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.offline.result import OfflineResult
from djl_trtllm.request import FinishReason, GenerationRequest

_FINISH_REASONS = {**FINISH_REASONS, FinishReason.END_TOKEN: "stop", FinishReason.STOP: "stop"}
"""TensorRT-LLM's names."""


class Logprob(NamedTuple):
    """A token's log-probability; not every engine reports `rank`."""

    logprob: float
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated sequence.

    `token_ids` are all generated tokens, one that ended the sequence included. `logprobs` has `{token id: Logprob}` for
    each, `{}` if the engine has none, and is empty unless asked for. `finish_reason` is `stop`, `length`, `cancelled`
    or `error`; `stop_reason` the stop string or token id that ended it, None at the model's own end token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]]
    finish_reason: str
    stop_reason: str | int | None

    @classmethod
    def of(cls, index: int, sequence: CollectedSequence, logprobs: bool) -> CompletionOutput:
        """A sequence's output; a sequence that never ran is one that ended with an error."""
        finished, tokens = sequence.finished, sequence.tokens
        reason = FinishReason.ERROR if finished is None else finished.reason
        stop_reason: str | int | None = None
        if finished is not None and reason is FinishReason.STOP:
            stop_reason = finished.stop_sequence or tokens[-1].id
        shown = tokens if logprobs else []
        return cls(
            index,
            sequence.text,
            [token.id for token in tokens],
            finished.cumulative_logprob if finished is not None and logprobs else None,
            [{} if token.logprob is None else {token.id: Logprob(token.logprob)} for token in shown],
            _FINISH_REASONS[reason],
            stop_reason,
        )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What came of one prompt.

    `prompt` is the text as the model saw it: after the chat template for a chat, None where token ids were given.
    `prompt_token_ids` are empty where the prompt was refused before it was tokenised. `error` is why the prompt failed,
    None if it did not; `outputs` then hold what was generated until that.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    error: DjlTrtllmError | None

    @classmethod
    def of(cls, result: OfflineResult, request: GenerationRequest) -> RequestOutput:
        seen = result.prompt
        text = seen.text if seen is not None and request.messages is not None else request.prompt
        return cls(
            result.number,
            text,
            [] if seen is None else [token.id for token in seen.tokens],
            [CompletionOutput.of(index, each, request.logprobs) for index, each in enumerate(result.sequences)],
            result.failure,
        )
