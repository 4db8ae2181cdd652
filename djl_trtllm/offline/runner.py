"""Many requests through one model: its engine process and rolling batch on an event loop in a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import NamedTuple

import msgspec

from djl_trtllm.api import Call
from djl_trtllm.batching.request_state import RequestState
from djl_trtllm.errors import NotReadyError, OverloadedError, RequestError
from djl_trtllm.offline.result import OfflineResult
from djl_trtllm.request import GenerationRequest, OutputChunk
from djl_trtllm.service import Model, ModelService

logger = logging.getLogger(__name__)

_ROOM_SECONDS = 0.05
"""A slot may become free without output for a request of ours (a cancelled sequence ends late), so look this often."""
_ALIVE_SECONDS = 1.0
_SEND_SECONDS = 0.05
"""Of output that nobody sees before its end, the engine process sends that of several iterations at once."""
_CLOSED = "the model was closed while it was generating"


class _Fed(NamedTuple):
    """No request follows the first `total`; `error` is why, unless there are no more."""

    total: int
    error: Exception | None


class _Job:
    """The requests of one `Runner.run`."""

    def __init__(self, wants_prompt_tokens: bool) -> None:
        self.wants_prompt_tokens = wants_prompt_tokens
        self.outcomes: queue.SimpleQueue[OfflineResult | _Fed] = queue.SimpleQueue()
        self.states: dict[int, RequestState] = {}
        """Those that wait or run, by their number."""
        self.abandoned = threading.Event()


class Runner:
    """A loaded model, to be used from any thread, one with a running event loop of its own (a notebook's) included.

    The engine process ends with `close`, and otherwise with this process.
    """

    def __init__(self, model: Model) -> None:
        """Start the engine process and load the tokenizer. Raises DjlTrtllmError."""
        self._service = ModelService(model.name)
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._freed = asyncio.Event()
        # Not a thread per run: Linux ends the process with the thread that started it.
        self._thread = threading.Thread(target=self._run_loop, name="offline batch", daemon=True)
        self._thread.start()
        start = msgspec.structs.replace(model.start, send_interval=_SEND_SECONDS)
        loading = asyncio.run_coroutine_threadsafe(self._service.load(model, start), self._loop)
        try:
            loading.result()
        except BaseException:
            loading.cancel()
            self.close()
            raise
        if model.custom is not None:
            logger.warning("the formatters of model.py are for requests over HTTP: an offline batch does without them")

    @property
    def generated_tokens(self) -> int:
        """Tokens generated so far, in all runs."""
        return self._service.statistics.generated_tokens

    def run(
        self, requests: Iterable[GenerationRequest], *, wants_prompt_tokens: bool = False
    ) -> Generator[OfflineResult, None, None]:
        """The results, in the order of the requests, each as soon as it and all before it are complete.

        Requests are taken from the iterable as there is room for them, on the event loop's thread. One that fails has
        its `OfflineResult.failure`. When the engine process dies, they go on in its replacement, those that ran where
        `option.resume_after_restart` allows it; without a replacement they fail. Leaving the iteration cancels what
        still runs.

        Raises NotReadyError on a closed runner, and the error that ended the model if that was before.
        """
        if self._service.failure is not None:
            raise self._service.failure
        if self._closing.is_set():
            raise NotReadyError("the model is closed")
        job = _Job(wants_prompt_tokens)
        asyncio.run_coroutine_threadsafe(self._feed(iter(requests), job), self._loop)
        early: dict[int, OfflineResult] = {}
        total: int | None = None
        try:
            for number in itertools.count():
                while number not in early:
                    if number == total:
                        return
                    outcome = self._next(job)
                    if isinstance(outcome, OfflineResult):
                        early[outcome.number] = outcome
                    elif outcome.error is not None:
                        raise outcome.error
                    else:
                        total = outcome.total
                yield early.pop(number)
        finally:
            job.abandoned.set()
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing runs any more
                self._loop.call_soon_threadsafe(self._abandon, job)

    def close(self) -> None:
        """End the engine process; requests that run get an error."""
        with contextlib.suppress(RuntimeError):  # it is closed already
            self._loop.call_soon_threadsafe(self._closing.set)
        # The garbage collector, and with it a finalizer, runs in whichever thread allocates.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- in the caller's thread ------------------------------------------------------------------------------------

    def _next(self, job: _Job) -> OfflineResult | _Fed:
        while True:
            with contextlib.suppress(queue.Empty):
                return job.outcomes.get(timeout=_ALIVE_SECONDS)
            if not self._thread.is_alive():
                raise NotReadyError(_CLOSED)

    # -- on the event loop -----------------------------------------------------------------------------------------

    def _run_loop(self) -> None:
        try:
            self._loop.run_until_complete(self._live())
        finally:
            self._loop.close()

    async def _live(self) -> None:
        await self._closing.wait()
        await self._service.close()
        # Nothing can be started any more, so they end by themselves.
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

    async def _feed(self, requests: Iterator[GenerationRequest], job: _Job) -> None:
        total = 0
        error: Exception | None = None
        try:
            for request in requests:
                if job.abandoned.is_set():
                    break
                if self._closing.is_set():
                    raise NotReadyError(_CLOSED)
                await self._start(total, request, job)
                total += 1
                # Tokenising a short prompt awaits nothing, and the executor's messages are not to wait for all of them.
                await asyncio.sleep(0)
        except Exception as raised:
            error = raised
        job.outcomes.put(_Fed(total, error))

    async def _start(self, number: int, request: GenerationRequest, job: _Job) -> None:
        """Queue a request as soon as there is room for it."""
        result = OfflineResult(number, request, wants_prompt_tokens=job.wants_prompt_tokens)

        def take(chunk: OutputChunk) -> None:
            result.encode(chunk)
            if chunk.finished is not None:
                self._freed.set()
                if result.complete:
                    self._finish(job, result)

        while not job.abandoned.is_set():
            self._freed.clear()
            try:
                (job.states[number],) = await self._service.generate(Call((request,), result), take)
                if job.abandoned.is_set():
                    self._service.cancel([job.states[number]])
                return
            except OverloadedError:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), _ROOM_SECONDS)
            except RequestError as error:
                # Once the model has failed, why it has. Without a traceback: its frames would keep all they refer to.
                result.fail((self._service.failure or error).with_traceback(None))
                job.outcomes.put(result)
                return

    def _finish(self, job: _Job, result: OfflineResult) -> None:
        del job.states[result.number]
        job.outcomes.put(result)

    def _abandon(self, job: _Job) -> None:
        self._service.cancel(list(job.states.values()))
