"""The ways from the LLM to the engine, and a rank's side of them.

A worker process per rank is behind a proxy, or the worker is in the LLM's own process. The second is what TensorRT-LLM
uses on one GPU where logits are gathered: then the engine's crash is the caller's.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import gc
import json
import os
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from queue import Queue
from typing import Any

from . import gpu
from .build import deserialize_error, load_rank
from .engine import Engine
from .inputs import Processed
from .mpi import barrier as mpi_barrier, pool_session
from .queues import IpcQueue, ManagedThread, SyncQueue
from .results import ErrorResponse, IterationResult, RequestOutput, no_iterations
from .sampling import CancellingRequest, GenerationRequest
from .settings import (
    ENGINE_OUT_OF_MEMORY,
    NO_KV_CACHE,
    CppExecutorError,
    RequestError,
    WorkerSettings,
    cpp_log,
    logger,
    memory_model,
    print_colored,
)

_OUT_OF_MEMORY = (
    "Executor creation failed due to insufficient GPU memory.\n\n"
    "The following component could not be created: Initial KV cache (temporary for KV cache size estimation)\n"
    "Total GPU memory (GiB): 139.72\n"
    "Free GPU memory before component creation attempt (GiB): 1.53\n\n"
    "Previously created components and free GPU memory before/after creation (GiB):\n"
    "Model: 139.21 / 2.46\n"
    "Sampler: 2.46 / 1.53\n\n"
    "Please refer to the TensorRT LLM documentation for information on how to control the memory usage."
)


def load_engine(settings: WorkerSettings, rank: int) -> Engine:
    """Raises what the real one does where the script says so."""
    script = settings.script
    time.sleep(script["load_seconds"])
    memory = memory_model()
    fits = memory is None or memory.free(settings.max_num_tokens) >= 0
    concerned = script["load_error_rank"] in (None, rank)
    match (script["load_error"] if concerned else None) if fits else "oom":
        case None:
            pass
        case "oom":
            raise RuntimeError(_OUT_OF_MEMORY if settings.pytorch else ENGINE_OUT_OF_MEMORY)
        case "deserialize":
            raise deserialize_error()
        case "die":
            # A real rank has imported TensorRT-LLM by then, which takes seconds: it was seen before it dies.
            time.sleep(1)
            os.kill(os.getpid(), 9)
        case "hang":
            time.sleep(1e9)
        case message:
            raise RuntimeError(message)
    if settings.engine_dir is not None:
        load_rank(Path(settings.engine_dir), rank, settings.max_beam_width)
    if settings.guide_problem is not None:
        raise ValueError(settings.guide_problem)
    if settings.kv_blocks <= 0:
        raise RuntimeError(NO_KV_CACHE)
    if script["gpu_bytes"]:
        gpu.hold(script["gpu_bytes"], rank)
    tokens = settings.kv_blocks * settings.tokens_per_block
    cpp_log("INFO", f"[MemUsageChange] Allocated 1.00 GiB for max tokens in paged KV cache ({tokens}).")
    return Engine(settings)


def worker_main(
    settings: WorkerSettings,
    addresses: tuple[tuple[str, bytes], ...],
    world_size: int,
    barrier: str,
    *,
    rank: int,
    worker_cls: Callable[[WorkerSettings, int], Engine],
) -> None:
    """Ends when the proxy says so; an error of the engine is the future's."""
    # Requests, status, results and statistics.
    queues = [IpcQueue(address=address) for address in addresses] if rank == 0 else []
    peers: list[Connection] = []
    try:
        engine = worker_cls(settings, rank)
        mpi_barrier()  # collective operations, such as those that make NCCL's communicator
        peers = _connect(rank, world_size, barrier)
        if settings.script["all_reduce"]:
            gpu.join(rank, world_size, f"{barrier}-ranks", settings.script["all_reduce"])
    except Exception as error:
        logger.error(f"Failed to initialize executor on rank {rank}: {error}")
        logger.error(traceback.format_exc())
        if queues:
            queues[1].put_blocking((error, traceback.format_exc()))
        return
    if rank:
        _follow(peers[0])
        return
    requests, status, results, stats = queues
    status.put_blocking((None, None))
    try:
        _lead(engine, peers, requests, results, stats)
    finally:
        results.put_blocking(None)
        stats.put_blocking(None)
        for ipc in queues:
            ipc.close()


def _connect(rank: int, world_size: int, barrier: str) -> list[Connection]:
    """The ranks' communicator."""
    if world_size == 1:
        return []
    if rank:
        deadline = time.monotonic() + 30
        while True:
            try:
                return [Client(barrier, "AF_UNIX")]
            except (FileNotFoundError, ConnectionRefusedError):  # the leader does not listen yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
    with Listener(barrier, "AF_UNIX", backlog=world_size) as listener:
        return [listener.accept() for _ in range(world_size - 1)]


def _follow(leader: Connection) -> None:
    try:
        while leader.recv_bytes() == b"step":
            gpu.all_reduce()
            leader.send_bytes(b"done")
    except (EOFError, OSError):  # as in `_step_together`
        time.sleep(1e9)


def _step_together(peers: list[Connection], word: bytes) -> None:
    """A collective operation: without one of the ranks it never comes back."""
    try:
        for peer in peers:
            peer.send_bytes(word)
        if word == b"step":
            gpu.all_reduce()
            for peer in peers:
                peer.recv_bytes()
    except (EOFError, OSError):
        time.sleep(1e9)


