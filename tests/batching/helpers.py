"""A rolling batch over an executor that is played by hand."""

from __future__ import annotations

from collections.abc import Sequence

from djl_trtllm.batching.limits import BatchLimits
from djl_trtllm.batching.request_state import RequestState
from djl_trtllm.batching.rolling_batch import RollingBatch
from djl_trtllm.batching.statistics import Statistics
from djl_trtllm.executor.protocol import Delta, Limits, Stats, Step, Submit
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import (
    Adapter,
    GenerationRequest,
    Guide,
    Origin,
    OutputChunk,
    Sampling,
    SequenceResult,
)

_UNKNOWN = Origin()


class FakeExecutor:
    """Records what it receives."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.submitted: list[Submit] = []
        self.cancelled: list[int] = []

    def submit(self, request: Submit) -> None:
        self.submitted.append(request)

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
        max_batch_size: int = 4,
        max_queue_size: int = 4,
        max_input_len: int = 50,
        max_output_len: int = 40,
        max_seq_len: int = 60,
        kv_blocks: int = 0,
        block_size: int = 10,
        lookahead: int = 0,
        stops: bool = True,
        max_resumes: int = 0,
    ) -> None:
        self.now = 100.0
        self.tokenizer = tokenizer
        self.executor = FakeExecutor(Limits(max_batch_size, kv_blocks, block_size, max_seq_len, lookahead, stops))
        self.statistics = Statistics("story")
        limits = BatchLimits(
            max_batch_size, max_queue_size, max_input_len, max_output_len, max_seq_len, max_resumes=max_resumes
        )
        self.batch = RollingBatch(self.executor, tokenizer, limits, self.statistics, clock=lambda: self.now)

    def submit(
        self,
        prompt: Sequence[int] = (5, 6, 7),
        *,
        consumer: Recorder | None = None,
        origin: Origin = _UNKNOWN,
        stop: tuple[str, ...] = (),
        logprobs: bool = False,
        stop_token_ids: tuple[int, ...] = (),
        truncate: int | None = None,
        bad: tuple[str, ...] = (),
        guide: Guide | None = None,
        adapter: Adapter | None = None,
        client: str = "",
        priority: int = 0,
        **sampling: object,
    ) -> tuple[RequestState, Recorder]:
        """Admit and submit."""
        consumer = consumer or Recorder()
        parameters = Sampling(**{"max_new_tokens": 30, **sampling})  # type: ignore[arg-type]
        request = GenerationRequest(
            prompt_ids=list(prompt),
            sampling=parameters,
            stop=stop,
            stop_token_ids=stop_token_ids,
            logprobs=logprobs,
            truncate=truncate,
            bad=bad,
            guide=guide,
            adapter=None if adapter is None else adapter.name,
        )
        self.batch.admit(parameters.sequences, client)
        origin = origin._replace(client=client, priority=priority)
        return self.batch.submit(request, list(prompt), consumer, adapter, origin), consumer

    def step(self, *deltas: Delta) -> None:
        """One iteration."""
        self.batch.process([Step(list(deltas), Stats(running=len(deltas)))])

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, False)
