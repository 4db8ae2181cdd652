"""What reading TensorRT-LLM's responses takes, and the `option.stream_interval` that would pay."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_WINDOW_SECONDS = 30.0
_BUSY = 0.7
"""Share of a core. Python code runs on one at a time, so above it tokens wait for those before them."""
_AIM = 0.35
_CHUNKS_PER_SECOND = 10.0
"""A stream keeps at least as many: with fewer a reader sees it stutter."""


class ResponseRate:
    """Watches whether this process keeps up with the engine; `interval` is the present `option.stream_interval`.

    `look` is to be called every now and then, with totals so far.
    """

    def __init__(
        self,
        interval: int,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._interval = interval
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._advised = interval
        self._begin(0)

    def _begin(self, responses: int) -> None:
        self._began = self._looked = self._clock()
        self._cpu_began = self._cpu_clock()
        self._responses = responses
        self._stream_seconds = 0.0

    def look(self, responses: int, streams: int) -> str | None:
        """Advice where another interval would pay: once at the end of a window, and not again until more would."""
        now = self._clock()
        self._stream_seconds += streams * (now - self._looked)
        self._looked = now
        seconds = now - self._began
        if seconds < _WINDOW_SECONDS:
            return None
        share = (self._cpu_clock() - self._cpu_began) / seconds
        new = responses - self._responses
        of_stream = new / self._stream_seconds * self._interval if self._stream_seconds else 0.0
        self._begin(responses)
        wanted = math.ceil(self._interval * share / _AIM)
        better = min(wanted, int(of_stream / _CHUNKS_PER_SECOND))
        if share < _BUSY or better <= self._advised:
            return None
        self._advised = better
        return (
            f"option.stream_interval={better} would pay: {new / seconds:,.0f} TensorRT-LLM responses per second take "
            f"{share:.2f} of the one core that reading them can use, with {of_stream:.0f} iterations per second. With "
            f"{better} iterations in a response it is about {share * self._interval / better:.2f}, and a stream still "
            f"gets {of_stream / better:.0f} chunks per second"
        )
