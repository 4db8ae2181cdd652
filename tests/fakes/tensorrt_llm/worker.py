"""A rank's side: load the engine, then iterate."""

from __future__ import annotations

import json
import os
import time
import traceback
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from .engine import Engine
from .engine_files import deserialize_error, load_rank
from .errors import CppExecutorError, RequestError
from .ipc import IpcQueue
from .logger import cpp_log, logger
from .memory import ENGINE_OUT_OF_MEMORY, NO_KV_CACHE, memory_model
from .requests import CancellingRequest
from .worker_settings import WorkerSettings

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
    match script["load_error"] if fits else "oom":
        case None:
            pass
        case "oom":
            raise RuntimeError(_OUT_OF_MEMORY if settings.pytorch else ENGINE_OUT_OF_MEMORY)
        case "deserialize":
            raise deserialize_error()
        case "die":
            os.kill(os.getpid(), 9)
        case "hang":
            time.sleep(1e9)
        case message:
            raise RuntimeError(message)
    if settings.engine_dir is not None:
        load_rank(Path(settings.engine_dir), rank, settings.max_beam_width)
    if settings.kv_blocks <= 0:
        raise RuntimeError(NO_KV_CACHE)
    tokens = settings.kv_blocks * settings.tokens_per_block
    cpp_log("INFO", f"[MemUsageChange] Allocated 1.00 GiB for max tokens in paged KV cache ({tokens}).")
    return Engine(settings)


def worker_main(
    rank: int, settings: WorkerSettings, addresses: tuple[tuple[str, bytes], ...], world_size: int, barrier: str
) -> None:
    """Ends when the proxy says so; an error of the engine is the future's."""
    # Requests, status, results and statistics.
    queues = [IpcQueue(address=address) for address in addresses] if rank == 0 else []
    peers: list[Connection] = []
    try:
        engine = load_engine(settings, rank)
        peers = _connect(rank, world_size, barrier)
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
    while leader.recv_bytes() == b"step":
        leader.send_bytes(b"done")


def _step_together(peers: list[Connection], word: bytes) -> None:
    """A collective operation: without one of the ranks it never comes back."""
    try:
        for peer in peers:
            peer.send_bytes(word)
        if word == b"step":
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
    """As the thread that waits for responses (base_worker.py): those of the iteration are lost with an error, which the
    next request finds. The engine's own error is its end."""
    try:
        return engine.iterate()
    except Exception as error:
        logger.error(f"Error in thread await_response_thread: {error}\n{traceback.format_exc()}")
        errors.append(error)
        if isinstance(error, CppExecutorError):
            engine.end()
        return []


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
