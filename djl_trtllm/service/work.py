"""Work that would stop the event loop: in threads, or, on files that may be anybody's, in a bounded process.

Tokenising lets go of the GIL, and compiling and loading run elsewhere: for them there are threads. Reading JSON,
settings and tokenizers holds the GIL, for seconds where the files are hostile. Requests' JSON is bounded (`read_json`);
files are read, and chat templates rendered, in processes of their own, within bounds of memory and processor time. Such
a process imports this module and what the calls need.
"""

import asyncio
import json
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from functools import partial
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, TypeVar

from djl_trtllm.errors import DjlTrtllmError, ModelError
from djl_trtllm.processes import allow_more_memory, allow_more_processor_time, leave_end_to_parent, write_no_core_file

P = ParamSpec("P")
T = TypeVar("T")

_MOST_THREADS = 4


class WorkerThreads(Executor):
    """Daemon threads: a process can end while one of them works. They are started when there is work for them."""

    def __init__(self, most: int = 0) -> None:
        self._most = most or min(_MOST_THREADS, os.cpu_count() or 1)
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._busy = 0

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._busy >= self._threads < self._most:
                self._start_thread()
            self._busy += 1
        self._work.put((future, lambda: work(*args, **kwargs)))
        return future

    def _start_thread(self) -> None:
        """Start another thread, or leave the work to the running threads. Raises RuntimeError if none runs."""
        try:
            threading.Thread(target=self._serve, name=f"work-{self._threads + 1}", daemon=True).start()
        except (RuntimeError, MemoryError):  # memory is short, or the machine has no more threads
            if not self._threads:
                raise
        else:
            self._threads += 1

    @property
    def waiting(self) -> int:
        """The number of pieces of work that no thread has begun."""
        return max(0, self._busy - self._most)

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`. Work whose caller has left before a thread was free is not begun."""
        return await asyncio.get_running_loop().run_in_executor(self, work)

    def _serve(self) -> None:
        while True:
            future, work = self._work.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # the caller's, whatever it is
                    future.set_exception(error)
            with self._lock:
                self._busy -= 1
            del future, work  # an idle thread keeps nothing of a request


WORKERS = WorkerThreads()
"""The threads of this process for the work of requests."""
LONG_WORK = WorkerThreads(32)
"""The threads for what takes seconds or minutes: preparing and compiling models, loading tokenizers."""


# -- files that may be anybody's ------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

_PROCESSOR_SECONDS = 60
"""The most processor time of a call. The largest files within the bounds of `files` take ten seconds."""
_SECONDS = 900.0
_MEMORY = 2 * 1024**3
"""The most bytes of a process beyond its start. The largest files take 0.4 GB."""
_NICENESS = 5
"""The niceness of the process, so that the server has the processor first."""
# The process imports from the same path as this one, and not from where this one happens to stand.
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from djl_trtllm.service.work import serve_calls
serve_calls(sys.argv[2], *map(int, sys.argv[3:]))
"""


def start_calls(
    doing: str,
    *,
    seconds: int = _PROCESSOR_SECONDS,
    memory: int = _MEMORY,
    niceness: int = _NICENESS,
    environ: Mapping[str, str] | None = None,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process that runs `serve_calls`, and return this end of its connection, see `BoundedCalls`.

    Without `environ` it has the environment of this one. Raises OSError if no process can be started.
    """
    ours, theirs = socket.socketpair()
    level = logging.getLogger(__package__).getEffectiveLevel()
    with theirs:
        fd = theirs.fileno()
        numbers = map(str, (fd, level, seconds, memory, niceness))
        command = [sys.executable, "-I", "-c", _PROGRAM, json.dumps(sys.path), doing, *numbers]
        try:
            return subprocess.Popen(command, pass_fds=(fd,), stdin=subprocess.DEVNULL, env=environ), ours
        except OSError:
            ours.close()
            raise


class Calls:
    """Calls in this process. Arguments and results have to be those that `BoundedCalls` can send."""

    def __call__(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what `work` returns, or raise what it raises."""
        return self.later(work, *args, **kwargs)()

    def later(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Callable[[], T]:
        """A function that returns the result; it may be called once. Raises what `work` raises, now or then."""
        return partial(work, *args, **kwargs)


class BoundedCalls(Calls):
    """Calls in a new process, one after the other; a context manager, which ends the process.

    `work`, arguments and results are pickled; what the process logs is logged here. A call also raises ModelError if it
    takes more than `seconds` of processor time, or the process more than `memory` bytes; `doing` says in errors what
    that was: "reading the files of ...".
    """

    def __init__(
        self, doing: str, *, seconds: int = _PROCESSOR_SECONDS, memory: int = _MEMORY, niceness: int = _NICENESS
    ) -> None:
        """Raises OSError if no process can be started."""
        self._doing, self._seconds, self._memory = doing, seconds, memory
        self._process, ours = start_calls(doing, seconds=seconds, memory=memory, niceness=niceness)
        self._connection = Connection(ours.detach())

    def __enter__(self) -> "BoundedCalls":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def later(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Callable[[], T]:
        """See `Calls.later`. The work is done now, and its result is unpickled when the function is called."""
        try:
            self._connection.send(partial(work, *args, **kwargs))
            while self._connection.poll(_SECONDS):
                if (result := answer_of(self._connection.recv())) is not None:
                    return result
        except (EOFError, OSError):
            raise ModelError(f"{self._doing} {self._reason(self._process.wait())}") from None
        raise ModelError(f"{self._doing} takes more than {_SECONDS:g} seconds")

    def _reason(self, status: int) -> str:
        if status == -signal.SIGXCPU:
            return f"takes more than {self._seconds} seconds of processor time"
        return f"failed: its process ended with status {status}; it may take {self._memory:,} bytes"


def answer_of(message: object) -> Callable[[], Any] | None:
    """The result of a call by its answer, to be called once; None for a line of the log, which is logged here.

    Raises what the call has raised.
    """
    match message:
        case logging.LogRecord() as record:
            logging.getLogger(record.name).handle(record)
            return None
        case bytes() as result:
            held = [result]  # which is not kept beside what becomes of it
            return lambda: pickle.loads(held.pop())  # noqa: S301 - of this program, not of the files
        case BaseException() as error:
            raise error
    raise TypeError(f"expected an answer, got {type(message).__name__}")


class _Forwarded(QueueHandler):
    """Sends lines of the log, with their arguments put in."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._connection = connection

    def enqueue(self, record: logging.LogRecord) -> None:
        self._connection.send(record)


def serve_calls(doing: str, fd: int, level: int, seconds: int, memory: int, niceness: int) -> None:
    """Do the calls that come from `fd`; the main function of the process."""
    leave_end_to_parent()
    write_no_core_file()
    os.nice(niceness)
    connection = Connection(fd)
    logging.basicConfig(handlers=[_Forwarded(connection)], level=level, format="%(message)s")
    allow_more_memory(memory)
    while True:
        try:
            work = connection.recv()
        except EOFError:
            return
        allow_more_processor_time(seconds)
        try:
            connection.send(pickle.dumps(work()))
        except DjlTrtllmError as error:
            connection.send(error)
        except MemoryError:
            connection.send(ModelError(f"{doing} takes more than {memory:,} bytes of memory"))
        except Exception as error:
            logger.exception("%s failed", doing)
            connection.send(ModelError(f"{doing} failed: {error!r}"))
