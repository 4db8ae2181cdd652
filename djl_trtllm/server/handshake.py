"""A connection during its TLS handshake, which counts as any other that is idle.

asyncio itself reports a connection when its handshake is complete: what never completes one would be outside of all
limits.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine, Generator
from typing import Any, cast

from djl_trtllm.server.connections import Connections


class Handshake(asyncio.Protocol):
    """Becomes a connection of the protocol that `make` returns."""

    def __init__(self, connections: Connections, context: ssl.SSLContext, make: Callable[[], asyncio.Protocol]) -> None:
        self.deadline = 0.0
        self._connections = connections
        self._context = context
        self._make = make
        self._early = b""
        self._transport: asyncio.Transport
        self._task: asyncio.Task[None]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        loop = asyncio.get_running_loop()
        # Of idle connections the one that is so longest has the earliest deadline. `start_tls` enforces that of the
        # handshake.
        self.deadline = loop.time() + self._connections.options.keep_alive_timeout
        self._connections.enter(self)
        seconds = self._connections.options.header_read_timeout
        starting = loop.start_tls(self._transport, self, self._context, server_side=True, ssl_handshake_timeout=seconds)
        self._task = loop.create_task(self._shake(_Begun(starting)))

    async def _shake(self, begun: _Begun) -> None:
        secured: asyncio.Transport | None = None
        try:
            secured = await begun
        except OSError:
            self._transport.abort()  # the errors of TLS are among these
        finally:
            self._connections.leave(self)
        if secured is not None:  # its client is still there
            protocol = self._make()
            secured.set_protocol(protocol)
            protocol.connection_made(secured)
            if self._early:
                protocol.data_received(self._early)

    def data_received(self, data: bytes) -> None:
        """What comes together with the end of the handshake."""
        self._early += data

    def expire(self) -> None:
        self.drop()

    def drop(self) -> None:
        self._connections.leave(self)
        self._transport.abort()


class _Begun:
    """A coroutine that has run up to where it waits: a task would let the loop read before TLS begins."""

    def __init__(self, coroutine: Coroutine[Any, Any, asyncio.Transport | None]) -> None:
        self._coroutine = coroutine
        self._waits_for = coroutine.send(None)

    def __await__(self) -> Generator[Any, None, asyncio.Transport | None]:
        try:
            yield self._waits_for
        except BaseException:
            self._coroutine.close()
            raise
        return (yield from self._coroutine.__await__())
