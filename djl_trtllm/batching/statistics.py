"""What happens to the requests of a model: counters, histograms, and records of single requests.

The rolling batches of a model report to one `Statistics` each point in the life of a request. Metrics, the log, traces
and pages read it.
"""

import logging
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING

import msgspec

from djl_trtllm.logs import of_request
from djl_trtllm.request import FinishReason, RequestOrigin, SequenceResult

if TYPE_CHECKING:
    from djl_trtllm.batching.sequence import OutputSequence

logger = logging.getLogger(__name__)

_REMEMBERED = 512
"""The number of records of ended requests that are kept."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

# Buckets by quantity: those of TensorRT-LLM (tensorrt_llm/metrics/collector.py), some of them with finer ones below.
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
PREFILL_SECONDS = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
_FINE_PER_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, *PER_TOKEN_SECONDS)
_FINE_REQUEST_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, *REQUEST_SECONDS)
_TOKENS = (*(digit * 10**power for power in range(6) for digit in (1, 2, 5)), 1_000_000)


class RequestRecord(msgspec.Struct, eq=False):
    """The life of one request in a rolling batch: times and numbers, never any of its text.

    `Statistics` fills it in and keeps it.
    Times are seconds on the rolling batch's clock (`time.monotonic`), None for what has not happened. Tokens count when
    the engine delivers them. A call of several prompts has one record for each, with the same `origin`.
    """

    origin: RequestOrigin
    arrived: float
    """When it was queued: after its prompt was tokenised."""
    prompt_tokens: int
    sequences: int
    adapter: str | None = None
    number: int = 0
    """Counts the model's requests from 1."""
    model: str = ""
    started: float | None = None
    """When it left the queue."""
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended: float | None = None
    reused_tokens: int = 0
    """Prompt tokens from the prefix cache."""
    generated_tokens: int = 0
    """Tokens of all its sequences."""
    accepted_tokens: int | None = None
    """Generated tokens that drafts proposed; None where nothing speculates."""
    drafted_tokens: int | None = None
    """All tokens that drafts proposed for its sequences; None where the engine has not counted them all."""
    reason: FinishReason | None = None
    """Why it ended; of several sequences the one that ended worst decides."""
    error: str | None = None
    """The class of the error that ended it."""
    resumes: int = 0
    """How often it went on in a new engine process."""
    reseeded: bool = False
    """Whether it has a seed and went on after its first token: another run with that seed has other tokens."""
    images: int = 0
    image_tokens: int = 0
    """Tokens of the prompt that are its images."""
    image_bytes: int = 0
    """Bytes of their files."""

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds from one token of a sequence to the next."""
        gaps, first, last = self.generated_tokens - self.sequences, self.first_token_at, self.last_token_at
        return None if gaps < 1 or first is None or last is None else (last - first) * self.sequences / gaps


class Histogram:
    """Counts of observations in buckets with fixed upper bounds (the last bucket is open)."""

    def __init__(self, bounds: Sequence[float] = _SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self, bounds: Sequence[float] | None = None) -> list[tuple[float, int]]:
        """The number of observations up to each bound, infinity last. `bounds` are some of its own."""
        totals = dict(zip((*self.bounds, inf), accumulate(self.counts), strict=True))
        return [(bound, totals[bound]) for bound in (*(self.bounds if bounds is None else bounds), inf)]


@dataclass
class Statistics:
    """Totals since the model was loaded, and its live and last requests. Durations are in seconds."""

    model: str = ""
    requests: int = 0
    resumed: int = 0
    """Requests that went on in a new engine process, each as often as it did."""
    last_request_at: float = 0.0
    """When the last request was queued, in seconds since 1970; 0 if there was none."""
    finished: Counter[FinishReason] = field(default_factory=Counter)
    """Sequences by finish reason."""
    prompt_tokens: int = 0
    reused_prompt_tokens: int = 0
    images: int = 0
    image_tokens: int = 0
    image_bytes: int = 0
    refused_images: Counter[str] = field(default_factory=Counter)
    """Images that were not taken, by `RefusedImageError.reason`."""
    generated_tokens: int = 0
    accepted_tokens: int = 0
    """Generated tokens that drafts proposed."""
    ended_requests: Counter[FinishReason] = field(default_factory=Counter)
    """Requests by finish reason: that of its sequence which ended worst."""
    time_to_first_token: Histogram = field(default_factory=partial(Histogram, FIRST_TOKEN_SECONDS))
    inter_token_latency: Histogram = field(default_factory=partial(Histogram, _FINE_PER_TOKEN_SECONDS))
    """Seconds between two tokens of a sequence. If n tokens arrive together, t seconds after the tokens before, they
    count as n gaps of t / n; those that arrive with the first token of a sequence count as gaps of 0."""
    time_per_output_token: Histogram = field(default_factory=partial(Histogram, _FINE_PER_TOKEN_SECONDS))
    """The mean of a request, without its first token."""
    queue_time: Histogram = field(default_factory=partial(Histogram, _FINE_REQUEST_SECONDS))
    prefill_time: Histogram = field(default_factory=partial(Histogram, PREFILL_SECONDS))
    decode_time: Histogram = field(default_factory=partial(Histogram, _FINE_REQUEST_SECONDS))
    inference_time: Histogram = field(default_factory=partial(Histogram, _FINE_REQUEST_SECONDS))
    request_time: Histogram = field(default_factory=partial(Histogram, _FINE_REQUEST_SECONDS))
    prompt_length: Histogram = field(default_factory=partial(Histogram, _TOKENS))
    """Tokens of the prompt."""
    output_length: Histogram = field(default_factory=partial(Histogram, _TOKENS))
    live: dict[int, RequestRecord] = field(default_factory=dict)
    """Queued and running requests by `RequestRecord.number`, in their order. Admission limits them."""
    ended: deque[RequestRecord] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """The last requests that ended, the newest last."""
    observers: list[Callable[[RequestRecord], None]] = field(default_factory=list)
    """Called with the record of each request that ends. They must neither block nor raise."""

    def request_queued(self, record: RequestRecord) -> None:
        self.requests += 1
        self.last_request_at = time.time()
        self.prompt_tokens += record.prompt_tokens
        self.images += record.images
        self.image_tokens += record.image_tokens
        self.image_bytes += record.image_bytes
        record.number, record.model = self.requests, self.model
        self.live[record.number] = record

    def request_started(self, record: RequestRecord, now: float) -> None:
        """Note that a sequence of the request leaves the queue; the first one starts the request."""
        if record.started is None:
            record.started = now
            self.queue_time.observe(now - record.arrived)

    def request_resumed(self, record: RequestRecord) -> None:
        self.resumed += 1
        record.resumes += 1

    def prompt_reused(self, record: RequestRecord, tokens: int) -> None:
        """Note that a sequence of the request has these tokens of its prompt from the prefix cache."""
        self.reused_prompt_tokens += tokens
        record.reused_tokens += tokens

    def tokens_accepted(self, record: RequestRecord, tokens: int) -> None:
        """Note that a sequence of the request has these tokens from drafts."""
        self.accepted_tokens += tokens
        record.accepted_tokens = (record.accepted_tokens or 0) + tokens

    def tokens_generated(self, outputs: "Iterable[tuple[RequestRecord, OutputSequence]]", now: float) -> None:
        """Count the new tokens of these sequences; called once for all that the executor sends together."""
        total = 0
        gaps: dict[float, int] = {}  # sequences that run together have the same gaps
        for record, output in outputs:
            tokens, last = len(output.token_ids) - output.counted, output.last_token_at
            if not tokens:
                continue
            total += tokens
            output.counted += tokens
            output.last_token_at = record.last_token_at = now
            record.generated_tokens += tokens
            if last is not None:
                gap = (now - last) / tokens
                gaps[gap] = gaps.get(gap, 0) + tokens
                continue
            if tokens > 1:
                gaps[0.0] = gaps.get(0.0, 0) + tokens - 1
            if record.first_token_at is None:
                record.first_token_at = now
                self.time_to_first_token.observe(now - record.arrived)
        for gap, times in gaps.items():
            self.inter_token_latency.observe(gap, times)
        self.generated_tokens += total

    def sequence_ended(self, result: SequenceResult) -> None:
        self.finished[result.reason] += 1

    def request_ended(self, record: RequestRecord, result: SequenceResult, now: float) -> None:
        """Note that the last sequence of the request has ended. Every queued request comes here, once."""
        record.ended, record.reason = now, result.reason
        record.error = None if result.error is None else type(result.error).__name__
        self.ended_requests[result.reason] += 1
        started, first, last = record.started, record.first_token_at, record.last_token_at
        for histogram, begin, end in (
            (self.prompt_length, 0, record.prompt_tokens),
            (self.output_length, 0, record.generated_tokens),
            (self.prefill_time, started, first),
            (self.decode_time, first, last),
            (self.inference_time, started, last),
            (self.request_time, record.arrived, now),
        ):
            if begin is not None and end is not None:
                # As `observe` does it: a request that ends is seven observations.
                histogram.counts[bisect_left(histogram.bounds, end - begin)] += 1
                histogram.sum += end - begin
        if (gap := record.time_per_output_token) is not None:
            self.time_per_output_token.observe(gap)
        del self.live[record.number]
        self.ended.append(record)
        for observer in self.observers:
            try:
                observer(record)
            except Exception:
                # It must not stop the tokens of other requests.
                logger.exception("an observer of a request failed", extra=of_request(record.origin.request_id))
