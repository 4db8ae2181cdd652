"""The two ways from the LLM to the engine: a worker process per rank behind a proxy, or a worker of its own process.

The second is what TensorRT-LLM uses on one GPU where logits are gathered: then the engine's crash is the caller's.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import gc
import json
import queue
import threading
import weakref
from collections.abc import Iterator
from queue import Queue
from typing import Any

from .errors import CppExecutorError, RequestError
from .ipc import IpcQueue
from .iteration_results import IterationResult, no_iterations
from .logger import logger, print_colored
from .mpi import MpiPoolSession
from .queues import AsyncQueue, ManagedThread, SyncQueue
from .requests import CancellingRequest, GenerationRequest
from .responses import ErrorResponse, is_llm_response
from .results import GenerationResult
from .worker import load_engine, worker_main
from .worker_settings import WorkerSettings


class GenerationExecutor:
    """What both share: client ids, background errors, iteration statistics."""

    def __init__(self) -> None:
        atexit.register(self.shutdown)
        self._error_queue: Queue[Any] = Queue()
        self.doing_shutdown = False
        self._last_client_id = 1
        self._iter_stats_result: IterationResult | None = None
        self._results: dict[int, GenerationResult] = {}

    def generate_async(
        self, prompt_token_ids: list[int], sampling_params: Any, lora_request: Any, streaming: bool
    ) -> GenerationResult:
        assert isinstance(prompt_token_ids[0], int)
        if self._iter_stats_result is None:
            self._iter_stats_result = IterationResult()
        else:
            self._iter_stats_result.mark_undone()
        return self.submit(GenerationRequest(prompt_token_ids, sampling_params, lora_request, streaming))

    def submit(self, request: GenerationRequest) -> GenerationResult:
        raise NotImplementedError

    def abort_request(self, request_id: int) -> None:
        raise NotImplementedError

    def shutdown(self) -> None:
        raise NotImplementedError

    def is_shutdown(self) -> bool:
        return self.doing_shutdown

    def check_health(self) -> bool:
        """A killed worker is not noticed: its future stays pending."""
        return not self.doing_shutdown and self._error_queue.empty()

    def _register(self, request: GenerationRequest) -> GenerationResult:
        self._last_client_id += 1
        request.id = self._last_client_id
        result = GenerationResult(request, self._handle_background_error, self)
        self._results[request.id] = result
        return result

    def _handle_background_error(self, error: Any = None) -> None:
        """Raise `error`, as a RequestError where it is a request's own; else the first error of a background thread."""
        if error is not None:
            if isinstance(error, str):
                error = RequestError(error)
            elif not isinstance(error, RequestError):
                self.shutdown()
            raise error
        if not self._error_queue.empty():
            error = self._error_queue.get()
            self.shutdown()
            raise error

    def aget_stats(self, timeout: float | None) -> Any:
        if self._iter_stats_result is None:
            print_colored(
                "Iteration statistics are not available yet. To collect runtime statistics, please call "
                "get_stats_async() in async coroutine or the /metrics endpoint (if you're using trtllm-serve) AFTER "
                "prompts have been submitted.\n",
                "yellow",
            )
            return no_iterations()
        self._iter_stats_result.set_timeout(timeout)
        return self._iter_stats_result

    def get_stats(self, timeout: float | None) -> list[dict[str, Any]]:
        if self._iter_stats_result is None:
            print_colored(
                "Iteration statistics are not available yet. To collect runtime statistics, please call get_stats() "
                "AFTER prompts have been submitted.\n",
                "yellow",
            )
            return []
        self._iter_stats_result.set_timeout(timeout)
        return self._iter_stats_result.get_results()

    def _dispatch(self, responses: list[Any]) -> None:
        """Into the requests' queues, and one wake-up of their loop."""
        async_queues = []
        event_loop: asyncio.AbstractEventLoop | None = None
        for response in responses:
            client_id = response.client_id
            result_queue = self._results[client_id].queue
            if isinstance(result_queue, SyncQueue):
                result_queue.put_nowait(response)
                async_queues.append(result_queue)
                event_loop = event_loop or result_queue.loop
            else:
                result_queue.put(response)
            if (is_llm_response(response) and response.result.is_final) or isinstance(response, ErrorResponse):
                self._results.pop(client_id)
        if event_loop is not None:
            try:
                SyncQueue.notify_many(event_loop, async_queues)
            except AsyncQueue.EventLoopShutdownError:
                logger.warning("proxy.py: EventLoopShutdownError because event loop is not running")

    def _dispatch_stats(self, lines: list[str]) -> None:
        if self._iter_stats_result is None:
            return
        stats_queue = self._iter_stats_result.queue
        with contextlib.suppress(AsyncQueue.EventLoopShutdownError):
            for line in lines:
                if isinstance(stats_queue, SyncQueue):
                    stats_queue.put_nowait(line)
                else:
                    stats_queue.put(line)
            if lines and isinstance(stats_queue, SyncQueue):
                SyncQueue.notify_many(stats_queue.loop, [stats_queue])


