"""The ASGI application: the routes over the models, which its lifespan loads and ends. Any ASGI server can run it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from starlette.types import Receive, Scope, Send

from djl_trtllm.batching.statistics import Histogram
from djl_trtllm.config import Options
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.model.work_directory import sweep_temporary_directories
from djl_trtllm.server.bidirectional import BidirectionalStreams
from djl_trtllm.server.context import ServerContext
from djl_trtllm.server.metrics import MetricsPage
from djl_trtllm.server.model_routes import ModelRoutes
from djl_trtllm.server.routes import Routes
from djl_trtllm.server.session_requests import SessionRequests
from djl_trtllm.server.startup import Startup
from djl_trtllm.server.triton_ports import ready_table
from djl_trtllm.service import ServedModel, State, settle_garbage_collector
from djl_trtllm.service.sessions import open_sessions

logger = logging.getLogger(__name__)

_STALL_TICK_SECONDS = 0.02
_SWITCH_SECONDS = 0.001


class Application:
    """An ASGI application that serves the models of its start, and those of a model store.

    Its lifespan loads the models, one after the other, in threads. Requests are answered meanwhile: /ping returns 503
    until all are ready. With `wait_until_ready` the lifespan's start ends only then, and fails if a model does. At its
    end, new requests are refused and running ones get `shutdown_timeout` seconds.

    `on_failed` is called when a model does not load, and, with `fail_fast`, when one fails later; `on_ready` when all
    models of the start have loaded, if there are any. An application has one lifespan, and `loop` is its event loop,
    None before.
    """

    loop: asyncio.AbstractEventLoop | None = None

    def __init__(
        self,
        options: Options,
        startup: Sequence[Startup],
        store: Path | None = None,
        *,
        wait_until_ready: bool = False,
        on_failed: Callable[[], None] | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        """Nothing is loaded yet. Raises ConfigError if the options of access, clients, traces or sessions are wrong."""
        self.context = ServerContext.open(options)
        self.options = options
        self.registry = self.context.registry
        for model in startup:
            self.registry.add(ServedModel(model.name, model.source, on_failed=self._model_failed))
        self._startup = startup
        self._wait_until_ready = wait_until_ready
        self._on_failed = on_failed
        self._on_ready = on_ready
        self._models = ModelRoutes(self.registry, store, options.shutdown_timeout)
        self._stall = Histogram()
        metrics = MetricsPage(self.registry, self.context.counts, self._stall)
        routes = Routes(self.context, self._models, metrics, SessionRequests(open_sessions(options)))
        self.monitor = routes.monitor
        self._asgi = BidirectionalStreams(routes.router(self.lifespan), self.context)
        self._loading: asyncio.Task[None] | None = None
        self._end: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._asgi(scope, receive, send)

    def refuse_new(self) -> None:
        """Refuse new requests from now on."""
        for model in self.registry.models.values():
            model.refuse_new()

    async def drain(self) -> None:
        """Refuse new requests. Returns when the others have ended, after `shutdown_timeout` seconds at the latest."""
        if self._end is None:
            self.refuse_new()
            self._end = asyncio.create_task(self._end_models())
        await self._end

    async def _end_models(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.wait({self._loading})
        await self._models.close()
        await asyncio.gather(*(model.end(self.options.shutdown_timeout) for model in self.registry.models.values()))
        self.monitor.close()

    @contextlib.asynccontextmanager
    async def lifespan(self, _: object = None) -> AsyncIterator[None]:
        """What an ASGI server's lifespan does: load the models, and drain at the end. For once."""
        self.loop = asyncio.get_running_loop()
        # Worker threads that read requests hold the GIL, and the event loop waits for it as long as this.
        sys.setswitchinterval(_SWITCH_SECONDS)
        threading.Thread(target=sweep_temporary_directories, name="sweep", daemon=True).start()
        self._loading = asyncio.create_task(self._load())
        stalls = asyncio.create_task(self._watch_stalls())
        try:
            if self._wait_until_ready:
                await self._loading
                self._raise_failure()
            yield
        finally:
            await self.drain()
            stalls.cancel()
            await asyncio.wait({stalls})
            await asyncio.to_thread(self.context.telemetry.close)

    def _raise_failure(self) -> None:
        for model in self.registry.models.values():
            if model.failure is not None:
                raise model.failure

    async def _load(self) -> None:
        """Load the models one after the other: compiling needs all the memory."""
        for startup in self._startup:
            model = self.registry.models[startup.name]
            try:
                await model.load(startup.prepare)
                if table := ready_table(model.model.directory):
                    logger.info("models of %s:\n%s", startup.source, table)
            except DjlTrtllmError:
                self._failed()
            except Exception:
                logger.exception("loading model %s failed", startup.name)
                self._failed()
        # Not for models registered later: frozen objects are not collected when such a model is unregistered.
        settle_garbage_collector()
        states = [self.registry.models[startup.name].state for startup in self._startup]
        if self._on_ready is not None and states and all(state is State.READY for state in states):
            self._on_ready()

    async def _watch_stalls(self) -> None:
        """Measure how late the event loop runs a timer: everything else waits as long."""
        now = asyncio.get_running_loop().time
        while True:
            due = now() + _STALL_TICK_SECONDS
            await asyncio.sleep(_STALL_TICK_SECONDS)
            self._stall.observe(max(0.0, now() - due))

    def _model_failed(self, error: DjlTrtllmError) -> None:
        if self.options.fail_fast:
            self._failed()

    def _failed(self) -> None:
        if self._on_failed is not None:
            self._on_failed()
