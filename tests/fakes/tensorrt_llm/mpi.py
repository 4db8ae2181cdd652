"""The pool of MPI processes that builds engines and runs the executor (facts §7.4), one process per rank.

As with mpi4py, a rank imports the main module of the process that started it, under another name than `__main__`.
With FAKE_TENSORRT_LLM_MPI it is mpi4py: `real_mpi.py`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import pickle
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

_REAL = "FAKE_TENSORRT_LLM_MPI" in os.environ
if _REAL:
    from mpi4py import MPI

    from .real_mpi import PoolSession, RemoteSession

_DAEMON = Path(__file__).with_name("launcher.py")


class MpiPoolSession:
    """`n_workers` ranks. A task goes to every rank; its future stays pending where the rank was killed."""

    def __init__(self, n_workers: int) -> None:
        if "OMPI_COMM_WORLD_RANK" in os.environ:
            # Without the guard a rank comes here when it imports the main module.
            raise RuntimeError(
                "Only rank 0 can submit requests.\nTo fix this, ensure that the llm.generate(...) method is guarded "
                "with the `if __name__ == '__main__':` block."
            )
        self.n_workers = n_workers
        self.directory = tempfile.mkdtemp(prefix="mpi-")
        listener = Listener(f"{self.directory}/pool", "AF_UNIX")
        self._daemon = subprocess.Popen(
            [sys.executable, str(_DAEMON), str(n_workers), f"{self.directory}/pool"], stdin=subprocess.PIPE
        )
        ranks: dict[int, Connection] = {}
        for _ in range(n_workers):
            connection = listener.accept()
            ranks[connection.recv()] = connection
        listener.close()
        self._ranks = [ranks[rank] for rank in range(n_workers)]
        for rank in self._ranks:
            rank.send((_main_module(), list(sys.path)))
        self._pending: list[list[concurrent.futures.Future[Any]]] = [[] for _ in self._ranks]
        for number, rank in enumerate(self._ranks):
            threading.Thread(target=self._read, args=(number, rank), daemon=True).start()

    def _read(self, number: int, rank: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                result, error = pickle.loads(rank.recv_bytes())
                future = self._pending[number].pop(0)
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)

    def submit(self, task: Callable[..., Any], *args: Any, **options: Any) -> list[concurrent.futures.Future[Any]]:
        futures: list[concurrent.futures.Future[Any]] = []
        for number, rank in enumerate(self._ranks):
            future: concurrent.futures.Future[Any] = concurrent.futures.Future()
            self._pending[number].append(future)
            futures.append(future)
            rank.send_bytes(pickle.dumps((functools.partial(task, rank=number, **options), args)))
        return futures

    def submit_sync(self, task: Callable[..., Any], *args: Any) -> list[Any]:
        return [future.result() for future in self.submit(task, *args)]

    def shutdown_abort(self) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """The ranks end; they are given no time."""
        if self._daemon.stdin is not None and not self._daemon.stdin.closed:
            self._daemon.stdin.close()
            self._daemon.wait()
            for rank in self._ranks:
                rank.close()
            shutil.rmtree(self.directory, ignore_errors=True)


def pool_session(n_workers: int) -> Any:
    """TensorRT-LLM's MpiPoolSession, over this pool or mpi4py's; the session of a launcher's ranks."""
    if not _REAL:
        return MpiPoolSession(n_workers)
    return RemoteSession() if os.environ.get("TLLM_SPAWN_PROXY_PROCESS") == "1" else PoolSession(n_workers)


def barrier() -> None:
    """Wait for all ranks, where MPI is real."""
    if _REAL:
        MPI.COMM_WORLD.barrier()


def _main_module() -> tuple[str | None, str | None]:
    """Name, or else path, of this process's main module."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return spec.name, None
    return None, getattr(main, "__file__", None)


def _import_main(name: str | None, path: str | None) -> None:
    if name is not None:
        runpy.run_module(name, run_name="__worker__", alter_sys=True)
    elif path is not None and os.path.exists(path):
        runpy.run_path(path, run_name="__worker__")


def serve(rank: int, address: str) -> None:
    """A rank: run tasks as they come, until the pool goes away."""
    os.environ["OMPI_COMM_WORLD_RANK"] = str(rank)
    pool = Client(address, "AF_UNIX")
    pool.send(rank)
    main, paths = pool.recv()
    sys.path[:] = paths
    _import_main(*main)
    while True:
        try:
            task, arguments = pickle.loads(pool.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer = pickle.dumps((task(*arguments), None))
        except Exception as error:
            traceback.print_exc()
            answer = pickle.dumps((None, error))
        pool.send_bytes(answer)


if __name__ == "__main__":
    # The classes that are pickled belong to the module as everyone else imports it.
    from tensorrt_llm._fake import mpi

    mpi.serve(int(sys.argv[2]), sys.argv[3])
