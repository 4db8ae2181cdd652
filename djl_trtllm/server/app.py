"""The server process: uvicorn with the application, from start to SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from functools import partial
from math import ceil
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, cast

import uvicorn

from djl_trtllm.config import Options
from djl_trtllm.config.options.choices import LogFormat
from djl_trtllm.errors import ConfigError
from djl_trtllm.server.application import Application
from djl_trtllm.server.banner import address, banner
from djl_trtllm.server.connections import Connections
from djl_trtllm.server.handshake import Handshake
from djl_trtllm.server.http_protocol import HttpProtocol
from djl_trtllm.server.listeners import further_listeners, listen
from djl_trtllm.server.monitor.routes import PAGE as MONITOR
from djl_trtllm.server.startup import Startup
from djl_trtllm.server.tls import tls_arguments
from djl_trtllm.server.triton_ports import listen_grpc
from djl_trtllm.server.websocket_protocol import WebSocketProtocol

if TYPE_CHECKING:
    from djl_trtllm.server.triton_grpc import TritonGrpcServer

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
        self._grpc: TritonGrpcServer | None = None
        self._interrupted = False
        self._deadlines: asyncio.Task[None] | None = None
        self._drained: asyncio.Task[None] | None = None
        self._connections = Connections(self.application.context)
        super().__init__(
            uvicorn.Config(
                self.application,
                host=options.host,
                port=options.port,
                http=cast(type[asyncio.Protocol], partial(HttpProtocol, self._connections)),
                ws=cast(type[asyncio.Protocol], partial(WebSocketProtocol, self._connections)),
                ws_max_size=options.max_request_size,
                # A small compressed message may be a large one.
                ws_per_message_deflate=False,
                log_config=None,
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=_FLUSH_SECONDS,
                timeout_keep_alive=ceil(options.keep_alive_timeout),
                server_header=False,
                forwarded_allow_ips=self.application.context.clients.proxies,
                **tls_arguments(options),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the server's own port and on those for clients of Triton."""
        self._connections.reserve_descriptors()
        self._deadlines = asyncio.create_task(self._connections.watch())
        await super().startup([] if sockets is None else sockets)
        config = self.config

        def http() -> asyncio.Protocol:
            return HttpProtocol(
                self._connections, config=config, server_state=self.server_state, app_state=self.lifespan.state
            )

        def https() -> asyncio.Protocol:
            assert config.ssl is not None
            return Handshake(self._connections, config.ssl, http)

        try:
            self.servers += await listen(self._options, http if config.ssl is None else https, config.backlog)
            self._grpc = await listen_grpc(self.application.context)
        except ConfigError as error:
            logger.error("%s", error)
            self._exit(1)
            return
        scheme = "http" if config.ssl is None else "https"
        logger.info("listening on %s://%s:%d", scheme, self._options.host, self._options.port)
        for further in further_listeners(self._options):
            logger.info("listening on %s://%s:%d as well (%s)", scheme, *further[:3])

    def _show_banner(self) -> None:
        """Where the server is, for the person who started it on a terminal."""
        if not sys.stderr.isatty() or self._options.log_format is LogFormat.JSON:
            return
        scheme = "http" if self._options.certificate_file is None else "https"
        pages = [("docs", "/docs")]
        if self._options.monitor is not False:  # by default it is there for clients of this machine
            pages.insert(0, ("page", MONITOR))
        where = address(scheme, self._options.host, self._options.port)
        context = self.application.context
        text = banner(where, list(context.registry.models), pages, key=bool(context.access.keys))
        # A terminal that is stopped would stop the event loop.
        threading.Thread(target=print, args=(text,), kwargs={"file": sys.stderr}, name="banner", daemon=True).start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Its streams have no end of their own.
        self.application.monitor.close()
        if not self.force_exit:
            await self._close_grpc()
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
        if self._grpc is not None:
            await self._grpc.close()

    def _exit(self, status: int) -> None:
        self.exit_status = status
        self.should_exit = True


def run(options: Options, startup: Sequence[Startup], store: Path | None = None) -> int:
    """Serve until a signal. Returns the exit status."""
    server = Server(options, startup, store)
    server.run()
    return server.exit_status