def _lead(engine: Engine, peers: list[Connection], requests: IpcQueue, results: IpcQueue, stats: IpcQueue) -> None:
    open_for_requests = True
    statistics_due = time.monotonic() + 0.2
    errors: list[Exception] = []
    while open_for_requests or engine.busy:
        while open_for_requests and requests.poll(0 if engine.busy else 0.2 if engine.stats else None):
            request = requests.get()
            if request is None:
                open_for_requests = False
            elif isinstance(request, CancellingRequest):
                engine.cancel(request.id)
            else:
                _submit(engine, request, errors)
        if engine.busy:
            _step_together(peers, b"step")
            responses = _responses_of(engine, errors)
            if responses:
                results.put_blocking(responses)
        if engine.stats and time.monotonic() >= statistics_due:
            stats.put([json.dumps(engine.stats.popleft()) for _ in range(len(engine.stats))])
            statistics_due = time.monotonic() + 0.2
    _step_together(peers, b"stop")


def _responses_of(engine: Engine, errors: list[Exception]) -> list[Any]:
    """What the thread that waits for responses gets (base_worker.py): an error loses those of the iteration, and the
    next response, whosever it is, or the next request finds it. The engine's own error is its end."""
    try:
        responses = engine.iterate()
    except Exception as error:
        logger.error(f"Error in thread await_response_thread: {error}\n{traceback.format_exc()}")
        errors.append(error)
        if isinstance(error, CppExecutorError):
            engine.end()
        return []
    for place, response in enumerate(responses):
        if errors and not isinstance(response, ErrorResponse):
            responses[place] = ErrorResponse(response.client_id, str(errors.pop(0)))
    return responses


def _submit(engine: Engine, request: Any, errors: list[Exception]) -> None:
    """Raises, as `BaseWorker.submit`, the first error of another thread, which ends the worker."""
    try:
        engine.enqueue(request)
    except RequestError as error:
        logger.error(f"submit request failed: {error}")
        logger.error(traceback.format_exc())
        engine.fail(request.id, error)
    if errors:
        raise errors[0]


# -- The two ways from the LLM to the engine: a worker process per rank behind a proxy, or a worker of its own process


class GenerationExecutor:
    """What both share: client ids, background errors, iteration statistics."""

    def __init__(self) -> None:
        atexit.register(self.shutdown)
        self._error_queue: Queue[Any] = Queue()
        self.doing_shutdown = False
        self._last_client_id = 1
        self._iter_stats_result: IterationResult | None = None
        self._results: dict[int, RequestOutput] = {}

    def generate_async(
        self, processed: Processed, sampling_params: Any, lora_request: Any, streaming: bool, cache_salt: str | None
    ) -> RequestOutput:
        assert isinstance(processed.prompt_token_ids[0], int)
        if self._iter_stats_result is None:
            self._iter_stats_result = IterationResult()
        else:
            self._iter_stats_result.mark_undone()
        return self.submit(GenerationRequest(processed, sampling_params, lora_request, streaming, cache_salt))

    def submit(self, request: GenerationRequest) -> RequestOutput:
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

    def _register(self, request: GenerationRequest) -> RequestOutput:
        self._last_client_id += 1
        request.id = self._last_client_id
        result = RequestOutput(request, self._handle_background_error, self)
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

    def _dispatch(self, responses: list[Any]) -> None:
        """Into the requests' queues, and one wake-up of their loop."""
        queues = []
        for response in responses:
            queue = self._results[response.client_id].queue
            queue.put_nowait(response)
            queues.append(queue)
            if isinstance(response, ErrorResponse) or response.result.is_final:
                del self._results[response.client_id]
        SyncQueue.notify_many(queues)

    def _dispatch_stats(self, lines: list[str]) -> None:
        if self._iter_stats_result is not None:
            queue = self._iter_stats_result.queue
            for line in lines:
                queue.put_nowait(line)
            SyncQueue.notify_many([queue])


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

    def __init__(self, settings: WorkerSettings, world_size: int, session: Any, gc_threshold: int | None) -> None:
        super().__init__()
        self.workers_started = False
        self.mpi_session = session or pool_session(world_size)
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
        if settings.script["gpu_bytes"]:
            gpu.open_context()

        def done(future: concurrent.futures.Future[Any]) -> None:
            self_ = self_ref()
            if future.exception() is not None and self_ is not None:
                self_._error_queue.put_nowait(future.exception())

        queues = (self.request_queue, self.status_queue, self.result_queue, self.stats_queue)
        addresses = tuple(ipc.address for ipc in queues)
        barrier = f"{self.mpi_session.directory}/nccl"
        self.mpi_futures = self.mpi_session.submit(
            worker_main, settings, addresses, world_size, barrier, worker_cls=load_engine
        )
        for future in self.mpi_futures:
            future.add_done_callback(done)
        self.workers_started = True
        for ipc in queues:
            while not ipc.accept(1):
                self._check_starting()
        while (status := self._initial_status()) is None:
            self._check_starting()
        error, trace = status
        if error is not None:
            logger.error(f"Executor worker initialization error: {trace}")
            self.workers_started = False
            self.mpi_session.shutdown_abort()
            raise RuntimeError("Executor worker returned error") from error

    def _initial_status(self) -> Any:
        try:
            return self.status_queue.get() if self.status_queue.poll(1) else None
        except (EOFError, OSError):  # ZeroMQ says nothing when the other side is gone
            time.sleep(1)
            return None

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

    def submit(self, request: GenerationRequest) -> RequestOutput:
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
            self.request_queue.put_noblock(None)

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

    def submit(self, request: GenerationRequest) -> RequestOutput:
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
