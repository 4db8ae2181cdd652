"""An answer that is delivered by the test, and its client."""

from __future__ import annotations

import asyncio

from djl_trtllm.api import Prompt
from djl_trtllm.api.errors import StatusCodes
from djl_trtllm.batching import Finished, FinishReason, Token, Update
from djl_trtllm.errors import RequestError
from djl_trtllm.server.answer import Answer
from djl_trtllm.server.exchange import Exchange, HttpSettings
from djl_trtllm.server.metrics import ServerCounts
from tests.support.asgi import Connection

SETTINGS = HttpSettings(1000, 30.0, "x-request-id", StatusCodes())


def update(text: str = "", *, ends: bool = False, error: RequestError | None = None, index: int = 0) -> Update:
    reason = FinishReason.LENGTH if error is None else FinishReason.ERROR
    finished = Finished(reason, 1, None, None, error=error) if ends or error is not None else None
    return Update(index, [Token(5, text, None, False)] if text else [], finished)


class WordFramer:
    """The texts, and `.` at the end; `!` is how an answer ends that cannot go on."""

    content_type = "text/words"
    wants_prompt_tokens = False

    def __init__(self, *, stream: bool = True, last: bytes = b"!") -> None:
        self.stream = stream
        self.failure: Exception | None = None
        self._last = last
        self._text = ""

    def begin(self, prompt: Prompt) -> None:
        pass

    def frame(self, update: Update) -> bytes:
        if self.failure is not None:
            raise self.failure
        self._text += "".join(token.text for token in update.tokens)
        if update.finished is not None:
            self._text += "." if update.finished.error is None else "?"
        if not self.stream and update.finished is None:
            return b""
        text, self._text = self._text, ""
        return text.encode()

    def error(self, error: RequestError) -> bytes:
        assert isinstance(error, RequestError)
        return self._last


class Answered:
    """A request whose answer is delivered by the test."""

    def __init__(self, framer: WordFramer | None = None, *, sequences: int = 1) -> None:
        self.client = Connection("POST", "/invocations")
        exchange = Exchange(self.client.scope, self.client.receive, self.client.send, SETTINGS, ServerCounts())
        self.framer = framer or WordFramer()
        self.answer = Answer(self.framer, exchange, sequences=sequences)
        self.task = asyncio.ensure_future(self.answer.wait())

    def deliver(self, *updates: Update) -> None:
        for each in updates:
            self.answer.deliver(each)

    async def settle(self) -> None:
        """Let everything run that can."""
        await asyncio.sleep(0.001)

    async def sees(self, *parts: bytes, complete: bool) -> None:
        """What the client has seen in the end, and that nothing is left to be done."""
        await asyncio.wait_for(self.task, 1)
        assert (self.client.parts, self.client.complete) == (list(parts), complete)
