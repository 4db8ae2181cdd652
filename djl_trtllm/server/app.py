"""The server process: uvicorn with the application, its ports, and its banner, from start to SIGTERM.

With TLS, a connection counts as idle during its handshake. asyncio itself reports a connection only after its
handshake, so a connection that never completes it would escape all limits.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import shlex
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import uvicorn

from djl_trtllm.api.registry import DIALECTS
from djl_trtllm.config import Options
from djl_trtllm.config.options.choices import LogFormat, LogLevel
from djl_trtllm.errors import ConfigError
from djl_trtllm.logs import printable
from djl_trtllm.server.application import Application, Startup
from djl_trtllm.server.connections import Connections, has_unread, read_what_has_come
from djl_trtllm.server.context import ServerContext
from djl_trtllm.server.exchange import start_now
from djl_trtllm.server.http_protocol import HttpProtocol
from djl_trtllm.server.monitor import PAGE as MONITOR
from djl_trtllm.version import __version__

if TYPE_CHECKING:
    from djl_trtllm.server.grpc_front_end import GrpcServer


class Listener(NamedTuple):
    """A port to listen on. `option` has set it; `otherwise` completes the advice "set SERVING_..."."""

    host: str
    port: int
    option: str
    otherwise: str = " to another one or to 0 for none"


def further_listeners(options: Options) -> list[Listener]:
    """Return a listener for each port beside the server's own."""
    # Where options name the same port, the management API has it.
    names = [*(name for dialect in DIALECTS for name in reversed(dialect.ports)), "management_port"]
    ports = {getattr(options, name): name for name in names}
    return [
        Listener(options.management_host if name == "management_port" else options.host, port, name)
        for port, name in sorted(ports.items())
        if port not in (0, options.port)
    ]


async def bind(
    options: Options, protocol: Callable[[], asyncio.Protocol], backlog: int
) -> list[asyncio.base_events.Server]:
    """Take all ports; connections wait until `start_serving`. Raises ConfigError, with none open, if one is in use."""
    servers: list[asyncio.base_events.Server] = []
    loop = asyncio.get_running_loop()
    own = Listener(options.host, options.port, "inference_port", " or --port to another one")
    for host, port, name, otherwise in (own, *further_listeners(options)):
        try:
            server = await loop.create_server(protocol, host, port, backlog=backlog, start_serving=False)
        except OSError as error:
            for opened in servers:
                opened.close()
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigError(
                f"{name}={port}: cannot listen on {host}:{port}: {reason}; end the program that uses the port, or "
                f"set SERVING_{name.upper()}{otherwise}"
            ) from None
        servers.append(server)
    return servers


def bind_grpc(context: ServerContext) -> list[GrpcServer]:
    """Take the ports of the dialects' gRPC services, if grpcio is there. Raises ConfigError if one is in use."""
    servers: list[GrpcServer] = []
    for dialect in DIALECTS:
        option = dialect.rpc_port
        port: int = getattr(context.options, option) if option else 0
        if not port:
            continue
        if importlib.util.find_spec("grpc") is None:
            logger.warning(
                "%s=%d is not served: grpcio is not installed, so there is HTTP only; pip install 'djl-trtllm[grpc]', "
                "or set SERVING_%s=0",
                option,
                port,
                option.upper(),
            )
            continue
        # gRPC's library writes to standard error itself, beside the log; every program that is started makes it say so.
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        from djl_trtllm.server.grpc_front_end import GrpcServer

        server = GrpcServer(context, dialect, port)
        server.bind()
        servers.append(server)
    return servers


_EVERYWHERE = ("0.0.0.0", "::", "")  # noqa: S104
_BODY = '{"inputs": "Once upon a time", "parameters": {"max_new_tokens": 64}, "stream": true}'


