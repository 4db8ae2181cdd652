"""The results of `LLM.embed` and `LLM.score`, under vLLM's names."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Generic, TypeVar

from djl_trtllm.errors import DjlTrtllmError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of a text, as float32."""

    embedding: list[float]

    @classmethod
    def of(cls, vector: bytes) -> EmbeddingOutput:
        return cls(array("f", vector).tolist())


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The score of a pair of texts."""

    score: float

    @classmethod
    def of(cls, vector: bytes) -> ScoringOutput:
        return cls(array("f", vector)[0])


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[T]):
    """The result of one text or pair.

    `outputs` is None where it failed, and `error` why; `prompt_tokens` is the number of its tokens.
    """

    request_id: int
    outputs: T | None
    prompt_tokens: int
    error: DjlTrtllmError | None
