"""The rolling batch: who waits, who runs, what has come of it, and the one place where a request ends.

A plain state machine without threads or asyncio. The executor's messages pump it; it hands every request's news to
that request's consumer, once per pump, however many iterations the pump brought.
"""

from djl_trtllm.request import (
    Consumer,
    FinishReason,
    GenerationRequest,
    OutputChunk,
    SamplingParameters,
    SequenceResult,
    Token,
)

__all__ = [
    "Consumer",
    "FinishReason",
    "GenerationRequest",
    "OutputChunk",
    "SamplingParameters",
    "SequenceResult",
    "Token",
]
