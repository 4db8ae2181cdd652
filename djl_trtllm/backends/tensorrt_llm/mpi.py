"""TensorRT-LLM's ranks, started through MPI: what MPI needs, and the end of a load that waits for one in vain."""

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import psutil

from djl_trtllm.backends.tensorrt_llm.engine_watch import dead, is_alive, is_rank, launched_ranks
from djl_trtllm.executor.kernels import with_own_kernels
from djl_trtllm.executor.ranks import RankError
from djl_trtllm.model.work_directory import folder_in_memory

T = TypeVar("T")

DIED = "a rank of TensorRT-LLM ended before its time"
REFUSED = "MPI cannot start TensorRT-LLM's ranks"
REASONS = (
    rf"Failed to initialize executor on rank|{DIED}"
    r"|detected an attempt to run as root|There are not enough slots available|mpi4py\.MPI\.Exception: "
)
"""The lines of the log with which a rank, or MPI, says why a load fails."""

_SINGLE_PROCESS = "TLLM_WORKER_USE_SINGLE_PROCESS"
_ROOT = (
    "OMPI_ALLOW_RUN_AS_ROOT",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
    "PRTE_ALLOW_RUN_AS_ROOT",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM",
)
_ALWAYS = {
    # 4.1 refuses more ranks than cores.
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    # 5.0 ends the process whose rank was killed at once and without a word, with status 14; so it has time to say why.
    "OMPI_MCA_mpi_abort_delay": "5",
}
_SEGMENTS = ("OMPI_MCA_btl_vader_backing_directory", "OMPI_MCA_btl_sm_backing_directory")
_DAEMONS = ("orted", "prte", "prted")

_POLL_SECONDS = 0.2
_SPAWN_SECONDS = 40.0
"""MPI's daemon starts the ranks within a second or two; they import TensorRT-LLM later."""
_JOIN_SECONDS = 5.0
_UNWINDING_SECONDS = 10.0
_WORDS_SECONDS = 10.0
"""Seconds in which a launcher's rank writes why it failed, and the leader reports its own failure, if it failed too."""
_STATUS = 3


class SpawnError(RankError):
    """MPI cannot start ranks."""


def prepare_mpi() -> None:
    """Set what Open MPI (4.1, and 5.0 with its PRRTE) needs to start ranks; a variable that the user set stays."""
    wanted = dict(_ALWAYS)
    if os.geteuid() == 0:
        wanted |= dict.fromkeys(_ROOT, "1")
    # Open MPI leaves its segments behind when a process is killed, 5.0 also where it ends well.
    memory = folder_in_memory(Path(tempfile.gettempdir()))
    wanted |= dict.fromkeys(_SEGMENTS, str(memory) if memory.is_dir() else tempfile.gettempdir())
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def load_with_ranks(load: Callable[[], T], ranks: int) -> T:
    """Load a model. If MPI cannot start the rank of a single GPU, load it in this process.

    Raises RankError where a rank cannot be started or ends, and what `load` raises.
    """
    try:
        with watched_ranks():
            return load()
    except SpawnError:
        if ranks > 1 or _SINGLE_PROCESS in os.environ:
            raise
        print(f"One GPU needs none: the model is loaded in the engine process ({_SINGLE_PROCESS}=1).", flush=True)
    os.environ[_SINGLE_PROCESS] = "1"
    _forget_what_the_variable_was()
    return load()


def _forget_what_the_variable_was() -> None:
    """Clear the cache of the function with which TensorRT-LLM reads the variable (@03dd9bb8, about 1.2; #10098)."""
    with contextlib.suppress(ImportError, AttributeError):  # a version without the function, or without the cache
        import_module("tensorrt_llm.llmapi.utils").enable_worker_single_process_for_tp1.cache_clear()


@contextlib.contextmanager
def ending_with_ranks() -> Iterator[None]:
    """End this process with status 3 where `watched_ranks` raises: MPI's threads would keep it."""
    try:
        with watched_ranks():
            yield
    except RankError:
        os._exit(_STATUS)


@contextlib.contextmanager
def watched_ranks() -> Iterator[None]:
    """Raise RankError, and print it, when a rank cannot be started or ends inside the block.

    mpi4py then leaves the rank's task pending, and TensorRT-LLM waits for it (`_start_executor_workers` of
    executor/proxy.py): the task gets the error instead. Where TensorRT-LLM itself gives up, it first waits until all
    ranks have ended, of which one may wait for another in a collective operation: not for ever.
    """
    watch = _Watch()
    previous_hook = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        previous_hook(args)
        if _is_from_mpi4py(args.exc_traceback):
            watch.fail(SpawnError(f"{REFUSED} ({args.exc_type.__name__}: {args.exc_value})"))

    threading.excepthook = hook
    thread = threading.Thread(target=watch.run, name="rank-watch", daemon=True)
    thread.start()
    try:
        with _bounded_pools(watch), _guarded_launcher(watch):
            yield
    except Exception:
        if watch.error is not None:
            raise watch.error from None
        raise
    finally:
        watch.over.set()
        thread.join()
        threading.excepthook = previous_hook


