"""An answer that is delivered by the test, and its client."""

from __future__ import annotations

import asyncio

from djl_trtllm.api import Call
from djl_trtllm.config import Options
from djl_trtllm.request import GenerationRequest, OutputChunk, Sampling
from djl_trtllm.server.exchange import CONNECTION, Exchange
from djl_trtllm.server.metrics import ServerCounts
from djl_trtllm.server.response_writer import ResponseWriter
from tests.support.asgi import Connection
from tests.support.word_encoder import WordEncoder

OPTIONS = Options(max_request_size=1000, stream_write_timeout=30.0)


class Answered:
    """A request whose answer is delivered by the test."""

    def __init__(self, encoder: WordEncoder | None = None, *, sequences: int = 1, extensions: bool = True) -> None:
        """Without `extensions` the ASGI server is another one than ours."""
        self.client = Connection("POST", "/invocations")
        if not extensions:
            del self.client.scope[CONNECTION]
        exchange = Exchange(self.client.scope, self.client.receive, self.client.send, OPTIONS, ServerCounts())
        self.encoder = encoder or WordEncoder()
        self.answer = ResponseWriter(Call((GenerationRequest(sampling=Sampling(n=sequences)),), self.encoder), exchange)
        self.task = self.answer.until_closed()

    def deliver(self, *chunks: OutputChunk) -> None:
        for each in chunks:
            self.answer.deliver(each)

    async def settle(self) -> None:
        """Let everything run that can."""
        await asyncio.sleep(0.001)

    async def sees(self, *parts: bytes, complete: bool) -> None:
        """What the client has seen in the end, and that nothing is left to be done."""
        await asyncio.wait_for(self.task, 1)
        assert (self.client.parts, self.client.complete) == (list(parts), complete)
