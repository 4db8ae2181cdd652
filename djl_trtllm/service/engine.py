"""The engine process of a loaded model, one after the other: started, replaced when it is lost, recycled by plan."""

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from djl_trtllm.batching.blame import LOSSES, Loss
from djl_trtllm.batching.rolling_batch import RollingBatch
from djl_trtllm.batching.statistics import Statistics
from djl_trtllm.engines.hardware import available_memory
from djl_trtllm.errors import ExecutorDiedError, ExecutorError, GenerationError
from djl_trtllm.executor.client import ExecutorClient
from djl_trtllm.executor.protocol import Limits, Start, Step
from djl_trtllm.service.model import Model
from djl_trtllm.service.work import LONG_WORK

logger = logging.getLogger(__name__)

_UNIT = 10**9
_GROWN = 1.25
_LEAST_GROWTH = 250 * 10**6
"""Growth is logged when it is a quarter of what was logged last, and at least this number of bytes."""

_PAUSE_SECONDS = 60.0
"""Seconds between two recyclings: a limit just above what a loaded engine takes must not become a loop of loading."""


class MemoryWatch:
    """Says when an engine process grows, and when its resident memory has reached the limit.

    `limit` is in GB, None without one. `resident` is what was measured last, in bytes.
    """

    def __init__(self, name: str, limit: float | None) -> None:
        self.resident = 0
        self._name = name
        self._limit = limit
        self._pid = 0
        self._at_start = 0
        self._told = 0
        self._recycled_at: float | None = None

    def begin(self, pid: int, resident: int) -> None:
        """Watch another engine process, which has `resident` bytes once it is loaded."""
        self._pid = pid
        self.resident = self._at_start = self._told = resident
        if self._reached(resident):
            logger.warning(
                "model %s: option.executor_memory_limit=%g has no effect: the engine process takes %s as soon as it is "
                "loaded; set a limit above that",
                self._name,
                self._limit,
                _shown(resident),
            )

    def look(self, resident: int) -> str | None:
        """Take a measurement; return the reason to recycle the process, None if there is none."""
        if not resident:
            return None  # it has just ended
        hopeless = self._reached(self._at_start)
        self.resident = resident
        if resident >= self._told * _GROWN and resident - self._told >= _LEAST_GROWTH:
            logger.warning(
                "model %s: the engine process (pid %d) has grown to %s, from %s after loading; a KV cache grows until "
                "it was full once, and option.executor_memory_limit recycles a process that grows on",
                self._name,
                self._pid,
                _shown(resident),
                _shown(self._at_start),
            )
            self._told = resident
        if hopeless or not self._reached(resident):
            return None
        return f"it takes {_shown(resident)} (option.executor_memory_limit={self._limit:g})"

    def _reached(self, resident: int) -> bool:
        return self._limit is not None and resident >= self._limit * _UNIT

    def may_recycle(self) -> bool:
        """Return whether the last recycling is long enough ago; if it is, note the next one as beginning now."""
        now = asyncio.get_running_loop().time()
        if self._recycled_at is not None and now - self._recycled_at < _PAUSE_SECONDS:
            return False
        self._recycled_at = now
        return True


def _shown(size: int) -> str:
    return f"{size / _UNIT:.2f} GB"


_FIRST_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 10.0
_FORGIVEN_AFTER_SECONDS = 600.0
"""Seconds after which the death of an engine process no longer counts against `retry_threshold`.

A process that was killed from outside counts if no process has worked for this time.
"""
_IDLE_SECONDS = 10.0
"""An engine process that was ready for this time, and had nothing to do at its end, did not fail at its start."""
_FIRST_PAUSE_SECONDS = 30.0
_LONGEST_PAUSE_SECONDS = 600.0
"""A failed model is started again after a pause, which doubles until an engine process has proved itself."""

_CHECK_SECONDS = 5.0
"""Seconds between two looks at the memory and the requests of the engine process."""

_EMPTY_CHECK_SECONDS = 0.05
_SPARE_MEMORY = 1.25
"""A second engine process is started beside the first if this many times the first one's memory is available."""


