"""The process that owns an engine: `python -m djl_trtllm.executor.process FD`.

FD is this process's end of a Unix socket pair. The process ends when the server closes its end, so it never outlives
the server.
"""

import asyncio
import contextlib
import gc
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn, Protocol, TextIO, cast

import uvloop

from djl_trtllm.engines.hardware import apply_bound
from djl_trtllm.executor import protocol
from djl_trtllm.executor.kernels import keep_kernels
from djl_trtllm.logs import RequestContext, current_request_id
from djl_trtllm.processes import compiler_below, leave_end_to_parent

_LAST_WORD_SECONDS = 1.0
_REST_SECONDS = 0.05
"""Seconds to wait for the rest of a message, which comes as soon as the socket has room."""
_SIGN_OF_LIFE_SECONDS = 1.0
"""A busy process whose iterations produce no token (a long prefill in chunks) sends an empty step this often."""

_WARM_UP_LINE_SECONDS = 10.0
_CHECK_SECONDS = 0.5
_UNWINDING_SECONDS = 1.0


class AnyExecutor(Protocol):
    """An engine with an in-flight batching scheduler. The constructor loads it and takes `Start.options`.

    It promises:

    - `submit` never fails; an error arrives as the request's end.
    - Steps carry new tokens only, in order.
    - Every request gets exactly one end. Its sequence slot and KV cache blocks are free once that end is sent, not
      before. This holds for cancelled requests too: their end comes late.
    - While a request is unfinished the engine process sends a `Step` at least every few seconds; it answers `Ping`
      between two steps. An engine process that is silent for longer is hung.
    """

    limits: protocol.Limits
    details: dict[str, Any]
    features: frozenset[str]

    def submit(self, request: protocol.Submit) -> None:
        """Start a request; an error becomes its end."""

    def cancel(self, request_id: int) -> None:
        """End a request or a trial early; unknown ids are ignored. Its end comes later."""

    def stats(self) -> protocol.Stats:
        """The state after the last iteration."""


class GuideTrier(Protocol):
    """An executor with `limits.tries_guides`."""

    def try_guide(self, trial: protocol.Try) -> None:
        """Begin to try a guide; the verdict becomes the trial's end."""


class Executor(AnyExecutor, Protocol):
    """An engine whose iterations this process runs.

    It may have the `check` of `AsyncExecutor`: an iteration that waits for the engine's other processes may not notice
    that one has ended.
    """

    @property
    def busy(self) -> bool:
        """Return whether `step` has something to do."""

    def step(self) -> protocol.Step:
        """Run one iteration; its output, without stats.

        An exception means that the engine is lost.
        """


class AsyncExecutor(AnyExecutor, Protocol):
    """An engine that runs its own iterations. All methods but `check` run on the event loop."""

    def first_requests(self) -> list[protocol.FirstRequest]:
        """Return the requests that the engine gets, one after the other, before it is ready."""

    async def run(self, step_buffer: "StepBuffer") -> None:
        """Put what the engine generates into the step_buffer. It begins before the first request is submitted.

        An exception means that the engine is lost.
        """

    def check(self) -> None:
        """Raise if the engine is lost. Runs in a thread: the event loop may be waiting for that very engine."""

    async def close(self) -> None:
        """Shut the engine down, within seconds."""


class Disconnected(Exception):
    """The server closed its end of the socket."""


