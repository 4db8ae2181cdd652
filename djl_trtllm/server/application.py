"""The ASGI application, which any ASGI server can run: the models of its start, and the routes over them.

`plan_startup` reads which models these are, and from which folder more may be registered. The application's lifespan
loads and ends them.
"""

import asyncio
import contextlib
import logging
import os
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from djl_trtllm.api.registry import DIALECTS
from djl_trtllm.batching.statistics import Histogram
from djl_trtllm.config import Options, load
from djl_trtllm.config.sources import as_arguments
from djl_trtllm.errors import ConfigError, DjlTrtllmError
from djl_trtllm.model.remote.fetch import is_remote
from djl_trtllm.model.work_directory import sweep_temporary_directories
from djl_trtllm.server.context import ServerContext
from djl_trtllm.server.exchange import Generation, SessionRequests
from djl_trtllm.server.management import ModelRoutes
from djl_trtllm.server.metrics import MetricsPage
from djl_trtllm.server.routes import Routes
from djl_trtllm.server.websocket import BidirectionalStreams
from djl_trtllm.service import engine, model as models
from djl_trtllm.service.clients import open_sessions
from djl_trtllm.service.lifecycle import ServedModel, State
from djl_trtllm.service.model import Model, ModelSource
from djl_trtllm.service.work import Calls

MULTI_MODEL = "SAGEMAKER_MULTI_MODEL"
_VARIABLE = "SERVING_MODEL_STORE"
_MULTI_MODEL_STORE = Path("/opt/ml/models")
_LOAD_MODELS = "SERVING_LOAD_MODELS"
_ALL = "ALL"
# DJL Serving's NAME:VERSION:ENGINE:DEVICES=ADDRESS, of which all but the name may be empty (ModelStore.java, 0.36).
_ADDRESSED = re.compile(r"\[?([^?=:\]]+)[^?=\]]*\]?=(.+)")


class Startup(NamedTuple):
    """A model of the server's start: its name, where it comes from, and what prepares it."""

    name: str
    source: str
    prepare: Callable[[], Model]


Plan = tuple[Options, list[Startup], Path | None]


def plan_startup(
    model: str | None, environ: Mapping[str, str], arguments: Sequence[str] = (), *, found: str | None = None
) -> Plan:
    """Plan the start from the model named on the command line, if any, and the environment. Raises DjlTrtllmError.

    `arguments` are KEY=VALUE pairs that override all other sources, for the server and for every model of its start.

    `found` is the model in SageMaker's place or of a variable; it is served if neither the command line nor
    SERVING_LOAD_MODELS has an address. Without it, a variable names the model where there is no store. A SageMaker
    multi-model endpoint starts without a model; SageMaker registers models when requests need them.
    """
    multi_model = environ.get(MULTI_MODEL, "").lower() == "true"
    store = _store(environ, multi_model)
    if model is None and not multi_model:
        if addressed := _addressed(environ.get(_LOAD_MODELS, "")):
            return _at_addresses(addressed, environ, arguments, store)
        model = found or (_named(environ) if store is None else None)
    if model is not None and not multi_model:
        return _single(model, environ, arguments, store)
    if store is None:
        raise DjlTrtllmError(
            "no model given, and there is none in /opt/ml/model: name a model directory, a model.tar.gz, a model of "
            "the Hugging Face hub or an s3:// address, on the command line or by HF_MODEL_ID or OPTION_MODEL_ID, or a "
            "folder of models with --model-store"
        )
    local = {name: value for name, value in environ.items() if name != "HF_MODEL_ID"}
    options = load(None, environ, arguments=arguments).options
    return options, [_of_store(store / name, local, arguments) for name in _names(store, options.load_models)], store


def _store(environ: Mapping[str, str], multi_model: bool) -> Path | None:
    """The folder of models. Only the operator sets it: a model directory cannot."""
    named = environ.get(_VARIABLE)
    if not named:
        return _MULTI_MODEL_STORE if multi_model else None
    store = Path(named)
    if not store.is_dir():
        raise ConfigError(f"{_VARIABLE}={named} (environment): there is no such folder")
    return store


def _addressed(wanted: str) -> list[tuple[str, str]]:
    """The models of `load_models` that have an address (`NAME::ENGINE=ADDRESS`): name and address."""
    entries = (_ADDRESSED.fullmatch(entry) for entry in re.split(r"[,\s]+", wanted))
    return [(entry[1], entry[2]) for entry in entries if entry is not None]


def _at_addresses(
    addressed: Sequence[tuple[str, str]], environ: Mapping[str, str], arguments: Sequence[str], store: Path | None
) -> Plan:
    if len(addressed) == 1:
        ((name, address),) = addressed
        return _single(_opened(address, environ), environ, arguments, store, name=name)
    # HF_MODEL_ID would replace each of them.
    local = {name: value for name, value in environ.items() if name != "HF_MODEL_ID"}
    plans = [_single(_opened(address, local), local, arguments, store, name=name) for name, address in addressed]
    options = load(None, environ, arguments=arguments).options
    return options, [startup for _, startups, _ in plans for startup in startups], store