class Engine:
    """Keeps an engine process running, below a rolling batch that outlives it.

    `on_lost` is called when the process is lost: another one is started if it returns True. `on_ready` is called when
    the next one is ready. `on_failed` is called when too many were lost: another one is started after that number of
    seconds if it returns True, and none if the number is None.
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
        on_failed: Callable[[ExecutorError, float | None], bool],
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
        """Engine processes that are not closed: the present one, and those that finish their last requests."""
        self._ready_at = 0.0
        self._deaths: list[tuple[float, bool]] = []
        """Failed starts, and losses of engine processes that had not proved themselves; whether they were killed."""
        self._worked_at = 0.0
        """When the last one that had proved itself was lost, at first when the first one was ready."""
        self._pause = _FIRST_PAUSE_SECONDS
        self._replacing: asyncio.Task[None] | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._checking: asyncio.Task[None] | None = None

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the first engine process. Raises ExecutorStartError, and what `Model.texts` raises."""
        self._attach(await self._spawn())
        self._worked_at = self._ready_at
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

    # -- what the newest engine process can do, also after it has ended ----------------------------------------------

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
            self._start, options.model_loading_timeout, meanwhile=partial(LONG_WORK.run, self._model.texts)
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
        """Let requests start in this engine process from now on."""
        self.client = self._newest = client
        self._ready_at = asyncio.get_running_loop().time()
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
        if loss.guilty is not None:
            logger.error(
                "model %s: the request %s has ended %d engine processes in a row; it is refused from now on",
                self._name,
                loss.guilty.key,
                LOSSES,
            )
        if client is not self.client:
            return  # another one has its place already, or is about to
        self.client = None
        if self._on_lost() and (self._replacing is None or self._replacing.done()):
            self._replacing = asyncio.get_running_loop().create_task(self._recover(error, counted=self._counts(loss)))

    def _counts(self, loss: Loss) -> bool:
        """Whether a loss counts against `retry_threshold`: its engine process had done nothing yet.

        False for a loss that a guilty request explains, and for the losses before it. With a threshold of 0 every loss
        counts.
        """
        idle = not loss.resumed and not loss.ended
        ready_for = asyncio.get_running_loop().time() - self._ready_at
        proved = loss.proved or (idle and ready_for >= _IDLE_SECONDS)
        if proved:
            self._pause = _FIRST_PAUSE_SECONDS
            self._worked_at = asyncio.get_running_loop().time()
        explained = loss.guilty is not None and loss.guilty.explains
        if explained:
            self._deaths.clear()
        return not (proved or explained) or not self._model.options.retry_threshold

    async def _recover(self, error: ExecutorError, *, counted: bool = True) -> None:
        """Start another engine process: soon, after a pause if too many were lost, or never if the threshold is 0."""
        threshold, failed = self._model.options.retry_threshold, False
        while True:
            now = asyncio.get_running_loop().time()
            self._deaths = [death for death in self._deaths if now - death[0] < _FORGIVEN_AFTER_SECONDS]
            if counted:
                self._deaths.append((now, error.killed))
            tries = len(self._deaths)
            pause = min(_FIRST_BACKOFF_SECONDS * 2 ** (max(tries, 1) - 1), _LONGEST_BACKOFF_SECONDS)
            if failed := failed or (counted and self._failures(now) > threshold):
                pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
                if not self._on_failed(error, pause if threshold else None):
                    return
            await asyncio.sleep(pause)
            logger.warning(
                "model %s: starting a new engine process (%d failed, retry_threshold=%d)",
                self._name,
                tries,
                threshold,
            )
            try:
                client = await self._spawn()
            except ExecutorError as again:
                logger.error("model %s: %s", self._name, again)
                error, counted = again, True
                continue
            self._attach(client)
            return

    def _failures(self, now: float) -> int:
        """The number of lost engine processes that count against `retry_threshold`."""
        excusing = self._model.options.retry_threshold and now - self._worked_at < _FORGIVEN_AFTER_SECONDS
        return sum(not (killed and excusing) for _, killed in self._deaths)

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


def settle_garbage_collector() -> None:
    """Freeze what is loaded, and collect little at once: reference counting frees what a token allocates.

    A collection stops everything else for up to a microsecond per object. It looks at the objects since the last one,
    at most 40,000; at all objects only after 50 million new ones.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 20, 1_250)
