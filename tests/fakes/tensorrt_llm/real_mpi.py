"""TensorRT-LLM's MpiPoolSession over mpi4py (llmapi/mpi_session.py, 1.2.1 and later)."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import functools
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Listener
from typing import Any

from mpi4py import MPI
from mpi4py.futures import MPICommExecutor, MPIPoolExecutor

_GRACE_SECONDS = 60.0


class PoolSession:
    """A shutdown joins all ranks. A task goes to every rank."""

    def __init__(self, n_workers: int) -> None:
        self.n_workers = n_workers
        self.directory = tempfile.mkdtemp(prefix="mpi-")
        self._pool: MPIPoolExecutor | None = MPIPoolExecutor(max_workers=n_workers, path=sys.path)

    def submit(self, task: Callable[..., Any], *args: Any, **options: Any) -> list[concurrent.futures.Future[Any]]:
        assert self._pool is not None
        return [self._pool.submit(_on_spawned_rank, task, *args, **options) for _ in range(self.n_workers)]

    def submit_sync(self, task: Callable[..., Any], *args: Any) -> list[Any]:
        return [future.result() for future in self.submit(task, *args)]

    def shutdown(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def shutdown_abort(self) -> None:
        """A rank that does not end costs this process its life."""
        over = threading.Event()

        def abort() -> None:
            if not over.wait(_GRACE_SECONDS):
                MPI.COMM_WORLD.Abort(1)

        threading.Thread(target=abort, name="MpiSessionTimeoutKiller").start()
        self.shutdown()
        over.set()


_workspace: list[int] = []


def _on_spawned_rank(task: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """FlashInfer may end a rank that shares its folder with others (#18368); here it always does."""
    folder = os.environ.get("FLASHINFER_WORKSPACE_BASE")
    if folder and MPI.COMM_WORLD.Get_size() > 1 and not _workspace:
        _workspace.append(os.open(f"{folder}/in-use", os.O_CREAT | os.O_RDWR))
        try:
            fcntl.flock(_workspace[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.kill(os.getpid(), signal.SIGBUS)
    return _on_rank(task, *args, **options)


def _on_rank(task: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    MPI.COMM_WORLD.barrier()
    try:
        return task(*args, rank=MPI.COMM_WORLD.Get_rank(), **options)
    finally:
        MPI.COMM_WORLD.barrier()


# -- trtllm-llmapi-launch: the ranks are there already (llmapi/mgmn_leader_node.py, mgmn_worker_node.py) ---------------


class RemoteSession:
    """Sends tasks to the launcher's ranks. Nobody says what becomes of them, and a shutdown does nothing."""

    def __init__(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="mpi-")
        key = bytes.fromhex(os.environ["TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY"])
        self._leader = Client(os.environ["TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR"], "AF_UNIX", authkey=key)

    def submit(self, task: Callable[..., Any], *args: Any, **options: Any) -> list[concurrent.futures.Future[Any]]:
        self._leader.send((functools.partial(task, **options), *args))
        return []

    def shutdown(self) -> None:
        pass

    shutdown_abort = shutdown


def launch(command: list[str]) -> None:
    """Be a rank of mpirun's. The first one runs the command beside, which is no rank; all end with the command."""
    with MPICommExecutor(MPI.COMM_WORLD) as pool, tempfile.TemporaryDirectory() as directory:
        if pool is not None:
            _lead(pool, command, f"{directory}/leader")


def _lead(pool: Any, command: list[str], address: str) -> None:
    key = os.urandom(32)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PMI_"))}
    environment["TLLM_SPAWN_PROXY_PROCESS"] = "1"
    environment["TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR"] = address
    environment["TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY"] = key.hex()
    listener = Listener(address, "AF_UNIX", authkey=key)

    def run() -> None:
        subprocess.run(command, env=environment)
        with Client(address, "AF_UNIX", authkey=key) as leader:
            leader.send(None)

    threading.Thread(target=run, daemon=True).start()
    own = concurrent.futures.ThreadPoolExecutor()
    running: list[concurrent.futures.Future[Any]] = []
    while True:
        with listener.accept() as proxy, contextlib.suppress(EOFError):
            while True:
                message = proxy.recv()
                if message is None:
                    return
                concurrent.futures.wait(running)
                running = [own.submit(_on_rank, *message)]
                running += [pool.submit(_on_rank, *message) for _ in range(MPI.COMM_WORLD.Get_size() - 1)]


if __name__ == "__main__":
    # Tasks belong to the module as everyone else imports it.
    from tensorrt_llm._fake import real_mpi

    real_mpi.launch(sys.argv[1:])