def _named(environ: Mapping[str, str]) -> str | None:
    return environ.get("HF_MODEL_ID") or environ.get("OPTION_MODEL_ID") or None


def _opened(address: str, environ: Mapping[str, str]) -> str:
    """The model at the address. A folder without content may stand for the model that a variable names."""
    path = Path(unquote(urlsplit(address).path) if address.startswith("file:") else address)
    named = _named(environ)
    if named and not is_remote(address) and not (path.is_file() or any(path.glob("*"))):
        return named
    return str(path) if address.startswith("file:") else address


def _single(
    model: str, environ: Mapping[str, str], arguments: Sequence[str], store: Path | None, *, name: str | None = None
) -> Plan:
    if is_remote(model):
        # The server listens while the model is fetched, so a remote serving.properties cannot configure it.
        options = load(None, environ, arguments=arguments).options
        remote = name or options.model_name or models.remote_name(model)

        def opened(calls: Calls) -> ModelSource:
            source = models.open_remote(model, environ, arguments, calls=calls)
            return source if name is None else replace(source, name=name)

        return options, [Startup(remote, model, partial(models.prepare_apart, model, opened))], store
    source = models.open_source(Path(model), environ, arguments)
    if name is not None:
        source = replace(source, name=name)
    options = source.config.options
    if models.is_fetched(source.config):
        prepared = partial(models.prepare_apart, model, lambda *, calls: source)  # the hub's files are anybody's
    else:
        prepared = partial(models.prepare, source)
    return options, [Startup(source.name, model, prepared)], store


def _of_store(path: Path, environ: Mapping[str, str], arguments: Sequence[str]) -> Startup:
    opened = partial(models.open_source, path, environ, arguments)
    return Startup(path.name.removesuffix(".tar.gz"), str(path), partial(models.prepare_apart, str(path), opened))


def _names(store: Path, wanted: str | None) -> list[str]:
    """The models of the store that `load_models` names; none if it is not set."""
    if wanted is None or wanted.upper() == "NONE":
        return []
    there = sorted(path.name for path in store.iterdir() if path.is_dir() or path.name.endswith(".tar.gz"))
    if wanted.upper() == _ALL:
        return there
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    if unknown := [name for name in names if name not in there]:
        raise ConfigError(f"load_models names {', '.join(unknown)}: in {store} are {', '.join(there) or 'none'}")
    return names


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
        """Load nothing yet. Raises ConfigError for options of access, clients, traces or sessions."""
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
        generation = Generation(self.context, SessionRequests(open_sessions(options)))
        routes = Routes(self.context, self._models, metrics, generation)
        self.monitor = routes.monitor
        self._asgi: ASGIApp = BidirectionalStreams(routes.router(self.lifespan), self.context)
        if origins := self.context.access.origins:
            self._asgi = CORSMiddleware(
                self._asgi,
                origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=[options.request_id_header_key],
            )
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
        """Load the models, and drain at the end; an ASGI server enters this context once."""
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
                for dialect in DIALECTS:
                    if text := dialect.ready_text(model.model.directory):
                        logger.info("models of %s:\n%s", startup.source, text)
            except DjlTrtllmError:
                self._failed()
            except Exception:
                logger.exception("loading model %s failed", startup.name)
                self._failed()
        # Not for models registered later: frozen objects are not collected when such a model is unregistered.
        engine.settle_garbage_collector()
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


def create_app(
    model: str | Path | None = None, options: Mapping[str, Any] | None = None, *, wait_until_ready: bool = False
) -> Application:
    """An ASGI application that serves a model, to be run by uvicorn, mounted in a program or deployed with Ray Serve.

    `model` is what `djl-trtllm serve` takes: a directory, an archive, a model of the hub or in S3. Without one, the
    environment names it, as for `serve` (`HF_MODEL_ID`, `SERVING_LOAD_MODELS`, `SERVING_MODEL_STORE`, ...). `options`
    are options of docs/options.md, with or without `option.`, of the server as well as of its models; they win over
    serving.properties and the environment.

    The model is loaded in the application's lifespan, in the background while /ping returns 503, or, with
    `wait_until_ready`, before the lifespan's start is complete. At the lifespan's end running requests get
    `shutdown_timeout` seconds.

    The ASGI server bounds connections and has their addresses, ports and certificates; options about them have no
    effect here, and there is no gRPC. docs/asgi.md says what else depends on it. A process should have one application.

    Raises ConfigError, also for what is no option, and DjlTrtllmError if there is no such model.
    """
    arguments = as_arguments(options or {})
    named = None if model is None else str(model)
    return Application(*plan_startup(named, os.environ, arguments), wait_until_ready=wait_until_ready)