class Channel:
    """The engine process's end of the socket. A send blocks while the server is slow, and raises Disconnected if it is
    gone; reads are cut into messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._deframer = protocol.Deframer()
        self._bodies: deque[bytes] = deque()
        self._sending = threading.Lock()
        # Not select.select: it takes no descriptor above 1023, and a server with many connections passes such on.
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: protocol.FromEngine) -> None:
        unsent = memoryview(protocol.frame(message))
        with self._sending:
            try:
                while unsent:
                    try:
                        unsent = unsent[self._socket.send(unsent) :]
                    except BlockingIOError:  # an event loop that reads from a socket makes it non-blocking
                        self._writable.poll()
            except OSError as error:
                raise Disconnected from error

    def send_last(self, message: protocol.FromEngine) -> None:
        """Send before the process ends, from any thread; given up after a second."""
        if self._sending.acquire(timeout=_LAST_WORD_SECONDS):
            with contextlib.suppress(OSError):
                self._socket.settimeout(_LAST_WORD_SECONDS)
                self._socket.sendall(protocol.frame(message))

    def receive(self, *, block: bool, rest: bool = False) -> Iterator[protocol.ToEngine]:
        """All messages that have arrived; with `block`, waits for at least one. Messages that are not taken come the
        next time.

        With `rest`, waits a moment for the rest of a message that has begun: the server may send more than a socket
        holds, and otherwise each iteration would get one socketful.
        """
        bodies = self._bodies
        while bodies or self._readable.poll(self._patience(block=block, rest=rest)):
            if not bodies:
                try:
                    data = self._socket.recv(1 << 18)
                except ConnectionResetError as error:  # it went with something of ours unread
                    raise Disconnected from error
                if not data:
                    raise Disconnected
                bodies.extend(self._deframer.feed(data))
            while bodies:
                block = False
                yield protocol.decode_to_engine(bodies.popleft())

    def _patience(self, *, block: bool, rest: bool) -> float | None:
        """Return the milliseconds to wait for more messages."""
        if block:
            return None
        return 1000 * _REST_SECONDS if rest and self._deframer.inside_message else 0


class HeldOutput:
    """Holds output back until `iterations` have run and `seconds` have gone by, and merges it for each sequence.

    The beginning of a sequence is sent at once, because a client waits for it, and so is its end, which frees its
    place.
    """

    def __init__(self, iterations: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._iterations = iterations
        self._seconds = seconds
        self._clock = clock
        self._held: dict[int, protocol.Step] = {}
        """The held output of each request."""
        self._begun: set[int] = set()
        self._waited = 0
        self._sent_all_at = clock()

    def add(self, step: protocol.Step) -> protocol.Step:
        """Take the output of an iteration; returns what is to be sent after it."""
        if self._iterations == 1 and not self._seconds:
            return step
        for row in step.rows():
            self._held.setdefault(row[0], protocol.Step()).add(*row)
        for request_id, tokens in step.accepted.items():
            held = self._held.setdefault(request_id, protocol.Step())
            held.accepted[request_id] = held.accepted.get(request_id, 0) + tokens
        ended = {end.request_id for end in step.ends}
        self._waited += 1
        if self._waited >= self._iterations and self._clock() - self._sent_all_at >= self._seconds:
            sent = self.take_all()
        else:
            sent = self._take([each for each in self._held if each in ended or each not in self._begun])
        self._begun.update(step.ids)
        self._begun -= ended
        sent.ends, sent.cached, sent.prompts, sent.vectors = step.ends, step.cached, step.prompts, step.vectors
        return sent

    def take_all(self) -> protocol.Step:
        """Return the output that is held back, to be sent now."""
        self._waited, self._sent_all_at = 0, self._clock()
        return self._take(list(self._held))

    def _take(self, request_ids: Iterable[int]) -> protocol.Step:
        taken = protocol.Step()
        for request_id in request_ids:
            held = self._held.pop(request_id)
            taken.add(request_id, held.tokens, held.logprobs)
            taken.accepted |= held.accepted
        return taken


class StepBuffer:
    """Collects output, and sends it when the tasks that are awake have had their turn.

    However many tasks an engine's iteration wakes, and however large a backlog each finds, it becomes one `Step`.
    `send` may block while the server is slow, and with it the loop. Must be made on the loop.
    """

    def __init__(self, send: Callable[[protocol.Step], None], stats: Callable[[], protocol.Stats]) -> None:
        self.sent = 0
        """Messages so far."""
        self._send = send
        self._stats = stats
        self._loop = asyncio.get_running_loop()
        self._step = protocol.Step()
        self._scheduled = False

    @property
    def step(self) -> protocol.Step:
        """The step that collects output until the end of this wake-up, when it is sent."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._end_wake_up)
        return self._step

    def flush(self) -> None:
        """Send now, also where there is nothing new: a sign of life."""
        step, self._step = self._step, protocol.Step()
        step.stats = self._stats()
        self._send(step)
        self.sent += 1

    def _end_wake_up(self) -> None:
        self._scheduled = False
        if self._step.has_news:
            self.flush()


