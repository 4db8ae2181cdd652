"""The server process: one uvicorn with the routes in front of the models, from start to SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import FrameType
from typing import TypeVar

import uvicorn
from starlette.routing import Router
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from djl_trtllm.api.errors import StatusCodes
from djl_trtllm.batching.statistics import Histogram
from djl_trtllm.config import Options
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.server.exchange import ABORT, HttpSettings
from djl_trtllm.server.metrics import MetricsPage, ServerCounts
from djl_trtllm.server.routes import Routes
from djl_trtllm.service import Model, ModelService, Registry, settle_garbage_collector

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STALL_TICK_SECONDS = 0.02
_FLUSH_SECONDS = 2
"""How long connections may take to send what has been answered, once every request has ended."""


class _HttpProtocol(HttpToolsProtocol):
    """uvicorn's, with the extension that drops a connection."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"call": self.transport.abort}}


class Server(uvicorn.Server):
    """Serves one model, `prepare`d in a thread while /ping answers 503.

    On SIGTERM new requests are refused at once, running streams get `shutdown_timeout` seconds to end.
    `exit_status` is what the process should end with.
    """

    def __init__(self, name: str, options: Options, prepare: Callable[[], Model]) -> None:
        self.exit_status = 0
        self._options = options
        self._prepare = prepare
        self._service = ModelService(name, on_failed=self._model_failed)
        self._registry = Registry()
        self._registry.add(self._service)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._interrupted = False
        self._loading: asyncio.Task[None] | None = None
        self._drained: asyncio.Task[None] | None = None
        self._stall = Histogram()
        super().__init__(
            uvicorn.Config(
                self._application(),
                host=options.host,
                port=options.port,
                http=_HttpProtocol,
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=_FLUSH_SECONDS,
                server_header=False,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or SIGINT: refuse new requests, then let uvicorn end what is open. A second SIGINT is immediate."""
        if self._loop is None:
            super().handle_exit(sig, frame)
        elif self._interrupted and sig == signal.SIGINT:
            self.should_exit = self.force_exit = True
        else:
            self._interrupted |= sig == signal.SIGINT
            # A signal handler runs between any two bytecodes: the loop's own turn is the place for the rest.
            self._loop.call_soon_threadsafe(self._drain, signal.Signals(sig).name)

    def _drain(self, reason: str) -> None:
        if self._drained is None:
            logger.info("%s: refusing new requests, ending running ones", reason)
            self._service.refuse_new()
            self._drained = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        assert self._loading is not None
        self._loading.cancel()
        await self._service.drain(self._options.shutdown_timeout)
        await self._service.close()
        self.should_exit = True

    def _application(self) -> ASGIApp:
        options = self._options
        counts = ServerCounts()
        settings = HttpSettings(
            max_request_size=options.max_request_size,
            stream_write_timeout=options.stream_write_timeout,
            request_id_header=options.request_id_header_key,
            codes=StatusCodes(
                throttle=options.throttle_error_http_code,
                not_ready=options.wlm_error_http_code,
                timeout=options.timeout_http_code,
                server_error=options.server_error_http_code,
            ),
        )
        metrics = MetricsPage(self._registry, counts, self._stall)
        return Routes(self._registry, settings, metrics, counts).router(self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Router) -> AsyncIterator[None]:
        self._loading = asyncio.create_task(self._load())
        monitor = asyncio.create_task(self._watch_stalls())
        self._loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            monitor.cancel()
            self._loading.cancel()
            await asyncio.gather(self._loading, monitor, return_exceptions=True)
            await self._service.close()

    async def _load(self) -> None:
        try:
            model = await _in_background(self._prepare)
            await self._service.load(model)
            settle_garbage_collector()
        except DjlTrtllmError as error:
            if self._service.failure is None:
                self._service.fail(error)
            self._exit(1)
        except Exception:
            logger.exception("loading the model failed")
            self._exit(1)

    async def _watch_stalls(self) -> None:
        """How late the event loop runs a timer is how long everything else has to wait."""
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


async def _in_background(work: Callable[[], T]) -> T:
    """Run `work` in a thread that the end of the process does not wait for: compiling takes minutes."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(settler: Callable[[], None]) -> None:
        if not outcome.done():
            settler()

    def run() -> None:
        try:
            settler = partial(outcome.set_result, work())
        except BaseException as error:
            settler = partial(outcome.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, settler)

    threading.Thread(target=run, name="prepare", daemon=True).start()
    return await outcome


def run(name: str, options: Options, prepare: Callable[[], Model]) -> int:
    """Serve until a signal ends it; the process's exit status."""
    server = Server(name, options, prepare)
    server.run()
    return server.exit_status
