"""What is remembered of a request: when things happened to it, and numbers. Never any of its text."""

from __future__ import annotations

from dataclasses import dataclass

from djl_trtllm.request import FinishReason, Origin


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The life of one request in a rolling batch; `Statistics` fills it in and keeps it.

    Times are seconds on the rolling batch's clock (`time.monotonic`), None for what has not happened. Tokens count when
    the engine delivers them. A call of several prompts has one record for each, with the same `origin`.
    """

    origin: Origin
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
    """Of all sequences."""
    reason: FinishReason | None = None
    """Why it ended; of several sequences the one that ended worst decides."""
    error: str | None = None
    """The class of the error that ended it."""
    resumes: int = 0
    """How often it went on in a new engine process."""

    @property
    def queue_time(self) -> float | None:
        """Seconds in the queue, None while it is there; so for the next ones."""
        return _seconds(self.arrived, self.started)

    @property
    def time_to_first_token(self) -> float | None:
        return _seconds(self.arrived, self.first_token_at)

    @property
    def prefill_time(self) -> float | None:
        """From the queue to the first token."""
        return _seconds(self.started, self.first_token_at)

    @property
    def decode_time(self) -> float | None:
        """From the first token to the last one so far."""
        return _seconds(self.first_token_at, self.last_token_at)

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds from one token of a sequence to the next."""
        gaps = self.generated_tokens - self.sequences
        return None if self.decode_time is None or gaps < 1 else self.decode_time * self.sequences / gaps

    @property
    def inference_time(self) -> float | None:
        """From the queue to the last token so far."""
        return _seconds(self.started, self.last_token_at)

    @property
    def total_time(self) -> float | None:
        """From its arrival to its end."""
        return _seconds(self.arrived, self.ended)


def _seconds(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