class MarkedOutput:
    """Standard output or standard error that marks each line which belongs to a request."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._at_line_start = True

    def write(self, text: str) -> int:
        mark = protocol.mark_of(current_request_id())
        inside = text.count("\n") - text.endswith("\n")
        begin = mark if self._at_line_start else ""
        if text:
            self._stream.write(begin + text.replace("\n", "\n" + mark, inside))
            self._at_line_start = text.endswith("\n")
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def create(start: protocol.Start) -> Any:
    """Load the executor that `start` names."""
    if start.kernels:
        keep_kernels(Path(start.kernels))
    return resolve_name(start.executor)(**start.options)


def _take(message: protocol.ToEngine, channel: Channel, executor: AnyExecutor) -> bool:
    """Handle a message. False if it is the last one."""
    match message:
        case protocol.Submit():
            with RequestContext(message.origin):
                executor.submit(message)
        case protocol.Try():
            with RequestContext(message.origin):
                cast(GuideTrier, executor).try_guide(message)
        case protocol.Cancel():
            executor.cancel(message.request_id)
        case protocol.Ping():
            channel.send(protocol.Pong())
        case _:
            return False
    return True


def run(channel: Channel, executor: Executor, held: HeldOutput) -> None:
    """Handle messages, run one iteration, send what is not held back; block only when there is nothing to run."""
    last_sent = time.monotonic()
    while True:
        prompts = False
        for message in channel.receive(block=not executor.busy, rest=True):
            if not _take(message, channel, executor):
                return
            prompts |= isinstance(message, protocol.Submit)
        # An iteration that reads a prompt may take many times as long as one that does not.
        if prompts and (waiting := held.take_all()).has_news:
            waiting.stats = executor.stats()
            channel.send(waiting)
            last_sent = time.monotonic()
        if executor.busy:
            step = held.add(executor.step())
            if step.has_news or time.monotonic() - last_sent > _SIGN_OF_LIFE_SECONDS:
                step = step if step.has_news else held.take_all()
                step.stats = executor.stats()
                channel.send(step)
                last_sent = time.monotonic()


class WarmUp:
    """The time before the engine is ready, in which it answers requests of this process and none of the server's."""

    def __init__(self, executor: AsyncExecutor, send: Callable[[protocol.Step], None]) -> None:
        self.is_over = False
        self.lost: frozenset[str] = frozenset()
        """The features of requests that have failed."""
        self._executor = executor
        self._send = send
        self._ends: asyncio.Queue[protocol.End] = asyncio.Queue()

    def send(self, step: protocol.Step) -> None:
        """Give each request of the warm-up its part of the engine's output."""
        if self.is_over:
            return self._send(step)
        for end in step.ends:
            self._ends.put_nowait(end)

    async def run(self) -> None:
        """Send the first requests, one after the other. Raises if one fails that any client may send."""
        for first in self._executor.first_requests():
            began = time.monotonic()
            self._executor.submit(first.request)
            for _ in range(first.request.sampling.beam_width):
                error = (await self._end(first.kind, began)).error
            self.lost |= first.lost_by(error, time.monotonic() - began)

    async def _end(self, kind: str, began: float) -> protocol.End:
        """Return the next end. The log says what takes long, with the compiler that it may wait for."""
        end = asyncio.ensure_future(self._ends.get())
        while not (await asyncio.wait({end}, timeout=_WARM_UP_LINE_SECONDS))[0]:
            compiler = compiler_below()
            cause = f"{compiler} compiles kernels for it" if compiler else "it has no answer yet"
            print(f"warming up: {kind} takes {time.monotonic() - began:.0f} s so far, {cause}", flush=True)
        return end.result()


def run_async(channel: Channel, executor: AsyncExecutor) -> None:
    """Handle messages as they arrive and send the engine's output, on one event loop."""
    # Not uvloop.run: it would wait for tasks and threads that wait for an engine which is gone.
    with contextlib.closing(uvloop.new_event_loop()) as loop:
        loop.run_until_complete(_serve(channel, executor))


