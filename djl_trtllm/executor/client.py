"""The server's end of an engine process: starts it, exchanges messages, detects its death."""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import psutil

from djl_trtllm.errors import ExecutorDiedError, ExecutorStartError
from djl_trtllm.executor import protocol
from djl_trtllm.logs import of_request
from djl_trtllm.model.work_directory import ENGINE_PREFIX, folder_in_memory, marked
from djl_trtllm.processes import oom_kills

_VARIABLE = "DJL_TRTLLM_ENGINE_PROCESS"
_WAIT_SECONDS = 1.0
"""Seconds that a client waits for the process to end, which takes longer where it waits for its GPU."""


class ProcessEnvironment:
    """The environment of one engine process: a mark that all its children inherit, and a TMPDIR of its own.

    Workspaces and sockets of TensorRT-LLM and MPI go there; they are removed by their owners only if these end well. A
    folder in shared memory belongs to it (`folder_in_memory`).
    """

    def __init__(self) -> None:
        self._mark = secrets.token_hex(16)
        self._lock = contextlib.ExitStack()
        shared = Path(tempfile.gettempdir())
        # Sockets are made below it, and the path of a socket has 107 bytes.
        self.temporary = shared / f"{ENGINE_PREFIX}{self._mark[:12]}"
        self.variables = {**os.environ, _VARIABLE: self._mark, "TMPDIR": str(self.temporary)}

    def prepare(self) -> None:
        """Make the folders for temporary files, locked until `clear` or the end of this process. Raises OSError."""
        self.temporary.mkdir(mode=0o700)
        self._lock.enter_context(marked(self.temporary))
        memory = folder_in_memory(self.temporary)
        with contextlib.suppress(OSError):  # not every system has it
            memory.mkdir(mode=0o700)
            self._lock.enter_context(marked(memory))

    def clear(self) -> list[int]:
        """Kill every process that carries the mark and wait until they are gone, a second at most; returns their ids.

        Workers may be in sessions of their own and have other parents than the engine process, so they are found by
        their environment. Then the temporary files are removed. Blocks: call it in a thread.
        """
        killed: set[int] = set()
        deadline = time.monotonic() + _WAIT_SECONDS
        # Again until there are none: one may have been starting another.
        while found := list(_marked(self._mark)):
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(found, timeout=max(0.0, deadline - time.monotonic()))
            killed.update(process.pid for process in found)
            if time.monotonic() >= deadline:
                break
        for folder in (self.temporary, folder_in_memory(self.temporary)):
            shutil.rmtree(folder, ignore_errors=True)
        self._lock.close()
        return sorted(killed)


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # gone meanwhile, or another user's
            if process.environ().get(_VARIABLE) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process


logger = logging.getLogger(__name__)
process_logger = logging.getLogger("djl_trtllm.executor.process")

_SOCKET_BUFFER = 64 * 1024
"""Bytes between engine process and server. It bounds how many iterations a slow server processes at once, and so how
long it blocks its event loop; measured with benchmarks/ceiling.py."""

_NO_MEMORY = re.compile(r"out of memory|OutOfMemory|cudaErrorMemoryAllocation|cannot allocate memory", re.IGNORECASE)
_MEMORY_ADVICE = (
    "\nmemory ran out while the engine was loaded: lower option.kv_cache_free_gpu_mem_fraction, option.max_num_tokens "
    "or option.max_rolling_batch_size, use more GPUs (option.tensor_parallel_degree), or end what else is on the GPU"
)

_TOGETHER_SECONDS = 0.001
"""How long messages wait for others while the event loop is busy: what it does are other requests, most likely."""
_QUIET_SECONDS = 0.00005
"""The longest turn of the event loop, in seconds, that counts as one without work."""
_IDLE_PING_SECONDS = 5.0
_TAIL_LINES = 20
_MOST_REASONS = 5


