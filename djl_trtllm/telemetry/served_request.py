"""A request and its response, as the front end saw them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from djl_trtllm.api.lmi.finish_reasons import FINISH_REASONS
from djl_trtllm.batching.request_state import RequestState
from djl_trtllm.request import GenerationRequest

LONGEST = 200
"""Characters of a path or a name in a line or a trace: clients may name a model with a megabyte."""

CLIENT_LEFT = 499
"""The status of a request whose client left before there was a response; nginx has given it this number."""


class Generated(NamedTuple):
    """What the engine did for a request, of several prompts together: from the first start to the last end.

    Times are those of `time.monotonic`, None for what did not happen. `reasons` are LMI's, as in the metrics.
    """

    prompt_tokens: int
    output_tokens: int
    queued: float
    started: float | None
    first_token: float | None
    last_token: float | None
    reasons: tuple[str, ...]
    error: str


class Asked(NamedTuple):
    """What a request asks for, of several prompts the first. The names are those of the conventions for traces."""

    operation: str
    max_tokens: int
    temperature: float
    top_p: float
    n: int

    @classmethod
    def of(cls, request: GenerationRequest) -> Asked:
        sampling = request.sampling
        operation = "text_completion" if request.messages is None else "chat"
        most = sampling.max_new_tokens or request.default_new_tokens
        temperature = sampling.temperature if sampling.do_sample else 0.0
        return cls(operation, most, temperature, sampling.top_p, sampling.n)


@dataclass(slots=True, eq=False)
class ServedRequest:
    """What is known of a request at its end; the front end fills it in while the request runs.

    `method` and `path` are HTTP's, or what stands for them. `status` is HTTP's, or gRPC's by name. `error` is the class
    of what went wrong: messages may quote the text of a request. `headers` (lower case) may have the context of a
    trace. `reads`: it changes nothing and generates nothing. `quiet`: it has no line even where it fails, as a health
    check does while a model is loading.
    """

    id: str
    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    dialect: str = ""
    model: str = ""
    status: int | str = CLIENT_LEFT
    error: str = ""
    reads: bool = False
    quiet: bool = False
    asked: Asked | None = None
    generations: Sequence[RequestState] = ()
    began: float = field(default_factory=time.monotonic)

    @property
    def failed(self) -> bool:
        return self.status >= 400 if isinstance(self.status, int) else self.status != "OK"

    def generated(self) -> Generated | None:
        """None if the request never was in the waiting queue."""
        records = [state.record for state in self.generations]
        if not records:
            return None
        return Generated(
            sum(record.prompt_tokens for record in records),
            sum(record.generated_tokens for record in records),
            min(record.arrived for record in records),
            _of_those_known(min, (record.started for record in records)),
            _of_those_known(min, (record.first_token_at for record in records)),
            _of_those_known(max, (record.last_token_at for record in records)),
            tuple(dict.fromkeys(FINISH_REASONS[record.reason] for record in records if record.reason is not None)),
            next((record.error for record in records if record.error), ""),
        )


def _of_those_known(choose: Callable[[list[float]], float], times: Iterable[float | None]) -> float | None:
    known = [time for time in times if time is not None]
    return choose(known) if known else None