def _is_from_mpi4py(traceback: TracebackType | None) -> bool:
    while traceback is not None:
        if str(traceback.tb_frame.f_globals.get("__name__")).startswith("mpi4py"):
            return True
        traceback = traceback.tb_next
    return False


@contextlib.contextmanager
def _bounded_pools(watch: "_Watch") -> Iterator[None]:
    """Collect the ranks' tasks, and bound a pool's shutdown: a few seconds, or no time after a rank was lost.

    The tasks run with the rank's own folder of kernels.
    """
    pool = getattr(sys.modules.get("mpi4py.futures"), "MPIPoolExecutor", None)
    if pool is None:
        yield
        return
    submit, shutdown = pool.submit, pool.shutdown

    def collecting(self: Any, task: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        task, args, options = with_own_kernels(task, *args, **options)
        future: Future[Any] = submit(self, task, *args, **options)
        watch.tasks.append(future)
        return future

    def bounded(self: Any, *args: Any, **options: Any) -> None:
        thread = threading.Thread(target=shutdown, args=(self, *args), kwargs=options, daemon=True)
        thread.start()
        thread.join(_JOIN_SECONDS if watch.error is None else 0.0)

    pool.submit, pool.shutdown = collecting, bounded
    try:
        yield
    finally:
        pool.submit, pool.shutdown = submit, shutdown


@contextlib.contextmanager
def _guarded_launcher(watch: "_Watch") -> Iterator[None]:
    """Send TensorRT-LLM's workers to a launcher's ranks by `run_on_rank`, without waiting for results."""
    if not watch.launched:
        yield
        return
    session = import_module("tensorrt_llm.llmapi.mpi_session").RemoteMpiCommSessionClient
    submit = session.submit

    def guarding(self: Any, task: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if "worker_cls" in options:
            return submit(self, run_on_rank, task, *args, **options)
        return submit(self, task, *args, **options)

    session.submit = guarding
    try:
        yield
    finally:
        session.submit = submit


def run_on_rank(task: Callable[..., T], *args: Any, worker_cls: Callable[..., Any], **options: Any) -> T:
    """Run `worker_main` (executor/worker.py) on a launcher's rank; all ranks end if this one cannot make its worker.

    TensorRT-LLM logs the error, and the rank waits in a barrier for the others, which wait for it in a collective
    operation of the load.
    """

    def make(*worker_args: Any, **worker_options: Any) -> Any:
        try:
            return worker_cls(*worker_args, **worker_options)
        except Exception:
            end = threading.Timer(_WORDS_SECONDS, _end_all_ranks)
            end.daemon = True
            end.start()
            raise

    return task(*args, worker_cls=make, **options)


def _end_all_ranks() -> None:
    from mpi4py import MPI

    print("a rank cannot load the model (above), and the others wait for it: all ranks end", flush=True)
    MPI.COMM_WORLD.Abort(_STATUS)


class _Watch:
    """Looks for ranks that end or do not come."""

    def __init__(self) -> None:
        self.error: RankError | None = None
        self.tasks: list[Future[Any]] = []
        self.over = threading.Event()
        self.launched = launched_ranks()

    def fail(self, error: RankError) -> None:
        if self.error is None:
            print(error, flush=True)
            self.error = error
        for task in self.tasks:
            with contextlib.suppress(InvalidStateError):
                task.set_exception(self.error)

    def run(self) -> None:
        ranks: set[psutil.Process] = set()
        alone_for = 0.0
        while self.error is None and not self.over.wait(_POLL_SECONDS):
            living = {process for process in psutil.Process().children(recursive=True) if is_alive(process)}
            ranks |= {process for process in living - ranks if is_rank(process)}
            alone_for = 0.0 if ranks or not any(map(_is_daemon, living)) else alone_for + _POLL_SECONDS
            if alone_for >= _SPAWN_SECONDS:
                self.fail(SpawnError(f"{REFUSED}: there is none after {_SPAWN_SECONDS:g} seconds"))
            elif lost := ranks - living:
                self.fail(RankError(f"{DIED} (process {', '.join(str(process.pid) for process in lost)})"))
            elif gone := dead(self.launched):
                why = "the output of its launcher says why"
                self.fail(RankError(f"{DIED} (process {', '.join(map(str, gone))}): {why}"))
        # The block raises what its tasks raise, if it waits for them.
        if self.error is not None and not self.over.wait(_UNWINDING_SECONDS):
            os._exit(_STATUS)


def _is_daemon(process: psutil.Process) -> bool:
    try:
        return process.name() in _DAEMONS
    except psutil.Error:
        return False
