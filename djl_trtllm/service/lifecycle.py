"""The lifecycle of a loaded model, and the way of a request to its engine.

LOADING ──► READY ◄──► RECOVERING        a dead engine process is replaced
   │          │  ▲         │
   ▼          │  │         ▼
FAILED        │  └────── FAILED          it is started again after a pause, unless `retry_threshold` is 0
              ▼
           DRAINING ──► STOPPED

The way of a request, from the body to the engine process:

    Dialect.parse                  the body becomes a `Call` of one or more `GenerationRequest`s
    Clients.caller                 whose request it is: its share and its priority
    ModelService.generate          all requests of a call, or none:
        supported                      what the engine does not honour is refused by name
        Adapters.find                  the LoRA adapter
        RollingBatch.admit             its place in the queue, else 503 before any other work
        PromptReader.read              the ids of the prompt, rendered and tokenised beside the event loop
        RollingBatch.fit               its length, and that of the output
        RollingBatch.submit            it waits, and starts in the engine process when it is its turn
"""

import asyncio
import enum
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TypeVar

from msgspec.structs import replace

from djl_trtllm import errors
from djl_trtllm.api.base import SMALL, Call, Dialect, ModelContext, Prompt, RawRequest, ResponseEncoder
from djl_trtllm.batching.admission import refusals, require_vectors_fit, supported
from djl_trtllm.batching.rolling_batch import RollingBatch
from djl_trtllm.batching.sequence import RequestState
from djl_trtllm.batching.statistics import Statistics
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.executor.protocol import Feature, Start
from djl_trtllm.request import Adapter, Consumer, GenerationRequest, OutputChunk
from djl_trtllm.service.adapters import FOLDER as ADAPTERS_FOLDER, Adapters, adapter_roots
from djl_trtllm.service.engine import Engine
from djl_trtllm.service.model import Model
from djl_trtllm.service.prompts import PromptReader, ReadPrompt
from djl_trtllm.service.work import LONG_WORK, WORKERS

logger = logging.getLogger(__name__)

T = TypeVar("T")

_EXPIRY_SECONDS = 0.25
_TEXTS_AT_ONCE = 64
"""The number of texts that are queued, or cancelled, in one turn of the event loop: a few milliseconds at most."""
_SEED_IGNORED = ("Warning", '299 djl-trtllm "the engine ignores the seed of this request (option.ignored_seed=warn)"')


def shutting_down(name: str) -> errors.NotReadyError:
    """The error of a request to a model that drains: another server may take it."""
    return errors.NotReadyError(f"model {name} is shutting down", retry_after=1)


async def run_by_size(size: int, work: Callable[[], T]) -> T:
    """Run `work` on `size` bytes, here if they are few, otherwise in a worker thread; return its result."""
    return work() if size <= SMALL else await WORKERS.run(work)


async def parse_call(dialect: Dialect, request: RawRequest, model: ModelContext) -> Call:
    """`dialect.parse`, of a large request in a worker thread unless the model's code wants its own thread."""
    size = 0 if model.custom is not None else dialect.size(request, model)
    return dialect.parse(request, model) if size <= SMALL else await WORKERS.run(lambda: dialect.parse(request, model))


