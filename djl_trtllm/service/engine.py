"""The engine process of a loaded model, one after the other: started, replaced when it is lost, recycled by plan."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from djl_trtllm.batching.rolling_batch import RollingBatch
from djl_trtllm.batching.statistics import Statistics
from djl_trtllm.engines.hardware import available_memory
from djl_trtllm.errors import ExecutorDiedError, ExecutorError, GenerationError
from djl_trtllm.executor.client import ExecutorClient
from djl_trtllm.executor.protocol import Limits, Start, Step
from djl_trtllm.service.background import in_background
from djl_trtllm.service.memory_watch import MemoryWatch
from djl_trtllm.service.model import Model

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 10.0
_FORGIVEN_AFTER_SECONDS = 600.0
"""After this time the death of an engine process no longer counts against `retry_threshold`."""

_CHECK_SECONDS = 5.0
"""Between two looks at the memory and the requests of the engine process."""

_EMPTY_CHECK_SECONDS = 0.05
_SPARE_MEMORY = 1.25
"""A second engine process is started beside the first if this many times the first one's memory is available."""


class Engine:
    """Keeps an engine process running, below a rolling batch that outlives it.

    `on_lost`: there is none now, and another one is started if this returns True. `on_ready`: there is one again.
    `on_failed`: there will be none, the lost ones were too many.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        start: Start,
        statistics: Statistics,
        *,
        on_lost: Callable[[], bool],
        on_ready: Callable[[], None],
        on_failed: Callable[[ExecutorError], None],
    ) -> None:
        self.batch: RollingBatch | None = None
        """None until the first engine process is ready."""
        self.client: ExecutorClient | None = None
        """The engine process in which requests start; None while there is none."""
        self.memory = MemoryWatch(name, model.options.executor_memory_limit)
        self._name = name
        self._model = model
        self._start = start
        self._statistics = statistics
        self._on_lost = on_lost
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._newest: ExecutorClient | None = None
        self._clients: set[ExecutorClient] = set()
        """All that are not closed: the present one, and those that end their last requests."""
        self._deaths: list[float] = []
        self._replacing: asyncio.Task[None] | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._checking: asyncio.Task[None] | None = None

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the first engine process. Raises ExecutorStartError, and what `Model.texts` raises."""
        self._attach(await self._spawn())
        self._checking = asyncio.get_running_loop().create_task(self._check())

    def stop_replacing(self) -> None:
        """Start no further engine process, unless requests wait for one."""
        if self._checking is not None:
            self._checking.cancel()
        if self._replacing is not None and (self.batch is None or self.batch.idle):
            self._replacing.cancel()

    async def close(self) -> None:
        """End the engine process. What runs in it has to have ended."""
        tasks = [task for task in (self._checking, self._replacing, *self._retiring) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.client = None
        await asyncio.gather(*(client.close() for client in self._clients))
        self._clients.clear()

    # -- what it can do: that of the newest one, while there is none -----------------------------------------------

    @property
    def limits(self) -> Limits:
        assert self._newest is not None  # there is a batch
        return self._newest.limits

    @property
    def features(self) -> frozenset[str]:
        return frozenset() if self._newest is None else self._newest.features

    # -- starting --------------------------------------------------------------------------------------------------

    async def _spawn(self) -> ExecutorClient:
        options = self._model.options
        client = ExecutorClient(
            on_steps=self._process,
            on_death=lambda error: self._died(client, error),
            busy=lambda: self.batch is not None and self.batch.running_in(client) > 0,
            hang_timeout=options.executor_hang_timeout,
        )
        started = time.monotonic()
        # Both take their time, and each a core of its own.
        await client.start(
            self._start, options.model_loading_timeout, meanwhile=partial(in_background, self._model.texts)
        )
        logger.info(
            "model %s is ready: %s in process %d, loaded in %.1f s (%s)",
            self._name,
            self._start.executor.rpartition(":")[2],
            client.pid,
            time.monotonic() - started,
            ", ".join(f"{key} {value}" for key, value in client.details.items()) or "no engine",
        )
        return client

    def _attach(self, client: ExecutorClient) -> None:
        """Requests start in this engine process from now on."""
        self.client = self._newest = client
        self._clients.add(client)
        self.memory.begin(client.pid, client.resident_bytes())
        if self.batch is None:
            limits = replace(self._model.limits, vocab_size=self._model.vocab_size)
            self.batch = RollingBatch(client, self._model.tokenizer, limits, self._statistics)
        else:
            self.batch.attach(client)
        self._on_ready()

    def _process(self, steps: list[Step]) -> None:
        if self.batch is not None:
            self.batch.process(steps)

    # -- replacing a lost one --------------------------------------------------------------------------------------

    def _died(self, client: ExecutorClient, error: ExecutorDiedError) -> None:
        logger.error("model %s: %s", self._name, error)
        self._clients.discard(client)
        assert self.batch is not None
        cause = str(error).partition("\n")[0]
        loss = self.batch.lose(
            client,
            GenerationError(f"the engine failed while it was generating ({cause}); the request may be repeated"),
        )
        if loss.resumed or loss.ended:
            logger.warning(
                "model %s: of the requests that it was running, %d go on in the next engine process and %d have ended",
                self._name,
                loss.resumed,
                loss.ended,
            )
        if client is not self.client:
            return  # another one has its place already, or is about to
        self.client = None
        if self._on_lost() and (self._replacing is None or self._replacing.done()):
            self._replacing = asyncio.get_running_loop().create_task(self._recover(error, counted=not loss.blamed))

    async def _recover(self, error: ExecutorError, *, counted: bool = True) -> None:
        """Start another engine process, or give up if too many were lost.

        A loss is not counted if requests have ended with it that had been through `retry_threshold` others: one request
        that kills engines must not fail the model.
        """
        threshold = self._model.options.retry_threshold
        while True:
            now = asyncio.get_running_loop().time()
            self._deaths = [death for death in self._deaths if now - death < _FORGIVEN_AFTER_SECONDS]
            if counted:
                self._deaths.append(now)
            if len(self._deaths) > threshold:
                self._on_failed(error)
                return
            tries = len(self._deaths)
            await asyncio.sleep(min(_FIRST_BACKOFF_SECONDS * 2 ** (max(tries, 1) - 1), _LONGEST_BACKOFF_SECONDS))
            logger.warning(
                "model %s: starting a new engine process (%d of retry_threshold=%d)", self._name, tries, threshold
            )
            try:
                client = await self._spawn()
            except ExecutorError as again:
                logger.error("model %s: %s", self._name, again)
                error, counted = again, True
                continue
            self._attach(client)
            return

    # -- recycling -------------------------------------------------------------------------------------------------

    async def _check(self) -> None:
        """Watch the memory of the engine process, and recycle one that has reached a limit."""
        most = self._model.options.executor_max_requests
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            client, batch = self.client, self.batch
            if client is None or batch is None or (self._replacing is not None and not self._replacing.done()):
                continue
            resident = await client.measure_memory()
            if client is not self.client:
                continue
            reason = self.memory.look(resident)
            if most is not None and batch.submitted >= most:
                reason = f"it has had {batch.submitted} requests (option.executor_max_requests={most})"
            if reason is not None and self.memory.may_recycle():
                self._replacing = asyncio.get_running_loop().create_task(self._recycle(client, batch, reason))

    async def _recycle(self, old: ExecutorClient, batch: RollingBatch, reason: str) -> None:
        """Replace a live engine process; its requests end in it."""
        # On a GPU the first one's KV cache has what the second would need.
        beside = not self._model.gpus and available_memory() > self.memory.resident * _SPARE_MEMORY
        logger.info(
            "model %s: the engine process (pid %d) is recycled: %s; another one is started %s",
            self._name,
            old.pid,
            reason,
            "beside it" if beside else "when its requests have ended, because there is no memory for both",
        )
        if not beside:
            batch.hold()
            self.client = None
            await self._retire(old, batch)
        try:
            new = await self._spawn()
        except ExecutorError as error:
            logger.error("model %s: %s", self._name, error)
            if self.client is None and self._on_lost():
                await self._recover(error)
            return
        self._attach(new)
        if beside:
            retiring = asyncio.get_running_loop().create_task(self._retire(old, batch))
            self._retiring.add(retiring)
            retiring.add_done_callback(self._retiring.discard)

    async def _retire(self, old: ExecutorClient, batch: RollingBatch) -> None:
        """Close an engine process when its last request has ended; none starts in it any more."""
        while batch.running_in(old):  # noqa: ASYNC110
            await asyncio.sleep(_EMPTY_CHECK_SECONDS)
        if old in self._clients:
            await old.close()
            self._clients.discard(old)
