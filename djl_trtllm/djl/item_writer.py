"""Writes the response to one request as items."""

from __future__ import annotations

import logging
from collections.abc import Callable

from djl_trtllm.api import Call, ResponseEncoder
from djl_trtllm.api.registry import DEFAULT
from djl_trtllm.config import Options
from djl_trtllm.djl.item import Item
from djl_trtllm.errors import RequestError
from djl_trtllm.logs import of_request
from djl_trtllm.request import OutputChunk
from djl_trtllm.telemetry import ServedRequest
from djl_trtllm.telemetry.served_request import Asked

logger = logging.getLogger(__name__)

_OK = 200


class ItemWriter:
    """Encodes the output of one request and emits items; exactly one of them is the last, and has no data.

    `served` is the request; `ended` is called with it after that.
    """

    def __init__(
        self,
        put: Callable[[Item], None],
        options: Options,
        served: ServedRequest,
        ended: Callable[[ServedRequest], None],
    ) -> None:
        self._served = served
        self._ended = ended
        self.complete = False
        self._put = put
        self._options = options
        self._encoder: ResponseEncoder | None = None
        self._headers: tuple[tuple[str, str], ...] = ()
        self._unfinished: int
        self._begun = False

    def expect(self, call: Call) -> None:
        """Call when the request is parsed: its encoder makes the response from now on."""
        self._served.asked = Asked.of(call.requests[0])
        self._encoder = call.encoder
        self._headers = call.headers
        self._unfinished = call.sequences

    def deliver(self, chunk: OutputChunk) -> None:
        if self.complete:
            return
        assert self._encoder is not None
        finished = chunk.finished
        if finished is not None:
            self._unfinished -= 1
            if finished.error is not None and not self._begun:
                self.fail(finished.error)
                return
        try:
            data = self._encoder.encode(chunk)
        except Exception as error:
            self.fail(error)
            return
        last = not self._unfinished
        if data or last:
            self._send(data, last)

    def fail(self, error: Exception) -> None:
        """End the response with an error: a status if nothing was sent yet, else in the dialect's format."""
        if self.complete:
            return
        if not isinstance(error, RequestError):
            logger.error("a request failed", exc_info=error, extra=of_request(self._served.id))
        self._served.error = type(error).__name__
        encoder = self._encoder if self._begun else None
        if encoder is not None and isinstance(error, RequestError) and (data := encoder.error(error)):
            self._send(data, last=True)
            return
        reply = DEFAULT.encode_error(error, self._options)
        self._complete(reply.status)
        message = str(error) if isinstance(error, RequestError) else "Internal server error, see the server's log."
        self._put(Item(b"", True, reply.status, message, (("Content-Type", "application/json"), *reply.headers)))

    def _complete(self, status: int) -> None:
        self.complete = True
        self._served.status = status
        self._ended(self._served)

    def _send(self, data: bytes, last: bool) -> None:
        assert self._encoder is not None
        properties = () if self._begun else (("Content-Type", self._encoder.content_type), *self._headers)
        self._begun = True
        if last:
            self._complete(_OK)
        if data:
            self._put(Item(data, False, None, "", properties))
            properties = ()
        if last:
            self._put(Item(b"", True, None, "", properties))
