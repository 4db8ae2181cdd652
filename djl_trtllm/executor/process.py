"""The process that owns an engine: `python -m djl_trtllm.executor.process FD`.

FD is this process's end of a Unix socket pair. The process ends when the server closes its end, so it never outlives
the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn, Protocol

import uvloop

from djl_trtllm.child_process import leave_end_to_parent
from djl_trtllm.engines.memory_bound import apply_bound
from djl_trtllm.executor.channel import Channel, Disconnected
from djl_trtllm.executor.held_output import HeldOutput
from djl_trtllm.executor.protocol import (
    Cancel,
    Delta,
    Failed,
    Limits,
    Ping,
    Pong,
    Ready,
    Start,
    Stats,
    Step,
    Submit,
    ToEngine,
)
from djl_trtllm.executor.request_lines import mark_output, printing_for
from djl_trtllm.executor.step_buffer import StepBuffer

_SIGN_OF_LIFE_SECONDS = 1.0
"""A busy process whose iterations produce no token (a long prefill in chunks) sends an empty step this often."""

_CHECK_SECONDS = 0.5
_UNWINDING_SECONDS = 1.0


class AnyExecutor(Protocol):
    """An engine with an in-flight batching scheduler. The constructor loads it and takes `Start.options`."""

    limits: Limits
    details: dict[str, Any]
    features: frozenset[str]

    def submit(self, request: Submit) -> None:
        """Start a request; an error becomes its terminal delta."""

    def cancel(self, request_id: int) -> None:
        """End a request early; unknown ids are ignored. Its terminal delta comes later."""

    def stats(self) -> Stats:
        """The state after the last iteration."""


class Executor(AnyExecutor, Protocol):
    """An engine whose iterations this process runs."""

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""

    def step(self) -> list[Delta]:
        """Run one iteration. An exception means that the engine is lost."""


class AsyncExecutor(AnyExecutor, Protocol):
    """An engine that iterates itself. All methods but `check` run on the event loop."""

    async def run(self, step_buffer: StepBuffer) -> None:
        """Put what the engine generates into the step_buffer. It begins before the first request is submitted.

        An exception means that the engine is lost.
        """

    def check(self) -> None:
        """Raise if the engine is lost. Runs in a thread: the event loop may be waiting for that very engine."""

    async def close(self) -> None:
        """Shut the engine down, within seconds."""


def create(start: Start) -> Any:
    """Load the executor that `start` names."""
    module, _, name = start.executor.partition(":")
    return getattr(import_module(module), name)(**start.options)


def _take(message: ToEngine, channel: Channel, executor: AnyExecutor) -> bool:
    """Handle a message. False if it is the last one."""
    match message:
        case Submit():
            with printing_for(message.origin):
                executor.submit(message)
        case Cancel():
            executor.cancel(message.request_id)
        case Ping():
            channel.send(Pong())
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
            prompts |= isinstance(message, Submit)
        if prompts and (waiting := held.take_all()):
            # An iteration that reads a prompt may take many times as long as one that does not.
            channel.send(Step(waiting, executor.stats()))
            last_sent = time.monotonic()
        if executor.busy:
            deltas = held.add(executor.step())
            if deltas or time.monotonic() - last_sent > _SIGN_OF_LIFE_SECONDS:
                channel.send(Step(deltas or held.take_all(), executor.stats()))
                last_sent = time.monotonic()


def run_async(channel: Channel, executor: AsyncExecutor) -> None:
    """Handle messages as they arrive and send the engine's output, on one event loop."""
    # Not uvloop.run: it would wait for tasks and threads that wait for an engine which is gone.
    with contextlib.closing(uvloop.new_event_loop()) as loop:
        loop.run_until_complete(_serve(channel, executor))


async def _serve(channel: Channel, executor: AsyncExecutor) -> None:
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(error: Exception | None) -> None:
        if ended.done():
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    def read() -> None:
        try:
            for message in channel.receive(block=False):
                if not _take(message, channel, executor):
                    end(None)
        except Exception as error:
            end(error)

    def send(step: Step) -> None:
        try:
            channel.send(step)
        except Disconnected as error:
            end(error)

    loop = asyncio.get_running_loop()
    over = threading.Event()
    running = loop.create_task(executor.run(StepBuffer(send, executor.stats)))
    await asyncio.sleep(0)  # it runs before there are requests
    threading.Thread(target=_watch, args=(channel, executor, loop, end, over), name="engine-watch", daemon=True).start()
    loop.add_reader(channel.fileno(), read)
    try:
        done, _ = await asyncio.wait({ended, running}, return_when=asyncio.FIRST_COMPLETED)
        over.set()
        for future in done:
            future.result()
        await executor.close()
    finally:
        running.cancel()


def _watch(
    channel: Channel,
    executor: AsyncExecutor,
    loop: asyncio.AbstractEventLoop,
    end: Callable[[Exception], None],
    over: threading.Event,
) -> None:
    """Check the engine until `over`. An event loop that does not react to its loss is left where it hangs."""
    while not over.wait(_CHECK_SECONDS):
        try:
            executor.check()
        except Exception as error:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(end, error)
            if not over.wait(_UNWINDING_SECONDS):
                _fail(channel, error)
            return


def _fail(channel: Channel, error: Exception) -> NoReturn:
    """End the process and report the reason to the server."""
    traceback.print_exception(error)
    channel.send_last(Failed(_described(error)))
    _exit(1)


def _described(error: BaseException) -> str:
    """With what caused it: a library's own error often says only that there was one."""
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
    mark_output()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        start = next(channel.receive(block=True))
        assert isinstance(start, Start), f"expected Start, got {start!r}"
        # What the engine's library loads stays; the collector need not scan it again and again.
        gc.set_threshold(50_000, 20, 50)
        executor = create(start)
        gc.collect()
        gc.freeze()
        channel.send(Ready(executor.limits, executor.details, executor.features))
        if hasattr(executor, "run"):
            run_async(channel, executor)
        else:
            run(channel, executor, HeldOutput(start.stream_interval, start.send_interval))
    except Disconnected:
        pass
    except Exception as error:
        _fail(channel, error)
    _exit(0)


if __name__ == "__main__":
    main()