class ExecutorClient(asyncio.Protocol):
    """One engine process. It is used once: a dead process is replaced by a new client.

    `on_steps` gets the iterations that arrived together. `on_death` is called once, when a process ends after `start`
    has returned, for any other reason than `close`. Both run on the event loop. `busy` returns whether requests are
    unfinished: a process that is then silent for `hang_timeout` seconds, or does not answer a ping for as long, is
    killed.
    """

    def __init__(
        self,
        *,
        on_steps: Callable[[list[protocol.Step]], None],
        on_death: Callable[[ExecutorDiedError], None],
        busy: Callable[[], bool],
        hang_timeout: float,
    ) -> None:
        self.limits: protocol.Limits
        self.details: dict[str, Any] = {}
        self.features: frozenset[str] = frozenset()
        self.clock = time.perf_counter
        """Measures turns of the event loop, whose own clock may count milliseconds."""
        self._on_steps = on_steps
        self._on_death = on_death
        self._busy = busy
        self._hang_timeout = hang_timeout
        self._deframer = protocol.Deframer()
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[protocol.Ready] = self._loop.create_future()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.WriteTransport
        self._unsent: list[bytes] = []
        self._flushing = self._full = False
        self._process: asyncio.subprocess.Process
        self._log_task: asyncio.Task[None]
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._reasons_pattern: re.Pattern[str] | None = None
        self._reasons: list[str] = []
        """The first lines of the log that say why the load fails."""
        self._failure: str | None = None
        self._environment = ProcessEnvironment()
        self._started = self._closing = False
        self._pinged = False
        self._silent_for = 0.0
        self._idle_for = 0.0
        self._watchdog: asyncio.TimerHandle | None = None
        self._burial: asyncio.Task[None] | None = None
        self._oom_kills = oom_kills()
        self._out_of_memory = False
        """Whether the kernel has ended a process for lack of memory, perhaps a worker, since this one began."""

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(
        self, start: protocol.Start, timeout: float, *, meanwhile: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """Spawn the process and wait until its engine is loaded, at most `timeout` seconds.

        `meanwhile` is called when the process knows what to load, and awaited before the process is; an error that it
        raises ends the process. Raises ExecutorStartError.
        """
        self._reasons_pattern = re.compile(start.reasons) if start.reasons else None
        try:
            await self._spawn()
        except OSError as error:
            raise ExecutorStartError(f"the engine process could not be started: {error}") from error
        self._send(start)
        self._flush()  # `meanwhile` may keep the event loop from its next turn
        try:
            if meanwhile is not None:
                await meanwhile()
            ready = await self._loaded(timeout)
            if self._burial is not None:  # it has ended since it was ready
                await self._burial
                ready = await self._ready
        except BaseException:
            await self.kill()
            raise
        self.limits, self.details, self.features = ready.limits, ready.details, ready.features
        self._started = True
        self._watch()

    async def close(self, timeout: float = 5.0) -> None:
        """End the process, by force if it takes longer than `timeout` seconds."""
        self._closing = True
        self._send(protocol.Shutdown())
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._process.wait(), timeout)
        await self.kill()

    async def kill(self) -> None:
        """Kill the process and wait until nothing of it is left."""
        self._closing = True
        self._kill_process()
        await self._collect_process()
        self._transport.close()
        await self._gone
        if self._burial is not None:
            await self._burial
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # seen here, should nobody be waiting for it

    @property
    def pid(self) -> int:
        return self._process.pid

    def resident_bytes(self) -> int:
        """Resident memory of the process and its children, in bytes; 0 if it is gone. Takes milliseconds."""
        total = 0
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            for one in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    total += int(one.memory_info().rss)
        return total

    async def measure_memory(self) -> int:
        """Return `resident_bytes` without blocking the event loop."""
        return await self._loop.run_in_executor(None, self.resident_bytes)

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(self, request: protocol.Submit) -> None:
        """Start a sequence; its output arrives through `on_steps`."""
        self._send(request)

    def try_guide(self, trial: protocol.Try) -> None:
        """Begin the trial of a guide; its verdict arrives through `on_steps`."""
        self._send(trial)

    def cancel(self, request_id: int) -> None:
        self._send(protocol.Cancel(request_id))

    # -- asyncio.Protocol ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is one in all but name
        self._transport.set_write_buffer_limits(high=0)  # what the socket does not take, we keep

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._silent_for = 0.0
        self._pinged = False
        steps: list[protocol.Step] = []
        for body in self._deframer.feed(data):
            message = protocol.decode_from_engine(body)
            if isinstance(message, protocol.Step):
                steps.append(message)
            elif isinstance(message, protocol.Ready):
                self._reasons.clear()
                self._ready.set_result(message)
            elif isinstance(message, protocol.Failed):
                self._failure = message.message
        if steps:
            self._on_steps(steps)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._gone.set_result(None)
        if self._failure is None and exc is not None and not isinstance(exc, OSError):
            self._failure = f"its messages could not be handled: {type(exc).__name__}: {exc}"
        if not self._closing:
            self._burial = self._loop.create_task(self._bury())

    # -- inside ----------------------------------------------------------------------------------------------------

    async def _loaded(self, timeout: float) -> protocol.Ready:
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), timeout)
        except asyncio.TimeoutError:
            message = f"the engine was not loaded within {timeout:g} seconds (option.model_loading_timeout)"
            raise ExecutorStartError("\n".join([message, *self._quoted_reasons()])) from None

    async def _spawn(self) -> None:
        self._environment.prepare()
        ours, theirs = socket.socketpair()
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
            self._closing = True  # as long as there is no process whose end could be found out
            spawning = None
            try:
                # Before there is a process, so that at every later point `kill` has all it needs.
                await self._loop.create_connection(lambda: self, sock=ours)
                spawning = asyncio.ensure_future(self._create_process(theirs))
                self._process = await asyncio.shield(spawning)
            except BaseException:
                if spawning is not None:
                    self._transport.close()
                    # Cancelled half-way there would be a process that nobody waits for.
                    with contextlib.suppress(OSError):
                        process = await spawning
                        process.kill()
                        await process.communicate()
                await self._loop.run_in_executor(None, self._environment.clear)
                raise
            self._closing = False
        self._log_task = self._loop.create_task(self._forward_log())

    async def _create_process(self, theirs: socket.socket) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "djl_trtllm.executor.process",
            str(theirs.fileno()),
            pass_fds=[theirs.fileno()],
            env=self._environment.variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )

    def _send(self, message: protocol.ToEngine) -> None:
        """Send a message together with others that come soon, and with those for which the socket had no room.

        A write wakes the engine process, which takes as long as a tenth of a request. Each write also takes a buffer of
        the kernel, and a socket has room for some hundred: written one by one, thousands of cancellations would take
        dozens of iterations.
        """
        self._unsent.append(protocol.frame(message))
        if not self._flushing:
            self._flushing = True
            now = self.clock()
            self._loop.call_soon(self._flush_when_quiet, now, now + _TOGETHER_SECONDS)

    def _flush_when_quiet(self, before: float, until: float) -> None:
        """Send the waiting messages once the event loop has had a turn with little work, at `until` at the latest."""
        now = self.clock()
        if now - before < _QUIET_SECONDS or now >= until:
            self._flush()
        else:
            self._loop.call_soon(self._flush_when_quiet, now, until)

    def _flush(self) -> None:
        self._flushing = False
        if self._unsent and not self._full:
            unsent, self._unsent = self._unsent, []
            if not self._transport.is_closing():
                self._transport.write(b"".join(unsent))

    def _watch(self) -> None:
        """Measure the process's silence in ticks, so that a pause of the server itself is not silence."""
        tick = min(1.0, self._hang_timeout / 8)
        self._watchdog = self._loop.call_later(tick, self._watch)
        if self._busy() or self._pinged:
            self._idle_for = 0.0
            self._silent_for += tick
            if self._silent_for > self._hang_timeout:
                self._failure = f"silent for {self._hang_timeout:g} seconds (option.executor_hang_timeout)"
                self._kill_process()
                # Its death closes the connection, unless a child keeps it open.
                self._transport.abort()
        else:
            self._silent_for = 0.0
            self._idle_for += tick
            if self._idle_for > _IDLE_PING_SECONDS:
                self._idle_for = 0.0
                self._pinged = True
                self._send(protocol.Ping())

    def _kill_process(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _collect_process(self) -> None:
        await self._process.wait()
        if left := await self._loop.run_in_executor(None, self._environment.clear):
            logger.info("processes that the engine process left behind were killed: %s", ", ".join(map(str, left)))
        # A child may hold the pipe open longer than the engine process lives.
        await asyncio.wait({self._log_task}, timeout=1.0)
        self._log_task.cancel()

    async def _bury(self) -> None:
        """Find out why the process has closed its end of the connection, and report it."""
        # A process that is ending needs a moment; one that only closed its socket is of no use any more.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._process.wait(), 1.0)
        killed_itself = self._failure is None and self._process.returncode == -signal.SIGKILL
        self._out_of_memory = oom_kills() > self._oom_kills
        # Workers are children of others, such as MPI's daemon, so nobody says which signal has ended one.
        killed = killed_itself or self._out_of_memory
        self._kill_process()
        await self._collect_process()
        message = self._describe_end()
        if self._started:
            self._on_death(ExecutorDiedError(message, killed=killed))
            return
        if _NO_MEMORY.search(message):
            message += _MEMORY_ADVICE
        if self._ready.done():
            self._ready = self._loop.create_future()
        self._ready.set_exception(ExecutorStartError(message, killed=killed))

    def _find_reason(self, line: str) -> None:
        if self._ready.done() or self._reasons_pattern is None or len(self._reasons) == _MOST_REASONS:
            return
        if self._reasons_pattern.search(line):
            self._reasons.append(line)

    def _describe_end(self) -> str:
        status = self._process.returncode
        assert status is not None
        if self._failure is not None:
            cause = self._failure
        elif status < 0:
            name = signal.Signals(-status).name
            cause = f"it was killed by {name}"
            if status == -signal.SIGKILL:
                cause += " (the kernel does that when memory runs out)"
        else:
            cause = f"it exited with status {status}"
        if self._out_of_memory and status != -signal.SIGKILL:
            cause += " (the kernel has ended a process meanwhile because memory ran out)"
        lines = [f"the engine process (pid {self.pid}) is gone: {cause}"]
        # A process that reported why it ends has also printed a traceback, which is in the log.
        if self._tail and self._failure is None:
            lines += ["its last output:", *(f"  | {line}" for line in self._tail)]
        return "\n".join(lines + self._quoted_reasons())

    def _quoted_reasons(self) -> list[str]:
        return ["its log says why:", *(f"  | {line}" for line in self._reasons)] if self._reasons else []

    async def _forward_log(self) -> None:
        """Forward the process's output to the server's log; keep the last lines for the error."""
        stream = self._process.stdout
        assert stream is not None
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # a line longer than the reader's limit
                continue
            if not line:
                return
            request, text = protocol.split_mark(line.decode(errors="replace"))
            text = text.rstrip()
            self._tail.append(text)
            self._find_reason(text)
            process_logger.info("%s", text, extra=of_request(request) if request else None)