def banner(url: str, models: Sequence[str], pages: Sequence[tuple[str, str]], *, key: bool) -> str:
    """Return the banner's lines. `pages` are names and paths; with `key`, requests need an API key."""
    path = "/invocations" if len(models) == 1 else f"/predictions/{models[0]}"
    headers = ["-H 'Content-Type: application/json'", *(['-H "Authorization: Bearer $KEY"'] if key else [])]
    curl = " ".join(["curl -N", shlex.quote(url + path), *headers, "-d", shlex.quote(_BODY)])
    rows = [("address", url), *((name, url + place) for name, place in pages), ("try", curl)]
    lines = [f"djl-trtllm {__version__} serves {', '.join(models)}", *(f"  {name:<8} {text}" for name, text in rows)]
    return printable("\n".join(lines))


def address(scheme: str, host: str, port: int) -> str:
    """The server's address for a client on the same machine."""
    if host in _EVERYWHERE:
        host = "localhost"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 2
"""How long connections may take to send their last bytes after every request has ended."""


class Server(uvicorn.Server):
    """Runs the application, bounds its connections, and listens on its other ports.

    On SIGTERM it refuses new requests at once, and running ones get `shutdown_timeout` seconds to end.
    `exit_status` is the exit status for the process.
    """

    def __init__(self, options: Options, startup: Sequence[Startup], store: Path | None) -> None:
        self.exit_status = 0
        self.application = Application(
            options, startup, store, on_failed=partial(self._exit, 1), on_ready=self._show_banner
        )
        self._options = options
        self._port = options.port
        self._grpc: list[GrpcServer] = []
        self._interrupted = False
        self._deadlines: asyncio.Task[None] | None = None
        self._drained: asyncio.Task[None] | None = None
        self._connections = Connections(self.application.context)
        super().__init__(
            uvicorn.Config(
                self.application,
                host=options.host,
                port=options.port,
                ws_max_size=options.max_request_size,
                # A small compressed message may be a large one.
                ws_per_message_deflate=False,
                log_config=None,
                # Its lines about its start and end would stand behind the reason of a failed start.
                log_level=None if options.log_level is LogLevel.DEBUG else logging.WARNING,
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=_FLUSH_SECONDS,
                server_header=False,
                forwarded_allow_ips=self.application.context.clients.proxies,
                **tls_arguments(options),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the server's own port and on those of `further_listeners`."""
        self._connections.reserve_descriptors()
        self._deadlines = asyncio.create_task(self._connections.watch())
        config = self.config

        def http() -> asyncio.Protocol:
            return HttpProtocol(self._connections, config, self.server_state)

        def https() -> asyncio.Protocol:
            assert config.ssl is not None
            return Handshake(self._connections, config.ssl, http)

        try:
            # Before a model is prepared, so that this reason of a failed start is the last line.
            servers = await bind(self._options, http if config.ssl is None else https, config.backlog)
            self._grpc = bind_grpc(self.application.context)
        except ConfigError as error:
            logger.error("%s", error)
            self._exit(1)
            return
        await super().startup([] if sockets is None else sockets)
        if self.should_exit:  # a model has failed already
            return
        for server in servers:
            await server.start_serving()
        self.servers += servers
        scheme = "http" if config.ssl is None else "https"
        self._port = servers[0].sockets[0].getsockname()[1]  # the system's choice for port 0
        logger.info("listening on %s://%s:%d", scheme, self._options.host, self._port)
        for further in further_listeners(self._options):
            logger.info("listening on %s://%s:%d as well (%s)", scheme, *further[:3])
        for service in self._grpc:
            await service.start()
            logger.info("listening on %s:%d for gRPC (%s)", self._options.host, service.bound_port, service.option)

    def _show_banner(self) -> None:
        """Show the server's address to the person who started it on a terminal."""
        if not sys.stderr.isatty() or self._options.log_format is LogFormat.JSON:
            return
        scheme = "http" if self._options.certificate_file is None else "https"
        pages = [("docs", "/docs")]
        monitor = self.application.monitor
        if monitor.shown:
            pages.insert(0, ("page", f"{MONITOR}#{monitor.key}" if monitor.key else MONITOR))
        where = address(scheme, self._options.host, self._port)
        context = self.application.context
        text = banner(where, list(context.registry.models), pages, key=bool(context.access.keys))
        # A terminal that is stopped would stop the event loop.
        threading.Thread(target=print, args=(text,), kwargs={"file": sys.stderr}, name="banner", daemon=True).start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Its streams have no end of their own.
        self.application.monitor.close()
        if not self.force_exit:
            await self._close_grpc()
            # Requests that have come are refused; a close before they are read would be a reset.
            await read_what_has_come()
        await super().shutdown(sockets)
        if self._deadlines is not None:
            self._deadlines.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or SIGINT: refuse new requests, wait for the others, stop uvicorn. A second SIGINT stops at once."""
        loop = self.application.loop
        if loop is None:
            super().handle_exit(sig, frame)
        elif self._interrupted and sig == signal.SIGINT:
            self.should_exit = self.force_exit = True
        else:
            self._interrupted |= sig == signal.SIGINT
            # A signal handler runs between any two bytecodes, so the rest runs on the event loop.
            loop.call_soon_threadsafe(self._drain, signal.Signals(sig).name)

    def _drain(self, reason: str) -> None:
        if self._drained is None:
            logger.info("%s: refusing new requests, ending running ones", reason)
            # Before the next request is read.
            self.application.refuse_new()
            self._drained = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        await self.application.drain()
        await self._close_grpc()
        self.should_exit = True

    async def _close_grpc(self) -> None:
        for server in self._grpc:
            await server.close()

    def _exit(self, status: int) -> None:
        self.exit_status = status
        self.should_exit = True


def run(options: Options, startup: Sequence[Startup], store: Path | None = None) -> int:
    """Serve until a signal. Returns the exit status."""
    server = Server(options, startup, store)
    server.run()
    return server.exit_status


_NEEDS = {
    "certificate_file": "private_key_file",
    "private_key_file": "certificate_file",
    "client_ca_file": "certificate_file",
}


def tls_arguments(options: Options) -> dict[str, Any]:
    """uvicorn's arguments for TLS, none without a certificate. Raises ConfigError for files that cannot be used."""
    for name, needed in _NEEDS.items():
        if getattr(options, name) is not None and getattr(options, needed) is None:
            raise ConfigError(f"{name}={getattr(options, name)}: TLS needs {needed} as well")
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
            f"certificate_file={certificate}, private_key_file={key}: expected a certificate and its private key, "
            "in PEM and without a password"
        ) from None
    arguments: dict[str, Any] = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    if authorities is None:
        return arguments
    try:
        context.load_verify_locations(authorities)
    except ssl.SSLError:
        raise ConfigError(f"client_ca_file={authorities}: expected certificates in PEM") from None
    return {**arguments, "ssl_ca_certs": str(authorities), "ssl_cert_reqs": ssl.CERT_REQUIRED}


def _require_readable(name: str, path: Path | None) -> None:
    try:
        if path is not None:
            path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"{name}={path}: cannot be read: {error.strerror}") from None


class Handshake(asyncio.Protocol):
    """A connection during its handshake; then the protocol that `make` returns takes its place."""

    def __init__(self, connections: Connections, context: ssl.SSLContext, make: Callable[[], asyncio.Protocol]) -> None:
        self.deadline: float
        self._connections = connections
        self._context = context
        self._make = make
        self._early = b""
        self._transport: asyncio.Transport
        self._task: asyncio.Task[None]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        loop = asyncio.get_running_loop()
        # The connection that is idle longest has the earliest deadline. `start_tls` enforces the deadline of the
        # handshake.
        self.deadline = self._connections.now() + self._connections.options.keep_alive_timeout
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

    def has_unread(self) -> bool:
        return has_unread(self._transport)

    def drop(self) -> None:
        self._connections.leave(self)
        self._transport.abort()
