"""The models of a server."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from djl_trtllm.batching.statistics import Statistics
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.errors import DjlTrtllmError, ModelError
from djl_trtllm.executor.protocol import Start
from djl_trtllm.service.adapters import Adapters
from djl_trtllm.service.lifecycle import ModelService, State
from djl_trtllm.service.model import Model
from djl_trtllm.service.threads import LONG_WORK

logger = logging.getLogger(__name__)

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
        on_failed: Callable[[DjlTrtllmError], None] | None = None,
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
                first.fail(error if isinstance(error, DjlTrtllmError) else ModelError(f"loading it failed: {error!r}"))
            raise

    async def scale(self, workers: int) -> None:
        """Scale to this number of engine processes; those that are removed finish their current requests.

        Raises ModelError if there are too few GPUs, and ExecutorStartError; the workers that ran before keep running.
        """
        async with self._changing:
            model = self._model
            if model is None:
                raise ModelError(f"model {self.name} is still loading")
            starts = [_start(model, number, self.name) for number in range(workers)]
            for start in starts[len(self.workers) :]:
                worker = ModelService(self.name, statistics=self.statistics, adapters=self.adapters)
                await worker.load(model, start)
                if self._ended:
                    await worker.close()
                    raise ModelError(f"model {self.name} was unregistered while it was scaled")
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
        if len(self.workers) == 1:
            return self.workers[0]
        for worker in self.workers:
            if worker is preferred and worker.state is State.READY:
                return worker
        return min(self.workers, key=lambda worker: (_BEST_FIRST.index(worker.state), worker.load_now))

    @property
    def state(self) -> State:
        """The best state among the workers; FAILED as long as one has failed."""
        states = {worker.state for worker in self.workers}
        return State.FAILED if State.FAILED in states else min(states, key=_BEST_FIRST.index)

    @property
    def retry_in(self) -> int | None:
        """Seconds until its failed workers have tried again; None if none has failed, or one does not try again."""
        times = [worker.retry_in for worker in self.workers if worker.state is State.FAILED]
        known = [each for each in times if each is not None]
        return max(known) if known and len(known) == len(times) else None

    @property
    def failure(self) -> DjlTrtllmError | None:
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
    """How to start worker `number`: the first as the model says, each on GPUs of its own."""
    if not model.gpus or not number:
        return model.start
    named = [entry for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    visible = named or [str(index) for index in range(len(Hardware.probe().gpus))]
    own = visible[number * model.gpus : (number + 1) * model.gpus]
    if len(own) < model.gpus:
        raise ModelError(
            f"{number + 1} workers of model {name} need {(number + 1) * model.gpus} GPUs, {model.gpus} each "
            f"(tensor_parallel_degree x pipeline_parallel_degree), and {len(visible)} are visible"
        )
    options = model.start.options
    environment = {**options.get("environment", {}), "CUDA_VISIBLE_DEVICES": ",".join(own)}
    return msgspec.structs.replace(model.start, options={**options, "environment": environment})


@dataclass
class Registry:
    """The models of a server, by name.

    `lost` names those that the server was started for and that were unregistered: it is not healthy without them.
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