async def _serve(channel: Channel, executor: AsyncExecutor) -> None:
    ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def end(error: Exception | None) -> None:
        if not ended.done():
            ended.set_result(error)

    def read() -> None:
        try:
            for message in channel.receive(block=False):
                if not _take(message, channel, executor):
                    end(None)
        except Exception as error:
            end(error)

    def send(step: protocol.Step) -> None:
        try:
            channel.send(step)
        except Disconnected as error:
            end(error)

    loop = asyncio.get_running_loop()
    over = threading.Event()
    warm_up = WarmUp(executor, send)
    running = loop.create_task(executor.run(StepBuffer(warm_up.send, executor.stats)))
    await asyncio.sleep(0)  # it runs before there are requests
    threading.Thread(target=_watch, args=(channel, executor, loop, end, over), name="engine-watch", daemon=True).start()
    loop.add_reader(channel.fileno(), read)
    warming = loop.create_task(warm_up.run())
    try:
        either: set[asyncio.Future[Any]] = {ended, running}
        await asyncio.wait({*either, warming}, return_when=asyncio.FIRST_COMPLETED)
        if warming.done():
            warming.result()
            channel.send(_settled(executor, warm_up.lost))
            warm_up.is_over = True
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        over.set()
        if running.done():
            running.result()
        if ended.done() and (error := ended.result()) is not None:
            raise error
        await executor.close()
    finally:
        warming.cancel()
        running.cancel()


def _settled(executor: AnyExecutor, lost: frozenset[str] = frozenset()) -> protocol.Ready:
    """Return `Ready`, and freeze what is loaded: the garbage collector need not scan it again and again."""
    gc.collect()
    gc.freeze()
    return protocol.Ready(executor.limits, executor.details, executor.features - lost)


def _watch(
    channel: Channel,
    executor: AsyncExecutor,
    loop: asyncio.AbstractEventLoop,
    end: Callable[[Exception], None],
    over: threading.Event,
) -> None:
    """Check the engine until `over`. If the event loop does not react to a loss, the process ends without it."""
    while not over.wait(_CHECK_SECONDS):
        try:
            executor.check()
        except Exception as error:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(end, error)
            if not over.wait(_UNWINDING_SECONDS):
                _fail(channel, error)
            return


def _guard(channel: Channel, executor: AsyncExecutor) -> NoReturn:
    """Check the engine until it is lost; then the process ends, although an iteration may still run."""
    while True:
        time.sleep(_CHECK_SECONDS)
        try:
            executor.check()
        except Exception as error:
            _fail(channel, error)


def _fail(channel: Channel, error: Exception) -> NoReturn:
    """End the process and report the reason to the server."""
    traceback.print_exception(error)
    channel.send_last(protocol.Failed(_described(error)))
    _exit(1)


def _described(error: BaseException) -> str:
    """Return an error's text with its cause: a library's own error often says only that there was one."""
    message = f"{type(error).__name__}: {error}"
    return message if error.__cause__ is None else f"{message} (caused by {_described(error.__cause__)})"


def _exit(status: int) -> NoReturn:
    """End the process at once: what an engine has registered for the end may wait for its workers for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> NoReturn:
    """Run until the server is gone (status 0) or the engine is lost (1)."""
    leave_end_to_parent()
    apply_bound()
    # What this process prints for a request is marked from now on.
    sys.stdout, sys.stderr = (cast(TextIO, MarkedOutput(stream)) for stream in (sys.stdout, sys.stderr))
    connection = socket.socket(fileno=int(sys.argv[1]))
    # A process that an engine forks would keep the connection open, and the server would not see the end of this one.
    os.register_at_fork(after_in_child=connection.close)
    channel = Channel(connection)
    try:
        start = next(channel.receive(block=True))
        assert isinstance(start, protocol.Start), f"expected Start, got {start!r}"
        gc.set_threshold(50_000, 20, 50)
        executor = create(start)
        if hasattr(executor, "run"):
            run_async(channel, executor)
        else:
            if hasattr(executor, "check"):
                threading.Thread(target=_guard, args=(channel, executor), name="engine-watch", daemon=True).start()
            channel.send(_settled(executor))
            run(channel, executor, HeldOutput(start.stream_interval, start.send_interval))
    except Disconnected:
        pass
    except Exception as error:
        _fail(channel, error)
    _exit(0)


if __name__ == "__main__":
    main()