class State(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    RECOVERING = "recovering"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


class ModelService:
    """A model that is being served.

    All methods run on the event loop. `on_failed` is called when the model is FAILED, for good or not (`retry_in`).
    """

    def __init__(
        self,
        name: str,
        *,
        on_failed: Callable[[errors.DjlTrtllmError], None] | None = None,
        statistics: Statistics | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """Pass `statistics` and `adapters` to share them between several services of one model."""
        self.name = name
        self.state = State.LOADING
        self.failure: errors.DjlTrtllmError | None = None
        self._retry_at: float | None = None
        self.statistics = statistics or Statistics(name)
        self.restarts = 0
        self._model: Model | None = None
        self._adapters = adapters
        self.on_failed = on_failed
        self._engine: Engine | None = None
        self._prompts: PromptReader | None = None
        self._expiry: asyncio.TimerHandle | None = None

    # -- life ------------------------------------------------------------------------------------------------------

    async def load(self, model: Model, start: Start | None = None) -> None:
        """Start the engine process, as the model says or by `start`; the state is READY when this returns.

        The tokenizer is loaded meanwhile. Raises ExecutorStartError and what `Model.texts` raises, and the state is
        FAILED then.
        """
        if self._adapters is None:
            folder = model.directory / ADAPTERS_FOLDER
            found = partial(Adapters, folder, adapter_roots(model.options), model.adapter_limits)
            self._adapters = await LONG_WORK.run(found) if folder.is_dir() else found()
        self._engine = Engine(
            self.name,
            model,
            start or model.start,
            self.statistics,
            on_lost=self._engine_lost,
            on_ready=self._engine_ready,
            on_failed=self._engine_failed,
        )
        try:
            await self._engine.start()
        except errors.DjlTrtllmError as error:
            self.fail(error)
            raise
        self._model = model
        self._expire()

    def fail(self, error: errors.DjlTrtllmError) -> None:
        self.state = State.FAILED
        self.failure = error
        logger.error("model %s has failed: %s", self.name, error)
        if self.on_failed is not None:
            self.on_failed(error)

    @property
    def retry_in(self) -> int | None:
        """Seconds until a FAILED model tries again to start an engine process, at least 1; None if it does not."""
        if self._retry_at is None:
            return None
        return max(1, math.ceil(self._retry_at - asyncio.get_running_loop().time()))

    def refuse_new(self) -> None:
        """Refuse new requests from now on; current ones continue, in a new engine process if theirs is lost."""
        if self.state not in (State.FAILED, State.STOPPED):
            self.state = State.DRAINING
        self._retry_at = None
        if self._engine is not None:
            self._engine.stop_replacing()

    async def drain(self, timeout: float) -> None:
        """Refuse new requests and wait until the current ones have ended, at most `timeout` seconds."""
        self.refuse_new()
        now = asyncio.get_running_loop().time
        deadline = now() + timeout
        while self.batch is not None and not self.batch.idle and now() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """Stop now; running requests get an error."""
        self.refuse_new()
        if self._expiry is not None:
            self._expiry.cancel()
        if self._engine is not None:
            if self._engine.batch is not None:
                self._engine.batch.fail(
                    errors.NotReadyError(f"model {self.name} was shut down while it was answering", retry_after=1)
                )
            await self._engine.close()
            self._engine = None
        if self._prompts is not None:
            await self._prompts.close()
            self._prompts = None
        if self.state is not State.FAILED:
            self.state = State.STOPPED

    # -- requests --------------------------------------------------------------------------------------------------

    @property
    def model(self) -> Model:
        """The model. Raises NotReadyError until it is loaded."""
        if self._model is None:
            raise self._not_ready()
        return self._model

    @property
    def adapters(self) -> Adapters:
        """The model's LoRA adapters. Raises NotReadyError while its files are still being prepared."""
        if self._adapters is None:
            raise self._not_ready()
        return self._adapters

    @property
    def batch(self) -> RollingBatch | None:
        """The rolling batch, which outlives engine processes; None before the first one is ready, and after the end."""
        return None if self._engine is None else self._engine.batch

    @property
    def serves_adapters(self) -> bool:
        return self._engine is not None and Feature.ADAPTERS in self._engine.features

    @property
    def refusals(self) -> Mapping[str, str]:
        """The engine's refusals (`batching.admission.refusals`); empty before an engine process has started."""
        engine = self._engine
        return {} if engine is None or engine.batch is None else refusals(engine.limits, engine.features)

    @property
    def pid(self) -> int | None:
        """The process id of the engine process; None while there is none."""
        return None if self._engine is None or self._engine.client is None else self._engine.client.pid

    @property
    def memory(self) -> int:
        """Resident memory of the engine process, in bytes, as it was measured last."""
        return 0 if self._engine is None else self._engine.memory.resident

    @property
    def load_now(self) -> int:
        """The number of running and waiting sequences."""
        return 0 if self.batch is None else self.batch.running + self.batch.waiting

    async def generate(self, call: Call, consumer: Consumer) -> list[RequestState]:
        """Admit, tokenise and queue the requests of a call, all or none; its encoder then has the prompts.

        Raises NotReadyError, OverloadedError (before any other work) and InvalidRequestError.
        """
        batch, engine = self.batch, self._engine
        if batch is None or engine is None or self.state not in (State.READY, State.RECOVERING):
            raise self._not_ready()
        limits, features = engine.limits, engine.features
        requests = [supported(request, limits, features) for request in call.requests]
        if requests[0].pooling is not None:
            require_vectors_fit(requests, limits)
        adapters = [None if request.adapter is None else self.adapters.find(request.adapter) for request in requests]
        sequences = sum(map(attrgetter("sampling.sequences"), requests))
        batch.admit(sequences, call.origin.client)
        try:
            requests, prompts = await self._read_prompts(requests, batch, call.encoder)
            self._require(batch)
        except BaseException:
            batch.withdraw(sequences, call.origin.client)
            raise
        return await self._submit(batch, call, requests, prompts, adapters, consumer)

    async def _submit(
        self,
        batch: RollingBatch,
        call: Call,
        requests: Sequence[GenerationRequest],
        prompts: Sequence[ReadPrompt],
        adapters: Sequence[Adapter | None],
        consumer: Consumer,
    ) -> list[RequestState]:
        """Queue the requests, which have been admitted; where one is refused, none of them runs.

        Texts for vectors may be thousands: others have the event loop meanwhile, and the first vectors may come. What
        fails until all are queued is raised, so that the call has one error.
        """
        states: list[RequestState] = []
        failed: list[errors.RequestError] = []
        count, taken = len(requests), 0  # requests whose room is theirs, or that `submit` has given back

        def consume(chunk: OutputChunk) -> None:
            error = None if chunk.finished is None else chunk.finished.error
            if error is not None and taken < count:
                failed.append(error)
            else:
                consumer(chunk)

        try:
            for request, prompt, adapter in zip(requests, prompts, adapters, strict=True):
                if request.pooling is not None and taken and taken % _TEXTS_AT_ONCE == 0:
                    await asyncio.sleep(0)
                    self._require(batch)
                taken += 1
                numbered = _numbered(consume if request.pooling is not None else consumer, taken - 1)
                states.append(batch.submit(request, prompt.ids, numbered, adapter, call.origin, prompt.images))
                if failed:
                    raise failed.pop()
        except BaseException:
            if left := sum(later.sampling.sequences for later in requests[taken:]):
                batch.withdraw(left, call.origin.client)
            for state in states:
                state.abandon()
            self.cancel(states)
            raise
        return states

    def _require(self, batch: RollingBatch) -> None:
        """Raise NotReadyError if the model has failed or ended since its batch was this one."""
        if self.batch is not batch or self.failure is not None:
            raise self._not_ready()

    def with_warnings(self, call: Call) -> Call:
        """The call with a response header for what the engine takes and ignores (`option.ignored_seed`)."""
        engine = self._engine
        if engine is None or engine.batch is None or engine.limits.seeded:
            return call
        seeded = any(each.sampling.do_sample and each.sampling.seed is not None for each in call.requests)
        return replace(call, headers=(*call.headers, _SEED_IGNORED)) if seeded else call

    def cancel(self, states: Sequence[RequestState]) -> None:
        """End the requests of a call whose client has disconnected.

        If there are thousands, some end in each turn of the event loop, the oldest last: these may be running, and none
        of the others is to start in their places.
        """
        left = [state for state in states if not state.done]
        if not left or self.batch is None:
            return
        self.batch.cancel(*left[-_TEXTS_AT_ONCE:])
        if others := left[:-_TEXTS_AT_ONCE]:
            asyncio.get_running_loop().call_soon(self.cancel, others)

    @property
    def prompts(self) -> PromptReader:
        """The reader of this worker's prompts, made at the first request."""
        if self._prompts is None:
            self._prompts = PromptReader(self.model, self.statistics)
        return self._prompts

    async def _read_prompts(
        self, requests: list[GenerationRequest], batch: RollingBatch, encoder: ResponseEncoder
    ) -> tuple[list[GenerationRequest], list[ReadPrompt]]:
        """Return the requests with their prompts, each of which fits; then the encoder gets these."""
        reader, takes_images = self.prompts, self._engine is not None and "images" in self._engine.features
        if requests[0].pooling is not None:
            pooled = await reader.read_pooled(requests, batch.fit)
            for _, prompt in pooled:
                encoder.begin(Prompt(prompt.text or "", len(prompt.ids)))
            return [request for request, _ in pooled], [prompt for _, prompt in pooled]
        found: list[ReadPrompt] = []
        for request, read in zip(requests, await reader.with_ids(requests), strict=True):
            prompt = await reader.prompt_of(read, takes_images=takes_images)
            found.append(ReadPrompt(batch.fit(request, prompt.ids), prompt.text, prompt.images))
            if request.stop:
                await reader.work_of(sum(map(len, request.stop)), partial(batch.learn_stops, request))
        for prompt in found:
            ids = prompt.ids
            text = await reader.text(ids) if prompt.text is None else prompt.text
            tokens = await reader.tokens(ids) if encoder.wants_prompt_tokens else ()
            encoder.begin(Prompt(text, len(ids), tokens))
        return requests, found

    def _not_ready(self) -> errors.NotReadyError:
        match self.state:
            case State.LOADING:
                return errors.NotReadyError(f"model {self.name} is still loading", retry_after=10)
            case State.DRAINING | State.STOPPED:
                return shutting_down(self.name)
            case _:
                again = "" if self.retry_in is None else f"; it is started again in {self.retry_in} seconds"
                text = f"model {self.name} has failed; the server's log says why{again}"
                return errors.NotReadyError(text, retry_after=self.retry_in)

    def _engine_lost(self) -> bool:
        """Note that the engine process is lost. Returns whether another one is to be started."""
        if self.state is State.READY:
            self.state = State.RECOVERING
        # A model that drains needs one as long as it has requests.
        return self.state is State.RECOVERING or (self.batch is not None and not self.batch.idle)

    def _engine_ready(self) -> None:
        if self.state in (State.RECOVERING, State.FAILED):
            self.restarts += 1
        if self.state in (State.LOADING, State.RECOVERING, State.FAILED):
            self.state = State.READY
            self.failure = self._retry_at = None

    def _engine_failed(self, error: errors.ExecutorError, retry_in: float | None) -> bool:
        """Note that no engine process will run for long, and end all requests. Returns whether to try again."""
        if self.batch is not None:
            cause = str(error).partition("\n")[0]
            failure = errors.GenerationError(f"the engine failed and could not be replaced ({cause})")
            failure.__cause__ = error  # with all lines of the message
            self.batch.fail(failure)
        if self.state is State.DRAINING:
            return False
        if retry_in is not None:
            self._retry_at = asyncio.get_running_loop().time() + retry_in
        self.fail(error)
        return retry_in is not None

    def _expire(self) -> None:
        self._expiry = asyncio.get_running_loop().call_later(_EXPIRY_SECONDS, self._expire)
        if self.batch is not None:
            self.batch.expire(self.model.config.options.predict_timeout)


def _numbered(consumer: Consumer, generation: int) -> Consumer:
    """A consumer that numbers the chunks of a generation. Those of generation 0 have the right number already."""
    if not generation:
        return consumer

    def consume(chunk: OutputChunk) -> None:
        consumer(replace(chunk, generation=generation))

    return consume


_BEST_FIRST = (State.READY, State.RECOVERING, State.LOADING, State.DRAINING, State.STOPPED, State.FAILED)


class ServedModel:
    """A model and its workers, each an engine process with a rolling batch.

    `source` says where it came from. `on_failed` is called when a worker has failed, for good or not. The server is
    healthy only while all its `at_startup` models are.
    """

    def __init__(
        self,
        name: str,
        source: str,
        *,
        at_startup: bool = True,
        on_failed: Callable[[errors.DjlTrtllmError], None] | None = None,
    ) -> None:
        self.name = name
        self.source = source
        self.at_startup = at_startup
        self.statistics = Statistics(name)
        self.workers = [ModelService(name, on_failed=on_failed, statistics=self.statistics)]
        self._on_failed = on_failed
        self._model: Model | None = None
        self._changing = asyncio.Lock()
        self._ended = False

    async def load(self, prepare: Callable[[], Model], workers: int = 1) -> None:
        """Prepare the model in the background and start its workers; READY when this returns.

        Raises DjlTrtllmError or any unexpected exception, and the state is FAILED then.
        """
        first = self.workers[0]
        try:
            self._model = await LONG_WORK.run(prepare)
            await first.load(self._model)
            await self.scale(workers)
        except Exception as error:
            if first.failure is None:
                first.fail(
                    error
                    if isinstance(error, errors.DjlTrtllmError)
                    else errors.ModelError(f"loading it failed: {error!r}")
                )
            raise

    async def scale(self, workers: int) -> None:
        """Scale to this number of engine processes; those that are removed finish their current requests.

        Raises ModelError if there are too few GPUs, and ExecutorStartError; the workers that ran before keep running.
        """
        async with self._changing:
            model = self._model
            if model is None:
                raise errors.ModelError(f"model {self.name} is still loading")
            starts = [_start(model, number, self.name) for number in range(workers)]
            for start in starts[len(self.workers) :]:
                worker = ModelService(self.name, statistics=self.statistics, adapters=self.adapters)
                await worker.load(model, start)
                if self._ended:
                    await worker.close()
                    raise errors.ModelError(f"model {self.name} was unregistered while it was scaled")
                worker.on_failed = self._on_failed
                self.workers.append(worker)
            surplus, self.workers = self.workers[workers:], self.workers[:workers]
            await _end(surplus, model.config.options.shutdown_timeout)

    def refuse_new(self) -> None:
        for worker in self.workers:
            worker.refuse_new()

    async def end(self, timeout: float) -> None:
        self._ended = True
        self.refuse_new()
        await _end(self.workers, timeout)

    async def close(self) -> None:
        self._ended = True
        await asyncio.gather(*(worker.close() for worker in self.workers))

    def pick(self, preferred: object = None) -> ModelService:
        """The worker for the next request: `preferred` if that is ready, else the ready one with the least to do."""
        if len(self.workers) == 1:  # as usual, and each request asks
            return self.workers[0]
        for worker in self.workers:
            if worker is preferred and worker.state is State.READY:
                return worker
        return min(self.workers, key=lambda worker: (_BEST_FIRST.index(worker.state), worker.load_now))

    @property
    def state(self) -> State:
        """The best state among the workers; FAILED as long as one has failed."""
        if len(self.workers) == 1:
            return self.workers[0].state
        states = {worker.state for worker in self.workers}
        return State.FAILED if State.FAILED in states else min(states, key=_BEST_FIRST.index)

    @property
    def retry_in(self) -> int | None:
        """Seconds until its failed workers have tried again; None if none has failed, or one does not try again."""
        times = [worker.retry_in for worker in self.workers if worker.state is State.FAILED]
        known = [each for each in times if each is not None]
        return max(known) if known and len(known) == len(times) else None

    @property
    def failure(self) -> errors.DjlTrtllmError | None:
        return next((worker.failure for worker in self.workers if worker.failure is not None), None)

    @property
    def model(self) -> Model:
        return self.workers[0].model

    @property
    def engine(self) -> str | None:
        """The engine that runs it, as `option.backend` names it; None while its files are being prepared."""
        return None if self._model is None else self._model.backend.value

    @property
    def adapters(self) -> Adapters:
        """The model's LoRA adapters, shared by its workers. Raises NotReadyError while it is being prepared."""
        return self.workers[0].adapters

    @property
    def serves_adapters(self) -> bool:
        return self.workers[0].serves_adapters

    @property
    def restarts(self) -> int:
        return sum(worker.restarts for worker in self.workers)


async def _end(workers: list[ModelService], timeout: float) -> None:
    async def end(worker: ModelService) -> None:
        await worker.drain(timeout)
        await worker.close()

    await asyncio.gather(*map(end, workers))


def _start(model: Model, number: int, name: str) -> Start:
    """The start message of worker `number`: the first worker's is the model's own, the others run on further GPUs."""
    if not model.gpus or not number:
        return model.start
    named = [entry for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    visible = named or [str(index) for index in range(len(Hardware.probe().gpus))]
    own = visible[number * model.gpus : (number + 1) * model.gpus]
    if len(own) < model.gpus:
        raise errors.ModelError(
            f"{number + 1} workers of model {name} need {(number + 1) * model.gpus} GPUs, {model.gpus} each "
            f"(tensor_parallel_degree x pipeline_parallel_degree), and {len(visible)} are visible"
        )
    options = model.start.options
    environment = {**options.get("environment", {}), "CUDA_VISIBLE_DEVICES": ",".join(own)}
    return replace(model.start, options={**options, "environment": environment})


@dataclass
class Registry:
    """The models of a server, by name.

    `lost` names models of the server's start that were unregistered: without them the server is not healthy.
    """

    models: dict[str, ServedModel] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)

    def add(self, model: ServedModel) -> None:
        self.models[model.name] = model
        self.lost.discard(model.name)

    def remove(self, model: ServedModel, *, lost: bool = False) -> None:
        """Remove a model; `lost` if the server was started for it and cannot register it again."""
        if self.models.get(model.name) is model:
            del self.models[model.name]
            if lost:
                self.lost.add(model.name)

    def find(self, name: str | None) -> ServedModel | None:
        """The model of that name; without a name, the only one, or else the only one the server was started with.

        So requests without a name, which know of no other model, go on while others are registered, as in DJL Serving.
        """
        if name is not None:
            return self.models.get(name)
        meant = list(self.models.values())
        if len(meant) > 1:
            meant = [model for model in meant if model.at_startup]
        return meant[0] if len(meant) == 1 else None
