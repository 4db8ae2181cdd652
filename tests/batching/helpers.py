"""A rolling batch over an executor that is played by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from djl_trtllm.batching.admission import BatchLimits
from djl_trtllm.batching.rolling_batch import RollingBatch
from djl_trtllm.batching.sequence import OutputSequence, RequestState
from djl_trtllm.batching.statistics import Statistics
from djl_trtllm.executor.protocol import Limits, Stats, Submit, Try
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import (
    Adapter,
    GenerationRequest,
    OutputChunk,
    RequestOrigin,
    Sampling,
    SequenceResult,
)
from tests.support.steps import Delta, step_of

_UNKNOWN = RequestOrigin()


def take(sequence: OutputSequence, token_ids: Sequence[int], logprobs: Sequence[Any] | None = None) -> bool:
    """Give a sequence tokens until it ends; whether it goes on."""
    values = logprobs or [None] * len(token_ids)
    return all(sequence.take(token_id, value) for token_id, value in zip(token_ids, values, strict=True))


class FakeExecutor:
    """Records what it receives."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.submitted: list[Submit] = []
        self.trials: list[Try] = []
        self.cancelled: list[int] = []

    def submit(self, request: Submit) -> None:
        self.submitted.append(request)

    def try_guide(self, trial: Try) -> None:
        self.trials.append(trial)

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)

    @property
    def ids(self) -> list[int]:
        return [request.request_id for request in self.submitted]


class Recorder:
    """A consumer."""

    def __init__(self) -> None:
        self.updates: list[OutputChunk] = []

    def __call__(self, update: OutputChunk) -> None:
        self.updates.append(update)

    def finished(self, index: int = 0) -> SequenceResult:
        """The end of a sequence, of which there must be exactly one, in its last update."""
        own = [update for update in self.updates if update.index == index]
        (finished,) = [update.finished for update in own if update.finished is not None]
        assert own[-1].finished is finished
        assert finished.generated_tokens == sum(len(update.tokens) for update in own)
        return finished

    def ids(self, index: int = 0) -> list[int]:
        return [token.id for update in self.updates if update.index == index for token in update.tokens]

    def text(self, index: int = 0) -> str:
        return "".join(token.text for update in self.updates if update.index == index for token in update.tokens)


class Bench:
    """A rolling batch, its fake executor and its clock."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        kv_blocks: int = 0,
        block_size: int = 10,
        lookahead: int = 0,
        stops: bool = True,
        **limits: Any,
    ) -> None:
        """`limits` are those of the batch."""
        lengths = {"max_input_len": 50, "max_output_len": 40, "max_seq_len": 60}
        batch = BatchLimits(**{"max_batch_size": 4, "max_queue_size": 4, **lengths, **limits})
        self.now = 100.0
        self.tokenizer = tokenizer
        self.executor = FakeExecutor(
            Limits(batch.max_batch_size, kv_blocks, block_size, batch.max_seq_len, lookahead, stops)
        )
        self.statistics = Statistics("story")
        self.batch = RollingBatch(self.executor, tokenizer, batch, self.statistics, clock=lambda: self.now)

    def submit(
        self,
        prompt: Sequence[int] = (5, 6, 7),
        *,
        consumer: Recorder | None = None,
        origin: RequestOrigin = _UNKNOWN,
        adapter: Adapter | None = None,
        client: str = "",
        priority: int = 0,
        **fields: Any,
    ) -> tuple[RequestState, Recorder]:
        """Admit and submit; `fields` are those of the request and of its sampling."""
        consumer = consumer or Recorder()
        given = {name: fields.pop(name) for name in Sampling.__struct_fields__ if name in fields}
        sampling = Sampling(**{"max_new_tokens": 30, **given})
        name = None if adapter is None else adapter.name
        request = GenerationRequest(prompt_ids=list(prompt), sampling=sampling, adapter=name, **fields)
        self.batch.admit(sampling.sequences, client)
        origin = replace(origin, client=client, priority=priority)
        return self.batch.submit(request, list(prompt), consumer, adapter, origin), consumer

    def step(self, *deltas: Delta) -> None:
        """One iteration."""
        self.batch.process([step_of(deltas, Stats(running=len(deltas)))])

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, False)
