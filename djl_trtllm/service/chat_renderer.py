"""Has chat templates rendered in a process of their own, which is given up if it takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from djl_trtllm.errors import InvalidRequestError, NotReadyError
from djl_trtllm.model import Tokenizer
from djl_trtllm.model.chat_process import LENGTH_BYTES, RENDERED, framed

logger = logging.getLogger(__name__)

_MODULE = "djl_trtllm.model.chat_process"
_START_SECONDS = 60.0
_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "HOME", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Of the environment: a template has no use for secrets."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """A conversation that was sent, and who waits for its prompt."""

    message: bytes
    prompt: asyncio.Future[str]


class ChatRenderer:
    """Renders one conversation after the other. The process is started by the first one.

    All methods run on the event loop. `timeout` is the time of one conversation, without its waiting.
    """

    def __init__(self, tokenizer: Tokenizer, timeout: float, *, module: str = _MODULE) -> None:
        self._templates = framed(pickle.dumps(tokenizer.chat_templates))
        self._timeout = timeout
        self._module = module
        self._waiting: deque[_Waiting] = deque()
        self._process: _Process | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def render(self, messages: Sequence[Mapping[str, Any]], keywords: Mapping[str, Any]) -> str:
        """The prompt of a conversation. Raises InvalidRequestError."""
        try:
            message = framed(pickle.dumps((list(messages), dict(keywords))))
        except Exception as error:  # made by a model directory's own formatter, or nested too deep
            raise InvalidRequestError(f"the messages are no JSON: {type(error).__name__}: {error}") from error
        waiting = _Waiting(message, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._process is None:
            self._start()
        else:
            self._process.write(message)
            if len(self._waiting) == 1 and self._process.ready:
                self._watch(self._timeout)
        return await waiting.prompt

    async def close(self) -> None:
        """End the process; who still waits gets an error."""
        self._give_up()
        while self._waiting:
            _settle(self._waiting.popleft(), NotReadyError("the model was shut down"))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- for the process -------------------------------------------------------------------------------------------

    def received(self, process: _Process, response: bytes) -> None:
        """A response: the first one says that the process is ready."""
        if process is not self._process:
            return
        if not process.ready:
            process.ready = True
        elif self._waiting:
            text = response[1:].decode("utf-8", "surrogatepass")
            _settle(self._waiting.popleft(), text if response[:1] == RENDERED else InvalidRequestError(text))
        self._watch(self._timeout)

    def lost(self, process: _Process) -> None:
        """The process has ended."""
        if process is self._process:
            self._fail("its process has ended, as one does that takes too much memory")

    # -- inside ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        process = self._process = _Process(self)
        self._watch(_START_SECONDS)
        self._in_background(self._run(process))

    async def _run(self, process: _Process) -> None:
        """Start the process, and wait for its end."""
        try:
            await process.start(self._module)
        except OSError as error:
            if process is self._process:
                self._fail(f"its process cannot be started ({error})")
            return
        if process is self._process:
            process.write(self._templates)
            for waiting in self._waiting:
                process.write(waiting.message)
        else:
            process.end()  # it was given up meanwhile
        await process.wait()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _watch(self, seconds: float) -> None:
        """Give the first conversation that waits this time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            late = f"it takes longer than chat_template_timeout={self._timeout:g} seconds"
            self._timer = asyncio.get_running_loop().call_later(seconds, self._fail, late)

    def _fail(self, problem: str) -> None:
        """The first conversation has no prompt; the others get a new process."""
        self._give_up()
        if self._waiting:
            logger.warning("a chat template was given up: %s", problem)
            error = InvalidRequestError(f"the model's chat template failed on these messages: {problem}")
            _settle(self._waiting.popleft(), error)
        while self._waiting and self._waiting[0].prompt.done():
            self._waiting.popleft()  # its client has left
        if self._waiting:
            self._start()

    def _give_up(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        process, self._process = self._process, None
        if process is not None:
            process.end()


class _Process(asyncio.Protocol):
    """One process and the connection to it."""

    def __init__(self, owner: ChatRenderer) -> None:
        self._owner = owner
        self._popen: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self.ready = False

    async def start(self, module: str) -> None:
        """Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                # Forking takes milliseconds.
                self._popen = await asyncio.to_thread(_popen, module, theirs.fileno())
            self._transport, _ = await asyncio.get_running_loop().create_connection(lambda: self, sock=ours)
        except BaseException:
            ours.close()
            raise

    def write(self, message: bytes) -> None:
        """Send a message. One that comes before the process is started is sent by who starts it."""
        if self._transport is not None:
            self._transport.write(message)

    def end(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        if self._popen is not None:
            self._popen.kill()

    async def wait(self) -> None:
        """Until the process has ended."""
        assert self._popen is not None
        await asyncio.to_thread(self._popen.wait)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._received[:LENGTH_BYTES], "big")
            if len(self._received) < end:
                return
            response = bytes(self._received[LENGTH_BYTES:end])
            del self._received[:end]
            self._owner.received(self, response)

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.lost(self)


def _popen(module: str, descriptor: int) -> subprocess.Popen[bytes]:
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-m", module, str(descriptor)],
        pass_fds=(descriptor,),
        stdin=subprocess.DEVNULL,
        env=environment,
    )


def _settle(waiting: _Waiting, outcome: str | Exception) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):  # its client has left
        if isinstance(outcome, str):
            waiting.prompt.set_result(outcome)
        else:
            waiting.prompt.set_exception(outcome)