@contextlib.contextmanager
def _gc_thresholds(generation0: int | None) -> Iterator[None]:
    if generation0 is None:
        yield
        return
    before = gc.get_threshold()
    gc.set_threshold(generation0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class GenerationExecutorProxy(GenerationExecutor):
    """Requests to the workers, and a thread that hands out what comes back."""

    def __init__(
        self, settings: WorkerSettings, world_size: int, session: MpiPoolSession | None, gc_threshold: int | None
    ) -> None:
        super().__init__()
        self.workers_started = False
        self.mpi_session = session or MpiPoolSession(n_workers=world_size)
        print_colored("rank 0 using MpiPoolSession to spawn MPI processes\n", "yellow")
        directory = self.mpi_session.directory
        self.request_queue = IpcQueue(directory, "requests")
        self.status_queue = IpcQueue(directory, "status")
        self.result_queue = IpcQueue(directory, "results")
        self.stats_queue = IpcQueue(directory, "stats")
        self._gc_threshold = gc_threshold
        self._threads: list[ManagedThread] = []
        self._start_workers(settings, world_size)
        # The threads that MPI joins are joined before the atexit handlers run.
        threading._register_atexit(self.pre_shutdown)  # type: ignore[attr-defined]

    def _start_workers(self, settings: WorkerSettings, world_size: int) -> None:
        self_ref = weakref.ref(self)

        def done(future: concurrent.futures.Future[Any]) -> None:
            self_ = self_ref()
            if future.exception() is not None and self_ is not None:
                self_._error_queue.put_nowait(future.exception())

        queues = (self.request_queue, self.status_queue, self.result_queue, self.stats_queue)
        addresses = tuple(ipc.address for ipc in queues)
        barrier = f"{self.mpi_session.directory}/nccl"
        self.mpi_futures = self.mpi_session.submit(worker_main, settings, addresses, world_size, barrier)
        for future in self.mpi_futures:
            future.add_done_callback(done)
        self.workers_started = True
        for ipc in queues:
            while not ipc.accept(1):
                self._check_starting()
        while not self.status_queue.poll(1):
            self._check_starting()
        error, trace = self.status_queue.get()
        if error is not None:
            logger.error(f"Executor worker initialization error: {trace}")
            self.workers_started = False
            self.mpi_session.shutdown()
            raise RuntimeError("Executor worker returned error") from error

    def _check_starting(self) -> None:
        if any(future.done() for future in self.mpi_futures):
            logger.error("Executor worker died during initialization.")
            raise RuntimeError("Executor worker died during initialization")
        self._handle_background_error()

    def _start_dispatch_threads(self) -> None:
        if not self._threads:
            for task in (self._dispatch_result_task, self._dispatch_stats_task):
                thread = ManagedThread(weakref.WeakMethod(task), self._error_queue, f"proxy{task.__name__}")
                self._threads.append(thread)
                thread.start()
        self._handle_background_error()

    def _dispatch_result_task(self) -> bool:
        try:
            with _gc_thresholds(self._gc_threshold):
                responses = self.result_queue.get()
        except (EOFError, OSError):
            # ZeroMQ says nothing when the other side is gone.
            threading.Event().wait()
            return False
        if responses is None:
            return False
        self._dispatch(responses)
        return True

    def _dispatch_stats_task(self) -> bool:
        threading.Event().wait(0.2)
        try:
            lines = self.stats_queue.get()
        except (EOFError, OSError):
            return False
        if lines is None:
            return False
        self._dispatch_stats(lines)
        return True

    def submit(self, request: GenerationRequest) -> GenerationResult:
        self._start_dispatch_threads()
        result = self._register(request)
        self.request_queue.put(request)
        self._handle_background_error()
        return result

    def abort_request(self, request_id: int) -> None:
        self.request_queue.put(CancellingRequest(request_id))

    def pre_shutdown(self) -> None:
        if not self.workers_started or self.doing_shutdown:
            return
        self.doing_shutdown = True
        for result in list(self._results.values()):
            result.abort()
        if all(not future.done() for future in self.mpi_futures):
            self.request_queue.put(None)

    def shutdown(self) -> None:
        """Waits for the workers, for ever where one is dead or hangs."""
        if not self.workers_started:
            return
        self.pre_shutdown()
        for future in self.mpi_futures:
            with contextlib.suppress(Exception):
                future.result()
        for thread in self._threads:
            thread.stop()
            thread.join()
        for ipc in (self.request_queue, self.status_queue, self.result_queue, self.stats_queue):
            ipc.close()
        self.workers_started = False
        self.mpi_session.shutdown()
        self._handle_background_error()


class GenerationExecutorWorker(GenerationExecutor):
    """The engine in this process. A refused request is raised by `submit` itself."""

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__()
        logger.warning("Using single process worker for TP1, this may hurt streaming generation performance.")
        self._engine = load_engine(settings, 0)
        self._inbox: Queue[Any] = Queue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, request: GenerationRequest) -> GenerationResult:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="await_response_thread", daemon=True)
            self._thread.start()
        result = self._register(request)
        # As in the source, the result of a refused request stays registered.
        with self._lock:
            self._engine.enqueue(request)
        self._inbox.put(None)
        self._handle_background_error()
        return result

    def abort_request(self, request_id: int) -> None:
        with self._lock:
            self._engine.cancel(request_id)

    def _run(self) -> None:
        while not self.doing_shutdown:
            if not self._engine.busy:
                with contextlib.suppress(queue.Empty):
                    self._inbox.get(timeout=0.1)
                continue
            try:
                responses = self._engine.iterate()
            except Exception as error:  # the thread goes on
                self._error_queue.put(error)
                if isinstance(error, CppExecutorError):
                    self._engine.end()
                continue
            self._dispatch(responses)
            lines = [json.dumps(self._engine.stats.popleft()) for _ in range(len(self._engine.stats))]
            self._dispatch_stats(lines)

    def shutdown(self) -> None:
        if self.doing_shutdown:
            return
        self.doing_shutdown = True
        if self._thread is not None:
            self._thread.join()
        self._handle_background_error()
