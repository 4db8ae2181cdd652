"""The headers in which TGI says how long a request took.

Source: `generate_internal` in `router/src/server.rs` of TGI (003eaec). Its `x-compute-type` is the name of the machine
and is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from djl_trtllm.request import SequenceResult

Headers = tuple[tuple[str, str], ...]


def stream_headers(characters: int) -> Headers:
    """Those of a stream, which is not timed when it begins. The second one stops nginx from collecting events."""
    return (("x-compute-characters", str(characters)), ("x-accel-buffering", "no"))


class Timing:
    """Times one request, from the moment it is made. `characters` are those of its prompt."""

    def __init__(self, characters: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._characters = characters
        self._arrived = clock()
        self._prompt_tokens = 0
        self._validation = 0.0

    def tokenised(self, prompt_tokens: int) -> None:
        """The prompt is checked and in the queue."""
        self._prompt_tokens = prompt_tokens
        self._validation = self._clock() - self._arrived

    def headers(self, best: SequenceResult) -> Headers:
        """The headers when all sequences have ended; tokens are counted in the best one, as TGI does."""
        total = self._clock() - self._arrived
        inference = max(0.0, total - self._validation - best.queue_seconds)
        return (
            ("x-compute-time", f"{total:.6f}"),
            ("x-compute-characters", str(self._characters)),
            ("x-total-time", _milliseconds(total)),
            ("x-validation-time", _milliseconds(self._validation)),
            ("x-queue-time", _milliseconds(best.queue_seconds)),
            ("x-inference-time", _milliseconds(inference)),
            ("x-time-per-token", _milliseconds(inference / max(1, best.generated_tokens))),
            ("x-prompt-tokens", str(self._prompt_tokens)),
            ("x-generated-tokens", str(best.generated_tokens)),
        )


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))
