"""An answer that is delivered by the test, and its client."""

from __future__ import annotations

import asyncio

from djl_trtllm.api.errors import StatusCodes
from djl_trtllm.batching import Update
from djl_trtllm.server.answer import Answer
from djl_trtllm.server.exchange import Exchange, HttpSettings
from djl_trtllm.server.metrics import ServerCounts
from tests.support.asgi import Connection
from tests.support.word_framer import WordFramer

SETTINGS = HttpSettings(1000, 30.0, "x-request-id", StatusCodes())


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
