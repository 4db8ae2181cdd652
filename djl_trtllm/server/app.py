"""The server process: uvicorn with the routes and the models, from start to SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, cast

import uvicorn
from starlette.routing import Router
from starlette.types import ASGIApp

from djl_trtllm.batching.statistics import Histogram
from djl_trtllm.config import Options
from djl_trtllm.errors import ConfigError, DjlTrtllmError
from djl_trtllm.model.work_directory import sweep_temporary_directories
from djl_trtllm.server.access import read_access
from djl_trtllm.server.bidirectional import BidirectionalStreams
from djl_trtllm.server.body_memory import BodyMemory
from djl_trtllm.server.connections import Connections
from djl_trtllm.server.http_protocol import HttpProtocol
from djl_trtllm.server.listeners import further_listeners, listen
from djl_trtllm.server.metrics import MetricsPage, ServerCounts
from djl_trtllm.server.model_routes import ModelRoutes
from djl_trtllm.server.routes import Routes
from djl_trtllm.server.session_requests import SessionRequests
from djl_trtllm.server.tls import tls_arguments
from djl_trtllm.server.triton_ports import listen_grpc, ready_table
from djl_trtllm.service import Model, Registry, ServedModel, settle_garbage_collector
from djl_trtllm.service.sessions import open_sessions

if TYPE_CHECKING:
    from djl_trtllm.server.triton_grpc import TritonGrpcServer

logger = logging.getLogger(__name__)

_STALL_TICK_SECONDS = 0.02
_SWITCH_SECONDS = 0.001
_FLUSH_SECONDS = 2
"""How long connections may take to send their last bytes after every request has ended."""


class Startup(NamedTuple):
    name: str
    source: str
    prepare: Callable[[], Model]


class Server(uvicorn.Server):
    """Serves the models of its start, prepared in threads while /ping returns 503, and those of a model store.

    On SIGTERM it refuses new requests at once, and running ones get `shutdown_timeout` seconds to end.
    `exit_status` is the exit status for the process.
    """

    def __init__(self, options: Options, startup: Sequence[Startup], store: Path | None) -> None:
        self.exit_status = 0
        self._options = options
        self._access = read_access(options)
        self._startup = startup
        self._registry = Registry()
        for model in startup:
            self._registry.add(ServedModel(model.name, model.source, on_failed=self._model_failed))
        self._models = ModelRoutes(self._registry, store, options.shutdown_timeout)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._grpc: TritonGrpcServer | None = None
        self._interrupted = False
        self._loading: asyncio.Task[None] | None = None
        self._drained: asyncio.Task[None] | None = None
        self._stall = Histogram()
        self._counts = ServerCounts()
        self._bodies = BodyMemory(options.max_body_memory)
        self._connections = Connections(options, self._counts, self._bodies)
        super().__init__(
            uvicorn.Config(
                self._application(),
                host=options.host,
                port=options.port,
                http=cast(type[asyncio.Protocol], partial(HttpProtocol, self._connections)),
                ws="auto",
                ws_max_size=options.max_request_size,
                # A small compressed message may be a large one.
                ws_per_message_deflate=False,
                log_config=None,
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=_FLUSH_SECONDS,
                timeout_keep_alive=ceil(options.keep_alive_timeout),
                server_header=False,
                **tls_arguments(options),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the server's own port and on those for clients of Triton."""
        self._connections.reserve_descriptors()
        await super().startup([] if sockets is None else sockets)
        config = self.config

        def protocol() -> asyncio.Protocol:
            return HttpProtocol(
                self._connections, config=config, server_state=self.server_state, app_state=self.lifespan.state
            )

        try:
            self.servers += await listen(self._options, protocol, config.backlog, config.ssl)
            self._grpc = await listen_grpc(self._registry, self._options, self._counts, self._access)
        except ConfigError as error:
            logger.error("%s", error)
            self._exit(1)
            return
        scheme = "http" if config.ssl is None else "https"
        logger.info("listening on %s://%s:%d", scheme, self._options.host, self._options.port)
        for further in further_listeners(self._options):
            logger.info("listening on %s://%s:%d as well (%s)", scheme, *further[:3])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or SIGINT: refuse new requests, wait for the others, stop uvicorn. A second SIGINT stops at once."""
        if self._loop is None:
            super().handle_exit(sig, frame)
        elif self._interrupted and sig == signal.SIGINT:
            self.should_exit = self.force_exit = True
        else:
            self._interrupted |= sig == signal.SIGINT
            # A signal handler runs between any two bytecodes, so the rest runs on the event loop.
            self._loop.call_soon_threadsafe(self._drain, signal.Signals(sig).name)

    def _drain(self, reason: str) -> None:
        if self._drained is None:
            logger.info("%s: refusing new requests, ending running ones", reason)
            for model in self._registry.models.values():
                model.refuse_new()
            self._drained = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        assert self._loading is not None
        self._loading.cancel()
        await self._models.close()
        await asyncio.gather(*(model.end(self._options.shutdown_timeout) for model in self._registry.models.values()))
        await self._close_grpc()
        self.should_exit = True

    async def _close_grpc(self) -> None:
        if self._grpc is not None:
            await self._grpc.close()

    def _application(self) -> ASGIApp:
        metrics = MetricsPage(self._registry, self._counts, self._stall)
        sessions = SessionRequests(open_sessions(self._options))
        routes = Routes(
            self._registry, self._models, self._options, metrics, self._counts, sessions, self._bodies, self._access
        )
        return BidirectionalStreams(
            routes.router(self._lifespan), self._options.max_request_size, self._bodies, self._access
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Router) -> AsyncIterator[None]:
        self._loading = asyncio.create_task(self._load())
        monitor = asyncio.create_task(self._watch_stalls())
        deadlines = asyncio.create_task(self._connections.watch())
        self._loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            await self._close_grpc()
            for task in (monitor, deadlines, self._loading):
                task.cancel()
            await asyncio.gather(self._loading, monitor, deadlines, self._models.close(), return_exceptions=True)
            await asyncio.gather(*(model.close() for model in self._registry.models.values()))

    async def _load(self) -> None:
        """Load the models one after the other: compiling needs all the memory."""
        for startup in self._startup:
            model = self._registry.models[startup.name]
            try:
                await model.load(startup.prepare)
                if table := ready_table(model.model.directory):
                    logger.info("models of %s:\n%s", startup.source, table)
            except DjlTrtllmError:
                self._exit(1)
            except Exception:
                logger.exception("loading model %s failed", startup.name)
                self._exit(1)
        # Not for models registered later: frozen objects are not collected when such a model is unregistered.
        settle_garbage_collector()

    async def _watch_stalls(self) -> None:
        """Measure how late the event loop runs a timer: everything else waits as long."""
        now = asyncio.get_running_loop().time
        while True:
            due = now() + _STALL_TICK_SECONDS
            await asyncio.sleep(_STALL_TICK_SECONDS)
            self._stall.observe(max(0.0, now() - due))

    def _model_failed(self, error: DjlTrtllmError) -> None:
        if self._options.fail_fast:
            self._exit(1)

    def _exit(self, status: int) -> None:
        self.exit_status = status
        self.should_exit = True


def run(options: Options, startup: Sequence[Startup], store: Path | None = None) -> int:
    """Serve until a signal. Returns the exit status."""
    server = Server(options, startup, store)
    # Worker threads that read requests hold the GIL, and the event loop waits for it as long as this.
    sys.setswitchinterval(_SWITCH_SECONDS)
    threading.Thread(target=sweep_temporary_directories, name="sweep", daemon=True).start()
    server.run()
    return server.exit_status
