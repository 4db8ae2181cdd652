"""TLS: the operator's certificate, and connections during their handshake.

A connection counts as idle during its handshake. asyncio itself reports a connection when its handshake is complete, so
that one which never completes it would be outside of all limits.
"""

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

from djl_trtllm.config import Options
from djl_trtllm.errors import ConfigError
from djl_trtllm.server.connections import Connections
from djl_trtllm.server.exchange import start_now

_NEEDS = {
    "certificate_file": "private_key_file",
    "private_key_file": "certificate_file",
    "client_ca_file": "certificate_file",
}


def tls_arguments(options: Options) -> dict[str, Any]:
    """uvicorn's arguments for TLS, none without a certificate. Raises ConfigError for files that cannot be used."""
    for name, needed in _NEEDS.items():
        if getattr(options, name) is not None and getattr(options, needed) is None:
            raise ConfigError([f"{name}={getattr(options, name)}: TLS needs {needed} as well"])
    certificate, key, authorities = options.certificate_file, options.private_key_file, options.client_ca_file
    if certificate is None or key is None:
        return {}
    for name in _NEEDS:
        _require_readable(name, getattr(options, name))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (ssl.SSLError, ValueError):
        raise ConfigError(
            [
                f"certificate_file={certificate}, private_key_file={key}: expected a certificate and its private key, "
                "in PEM and without a password"
            ]
        ) from None
    arguments: dict[str, Any] = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    if authorities is None:
        return arguments
    try:
        context.load_verify_locations(authorities)
    except ssl.SSLError:
        raise ConfigError([f"client_ca_file={authorities}: expected certificates in PEM"]) from None
    return {**arguments, "ssl_ca_certs": str(authorities), "ssl_cert_reqs": ssl.CERT_REQUIRED}


def _require_readable(name: str, path: Path | None) -> None:
    try:
        if path is not None:
            path.open("rb").close()
    except OSError as error:
        raise ConfigError([f"{name}={path}: cannot be read: {error.strerror}"]) from None


class Handshake(asyncio.Protocol):
    """A connection during its handshake; then the protocol that `make` returns takes its place."""

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
        # Run up to where it waits: a task would let the loop read before TLS begins.
        self._task = loop.create_task(self._shake(start_now(starting)))

    async def _shake(self, begun: Coroutine[Any, Any, asyncio.Transport | None] | None) -> None:
        assert begun is not None  # a handshake waits for its client
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
        """Keep bytes that come together with the end of the handshake."""
        self._early += data

    def expire(self) -> None:
        self.drop()

    def drop(self) -> None:
        self._connections.leave(self)
        self._transport.abort()
