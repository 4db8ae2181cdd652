"""Renders the chat templates of requests, which are programs, in a process that may be ended.

The event loop itself reads and writes the process's connection: a thread that waits for each conversation would take
several times as long as all else that a chat costs besides its tokens.
"""

import asyncio
import logging
import math
import os
import pickle
import struct
import subprocess
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from functools import partial
from typing import Any, NamedTuple

from djl_trtllm.errors import DjlTrtllmError, InvalidRequestError, NotReadyError
from djl_trtllm.logs import current_request_id, of_request
from djl_trtllm.model import Tokenizer, chat_template
from djl_trtllm.service.work import LONG_WORK, answer_of, start_calls

logger = logging.getLogger(__name__)

_START_SECONDS = 60.0
_MEMORY = 1024**3
"""Bytes that rendering may take."""
_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "HOME", "VIRTUAL_ENV")
"""The variables that the rendering process gets: a template has no use for secrets."""
_TURNS = 4
"""Turns of the event loop in which an answer is read that has come."""
_LENGTH = struct.Struct("!i")
_LONG_LENGTH = struct.Struct("!Q")
"""The head of a message of `multiprocessing.connection`: its length, or -1 and the length of a long message."""


class RenderingProcess:
    """A process of `serve_calls`, for the event loop: one call after the other."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._late: asyncio.Handle

    @classmethod
    async def start(cls, seconds: int) -> "RenderingProcess":
        """Start a process whose calls may take this processor time each. Raises OSError."""
        environ = {name: os.environ[name] for name in _KEPT if name in os.environ}
        starting = partial(
            start_calls, "rendering a chat", seconds=seconds, memory=_MEMORY, niceness=0, environ=environ
        )
        process, ours = await LONG_WORK.run(starting)
        return cls(process, *await asyncio.open_connection(sock=ours))

    async def call(self, seconds: float, work: Callable[[], Any]) -> Any:
        """The result of `work` in the process, or the error that it raises there.

        Otherwise TimeoutError after `seconds`, or EOFError or ConnectionError if the process has ended: it takes no
        other call then.
        """
        message = pickle.dumps(work)
        self._late = self._loop.call_later(seconds, self._end_late, _TURNS)
        try:
            self._writer.write(_LENGTH.pack(len(message)) + message)
            # Lines of the log come before the answer. What is read is of this program, not of the template.
            while (result := answer_of(pickle.loads(await self._message()))) is None:  # noqa: S301
                pass
            return result()
        finally:
            self._late.cancel()

    def kill(self) -> None:
        """End the process; a call that runs raises EOFError."""
        self._process.kill()

    async def close(self) -> None:
        """End the process, and wait for its end."""
        self.kill()
        self._writer.transport.abort()
        await LONG_WORK.run(self._process.wait)

    async def _message(self) -> bytes:
        (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        if length < 0:
            (length,) = _LONG_LENGTH.unpack(await self._reader.readexactly(_LONG_LENGTH.size))
        return await self._reader.readexactly(length)

    def _end_late(self, turns: int) -> None:
        """Give the call up, `turns` of the event loop later: a timer may run before what came in time is read."""
        if turns:
            self._late = self._loop.call_soon(self._end_late, turns - 1)
        else:
            self._reader.set_exception(TimeoutError())


class Conversation(NamedTuple):
    """Messages and keywords, pickled, and the id of the request."""

    content: bytes
    request_id: str


class ChatRenderer:
    """Renders one conversation after the other, in a process that the first one starts.

    All methods run on the event loop. `timeout` is the time of one conversation, without its waiting.
    """

    def __init__(self, tokenizer: Tokenizer, timeout: float) -> None:
        self._templates = tokenizer.chat_templates
        self._timeout = timeout
        self._waiting: OrderedDict[asyncio.Future[str], Conversation] = OrderedDict()
        """The conversations that wait, by the future of their prompt."""
        self._rendering: asyncio.Task[None] | None = None
        """The task that renders while conversations wait."""
        self._process: RenderingProcess | None = None
        self._closed = False

    def render(self, messages: Sequence[Mapping[str, Any]], keywords: Mapping[str, Any]) -> "asyncio.Future[str]":
        """The prompt of a conversation. Raises InvalidRequestError, and so does what is returned."""
        try:
            content = pickle.dumps((list(messages), dict(keywords)))
        except Exception as error:  # made by a model directory's own formatter, or nested too deep
            raise InvalidRequestError(f"the messages are not JSON: {type(error).__name__}: {error}") from error
        loop = asyncio.get_running_loop()
        prompt: asyncio.Future[str] = loop.create_future()
        self._waiting[prompt] = Conversation(content, current_request_id())
        prompt.add_done_callback(self._leave)
        if self._rendering is None or self._rendering.done():
            # It goes on for other requests than this one.
            self._rendering = Context().run(loop.create_task, self._render_all())
        return prompt

    def _leave(self, prompt: "asyncio.Future[str]") -> None:
        """Forget a conversation whose client has left: its bytes count as those of a request no more."""
        self._waiting.pop(prompt, None)

    async def close(self) -> None:
        """End the process; conversations that still wait get an error."""
        self._closed = True
        if self._process is not None:
            self._process.kill()
        if self._rendering is not None:
            await asyncio.wait({self._rendering})
        await self._end_process()

    async def _render_all(self) -> None:
        while self._waiting:
            prompt, conversation = self._waiting.popitem(last=False)
            if prompt.done():  # the client has left in this turn of the event loop
                continue
            try:
                text = await self._rendered(conversation)
            except Exception as error:
                if not prompt.done():
                    prompt.set_exception(error)
            else:
                if not prompt.done():
                    prompt.set_result(text)

    async def _rendered(self, conversation: Conversation) -> str:
        """Have a conversation rendered. Where that fails, the next one gets a new process.

        A process may end while it is idle, for example by the kernel when memory is short. Then this conversation gets
        a new process, once.
        """
        self._require_open()
        kept = self._process is not None
        late = f"its process did not start within {_START_SECONDS:g} seconds"
        try:
            process = self._process or await self._start()
            self._require_open()  # `close` has not seen a process that began meanwhile
            late = f"it takes longer than chat_template_timeout={self._timeout:g} seconds"
            text: str = await process.call(self._timeout, partial(chat_template.render, conversation.content))
            return text
        except InvalidRequestError:
            raise
        except DjlTrtllmError as error:
            problem = str(error)
        except TimeoutError:
            problem = late
        except (EOFError, ConnectionError):
            if kept:
                await self._end_process()
                return await self._rendered(conversation)
            problem = "its process has ended, probably because it took too much memory"
        except OSError as error:
            problem = f"its process cannot be started ({error})"
        await self._end_process()
        self._require_open()
        extra = of_request(conversation.request_id) if conversation.request_id else {}
        logger.warning("a chat template was given up: %s", problem, extra=extra)
        raise InvalidRequestError(f"the model's chat template failed on these messages: {problem}")

    async def _start(self) -> RenderingProcess:
        process = self._process = await RenderingProcess.start(math.ceil(self._timeout) + 1)
        await process.call(_START_SECONDS, partial(chat_template.prepare, *self._templates))
        return process

    def _require_open(self) -> None:
        if self._closed:
            raise NotReadyError("the model was shut down", retry_after=1)

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.close()
