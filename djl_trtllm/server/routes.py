"""The HTTP routes: the server's own, and those of every dialect of `api.registry`.

Requests to a dialect's paths that generate are answered in `exchange`. `/docs` shows the description of all paths: it
is rendered here from `docs.html` beside this module, needs no script and loads nothing from elsewhere.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any

import orjson
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from djl_trtllm import errors
from djl_trtllm.api.base import Dialect, ModelStatus, RawRequest, Reply
from djl_trtllm.api.front_end import front_end_error
from djl_trtllm.api.openapi import SERVER, document, read_operations, resolved
from djl_trtllm.api.registry import DEFAULT, DIALECTS
from djl_trtllm.config import Options
from djl_trtllm.logs import RequestContext
from djl_trtllm.server.access import Role, WrongPort
from djl_trtllm.server.context import ServerContext, find_model, status_of
from djl_trtllm.server.exchange import (
    REST,
    ClientGone,
    Exchange,
    Generation,
    Refused,
    name_in,
    raw_request,
    read_request,
)
from djl_trtllm.server.management import MODELS, PATHS as ADAPTER_PATHS, AdapterRoutes, ModelRoutes
from djl_trtllm.server.metrics import MetricsPage
from djl_trtllm.server.monitor import PAGE, Monitor
from djl_trtllm.server.websocket import PATH as WEBSOCKET
from djl_trtllm.service.lifecycle import ServedModel, State
from djl_trtllm.service.work import WORKERS, WorkerThreads
from djl_trtllm.version import __version__

# -- the description of the server -------------------------------------------------------------------------------------

_TEMPLATE = Path(__file__).with_name("docs.html")
_SECURITY = (("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),)
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
OPEN = ("/version", "/openapi.json", "/docs", "/ping", "/monitor", "/monitor/{file}")
"""The server's own paths that need no API key."""


OPERATIONS = read_operations("operations.toml", "djl_trtllm.server")
"""The operations by "METHOD PATH"."""


class Description:
    """The description of a server, made once when it is first asked for."""

    def __init__(self, dialects: Sequence[Dialect], options: Options, *, keys: bool = False) -> None:
        """With `keys`, requests need an API key."""
        self._dialects = dialects
        self._keys = keys
        self._options = options

    @cached_property
    def document(self) -> Reply:
        """The body of `/openapi.json`."""
        return Reply.json(self._described())

    @cached_property
    def page(self) -> Reply:
        """The page `/docs`."""
        return Reply(200, "text/html; charset=utf-8", _render(self._described()).encode(), _SECURITY)

    def _described(self) -> dict[str, Any]:
        described = document(self._dialects, OPERATIONS, self._options, DEFAULT)
        if self._keys:
            described["components"]["securitySchemes"] = _KEYS
            described["security"] = [{name: []} for name in _KEYS]
            for path in (*OPEN, *(path for dialect in self._dialects for path in dialect.health)):
                for operation in described["paths"][path].values():
                    operation["security"] = []
        return described


def _render(described: dict[str, Any]) -> str:
    from jinja2 import Environment  # a tenth of a second, and few servers are asked

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["type"] = lambda schema: type_of(resolved(described, schema))
    environment.filters["json"] = lambda value: orjson.dumps(value).decode()
    environment.filters["pretty"] = lambda value: orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
    environment.filters["resolved"] = lambda reference: resolved(described, reference)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(described=described, sections=_sections(described))


def _sections(described: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], list[dict[str, Any]]]]:
    """Return each tag with its operations: those that generate first, the server's own at the end."""
    operations = [
        {"path": path, "method": method.upper(), **operation}
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    ]
    operations.sort(key=lambda each: (each["method"] != "POST", "{" in each["path"]))
    tags = sorted(described["tags"], key=lambda tag: tag["name"] == SERVER)
    return [(tag, [each for each in operations if tag["name"] in each["tags"]]) for tag in tags]


def type_of(schema: Mapping[str, Any]) -> str:
    """A schema in a few words: `integer, 1 to 5, or null`."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(type_of(each) for each in schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(orjson.dumps(value).decode() for value in schema["enum"])
    if "const" in schema:
        return orjson.dumps(schema["const"]).decode()
    name = str(schema.get("type", "any value"))
    if name == "array":
        return f"list of {type_of(schema.get('items', {}))}"
    low, high = schema.get("minimum"), schema.get("maximum")
    above = schema.get("exclusiveMinimum")
    bounds = [f"at least {low:g}" if low is not None else "", f"above {above:g}" if above is not None else ""]
    bounds.append(f"at most {high}" if high is not None else "")
    return ", ".join([name, *filter(None, bounds)])


# -- finding the handler -----------------------------------------------------------------------------------------------


class PathRouter(Router):
    """Finds a path without placeholders by one look-up; Starlette's router compares a request with every route.

    Of two paths with placeholders that match, the one with more fixed characters is meant: `{model}:predict` before
    `{model}`. `endpoints` are applications by path, `default` is the one for other paths.
    """

    def __init__(self, endpoints: Mapping[str, ASGIApp], default: ASGIApp, lifespan: Lifespan[Router]) -> None:
        in_order = sorted(endpoints.items(), key=lambda item: -len(re.sub(r"\{.*?\}", "", item[0])))
        routes = [Route(path, endpoint) for path, endpoint in in_order]
        super().__init__(routes, default=default, lifespan=lifespan, redirect_slashes=False)
        self._without_placeholders = {path: endpoint for path, endpoint in endpoints.items() if "{" not in path}

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Below another application's path, only Starlette knows which part of the path is ours.
        endpoint = None
        if scope["type"] == "http" and not scope.get("root_path"):
            endpoint = self._without_placeholders.get(scope["path"])
        if endpoint is None:
            await super().app(scope, receive, send)
            return
        scope.update(router=self, endpoint=endpoint, path_params=dict(scope.get("path_params", {})))
        await endpoint(scope, receive, send)


logger = logging.getLogger(__name__)

_HEALTH = {
    State.LOADING: (503, "PENDING"),
    State.READY: (200, "Healthy"),
    State.RECOVERING: (503, "Unhealthy"),
    State.DRAINING: (503, "Unhealthy"),
    State.FAILED: (500, "FAILED"),
    State.STOPPED: (503, "Unhealthy"),
}
"""Status of /ping and DJL's name of the state."""


def _health(model: ServedModel) -> tuple[int, dict[str, str]]:
    code, status = _HEALTH[model.state]
    if model.retry_in is None:
        return code, {"status": status}
    text = f"the engine failed too often; it is started again in {model.retry_in} seconds"
    return 503, {"status": "Unhealthy", "message": text}


_ACTIONS = WorkerThreads(2)
"""The threads of actions, which tokenise and wait for chat templates."""
_MOST_ACTIONS_WAITING = 64


Answer = Callable[[RawRequest, Sequence[ModelStatus]], Reply]
"""A page or a removal of a dialect."""
Handler = Callable[[Exchange], Awaitable[Reply | None]]
"""Answers a request: the reply, or None where the handler has sent the response, or lets it go on."""


@dataclass
class Endpoint:
    """A handler as an ASGI application (a class, so that Starlette passes scope, receive and send as they are).

    `method` None takes every method; `allow` are those of the path, if there are several. `role` is what the request's
    API key must have, None without one. Errors are in the format of `dialect`. `health`: it answers health checks.
    `path` is its own, with placeholders.
    """

    handler: Handler
    method: str | None
    routes: "Routes"
    role: Role | None
    dialect: Dialect = DEFAULT
    allow: str = ""
    health: bool = False
    path: str = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self.routes.context, self.dialect)
        exchange.route = self.path
        exchange.served.quiet = self.health
        try:
            with RequestContext(exchange.request_id):
                await self._answer(exchange)
        finally:
            if exchange.rest is None:
                exchange.end()
        if exchange.rest is None:
            return
        if REST in scope:
            scope[REST] = exchange.rest
        else:
            await exchange.rest

    async def _answer(self, exchange: Exchange) -> None:
        context, scope = self.routes.context, exchange.scope
        try:
            exchange.key = context.access.check(self.role, exchange.headers, scope.get("server"))
            if self.method is not None and not self.takes(scope["method"]):
                allow = self.allow or self.method
                raise errors.MethodNotAllowedError(f"{scope['path']} takes {allow}, not {scope['method']}", allow=allow)
            if self.role is Role.MANAGE and self.method != "GET" and context.unchangeable:
                raise Refused(front_end_error(400, context.unchangeable))
            if (reply := await self.handler(exchange)) is not None:
                await exchange.reply(reply)
        except ClientGone:
            pass
        except Refused as refused:
            await exchange.reply(refused.reply)
        except WrongPort as error:
            await exchange.reply(front_end_error(404, f"there is nothing at {scope['path']}: {error}"))
        except errors.RequestError as error:
            await exchange.fail(error)
        except ConnectionError as error:
            logger.info("the client has left (%s)", error or type(error).__name__)
        except Exception as error:
            exchange.served.error = type(error).__name__
            if exchange.sent_head:
                raise
            logger.exception("the request failed")
            await exchange.fail(error)

    def takes(self, method: str) -> bool:
        return method == self.method or (method == "HEAD" and self.method == "GET")


class SharedPath:
    """Several endpoints with one path and different methods, as an ASGI application."""

    def __init__(self, endpoints: list[Endpoint]) -> None:
        allow = ", ".join(sorted(str(endpoint.method) for endpoint in endpoints))
        self._endpoints = [replace(endpoint, allow=allow) for endpoint in endpoints]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = self._endpoints[0]
        endpoint = next((each for each in self._endpoints if each.takes(scope["method"])), first)
        await endpoint(scope, receive, send)


@dataclass
class Routes:
    """The handlers of the server's own paths and of the dialects' paths."""

    context: ServerContext
    models: ModelRoutes
    metrics_page: MetricsPage
    generation: Generation

    def __post_init__(self) -> None:
        context = self.context
        self._registry = context.registry
        self.monitor = Monitor(self._registry, context.options, api_keys=bool(context.access.keys))
        self._description = Description(DIALECTS, context.options, keys=bool(context.access.keys))

    def router(self, lifespan: Lifespan[Router]) -> Router:
        by_path: dict[str, list[Endpoint]] = {}
        for path, endpoint in (*self._own(), *self._of_dialects()):
            by_path.setdefault(path, []).append(replace(endpoint, path=path))
        applications: dict[str, ASGIApp] = {
            path: endpoints[0] if len(endpoints) == 1 else SharedPath(endpoints) for path, endpoints in by_path.items()
        }
        return PathRouter(applications, Endpoint(self.not_found, None, self, None), lifespan)

    def _own(self) -> Iterator[tuple[str, Endpoint]]:
        adapters = AdapterRoutes(self._registry)
        manage = Role.MANAGE
        handlers: list[tuple[str, str, Handler, Role | None]] = [
            ("/", "GET", self.root, Role.INFER),
            ("/version", "GET", self.version, None),
            ("/openapi.json", "GET", self.openapi, None),
            ("/docs", "GET", self.docs, None),
            ("/ping", "GET", self.ping, None),
            ("/ping", "POST", self.ping, None),
            ("/metrics", "GET", self.metrics, Role.METRICS),
            ("/prometheus/metrics", "GET", self.metrics, Role.METRICS),
            # The page itself asks for a key where its numbers need one.
            (PAGE, "GET", self.monitor.page, None),
            (PAGE + "/{file}", "GET", self.monitor.file, None),
            (PAGE + "/events", "GET", self.monitor.events, Role.METRICS),
            (MODELS, "GET", self.models.page, manage),
            (MODELS, "POST", self.models.register, manage),
            (MODELS + "/{model}", "GET", self.models.describe, manage),
            (MODELS + "/{model}", "PUT", self.models.scale, manage),
            (MODELS + "/{model}", "DELETE", self.models.unregister, manage),
        ]
        for path in ADAPTER_PATHS:
            handlers += [
                (path, "GET", adapters.list, manage),
                (path, "POST", adapters.register, manage),
                (path + "/{adapter}", "GET", adapters.describe, manage),
                (path + "/{adapter}", "DELETE", adapters.unregister, manage),
            ]
        for path, method, handler, role in handlers:
            yield path, Endpoint(handler, method, self, role, health=path == "/ping")

    def _of_dialects(self) -> Iterator[tuple[str, Endpoint]]:
        for dialect in DIALECTS:
            for method, paths, handler in (
                ("POST", dialect.paths, self.generation.answer),
                ("GET", dialect.pages, partial(self.page, dialect.page)),
                ("POST", dialect.actions, self.act),
                ("DELETE", dialect.removals, partial(self.page, dialect.remove)),
            ):
                for path in paths:
                    health = path in dialect.health
                    bound = partial(handler, dialect, path)
                    yield path, Endpoint(bound, method, self, None if health else Role.INFER, dialect, health=health)

    async def ping(self, exchange: Exchange) -> Reply:
        """Answer 200 only if every model that the server was started with is ready.

        Reads the states only, so load does not slow it down.
        """
        models = self._registry.models.values()
        lost = self._registry.lost
        codes = [_health(model)[0] for model in models if model.at_startup] + [503] * bool(lost)
        status = max(codes, key=lambda code: (code == 500, code), default=200)
        body = {model.name: _health(model)[1] for model in models}
        body |= {name: {"status": "Unregistered"} for name in lost}
        return Reply.json(body, status)

    async def root(self, exchange: Exchange) -> Reply:
        """Say what this server is, for people who open its address in a browser."""
        models = [{"name": model.name, "state": model.state.value} for model in self._registry.models.values()]
        apis = {dialect.name: list(dict.fromkeys(dialect.all_paths)) for dialect in DIALECTS}
        links = {
            "docs": "/docs",
            "openapi": "/openapi.json",
            "health": "/ping",
            "metrics": "/metrics",
            "models": MODELS,
        }
        if self.monitor.shown:
            links["monitor"] = PAGE
        about = {"name": "djl-trtllm", "version": __version__, "models": models, "links": links, "apis": apis}
        return Reply.json(about)

    async def version(self, exchange: Exchange) -> Reply:
        return Reply.json({"version": __version__})

    async def openapi(self, exchange: Exchange) -> Reply:
        # Making it takes longer than /ping may wait.
        return await WORKERS.run(lambda: self._description.document)

    async def docs(self, exchange: Exchange) -> Reply:
        return await WORKERS.run(lambda: self._description.page)

    async def metrics(self, exchange: Exchange) -> Reply:
        return self.metrics_page.reply(exchange.properties.get("accept", ""))

    async def page(self, answer: Answer, dialect: Dialect, path: str, exchange: Exchange) -> Reply:
        """Answer with a dialect's page or removal, about all models or the one that the path names."""
        models = self._named(dialect, exchange.scope["path_params"].get("model"))
        return answer(raw_request(exchange, path), models)

    async def act(self, dialect: Dialect, path: str, exchange: Exchange) -> Reply:
        """Run a dialect's action, on all models or on the one that the request names."""
        exchange.served.dialect = dialect.name
        request = await read_request(exchange, path)
        name = request.parameters.get("model") or exchange.model_name
        if name is None and dialect.names_model:
            name = await name_in(dialect, request)
        models = [status._replace(render=self._renderer(status.name)) for status in self._named(dialect, name)]
        if _ACTIONS.waiting >= _MOST_ACTIONS_WAITING:
            raise errors.OverloadedError(
                f"{_ACTIONS.waiting} requests such as this one, which do not generate, wait already: try again later",
                queue_depth=_ACTIONS.waiting,
                capacity=_MOST_ACTIONS_WAITING,
                retry_after=1,
            )
        return await _ACTIONS.run(partial(dialect.act, request, models))

    async def not_found(self, exchange: Exchange) -> Reply:
        exchange.dialect = _dialect_near(exchange.scope["path"])
        path, advice = exchange.scope["path"], "GET / lists the paths"
        if path == WEBSOCKET:
            advice = "a WebSocket's handshake is expected there, a GET with Upgrade: websocket and without a body"
        raise errors.UnknownPathError(f"there is nothing at {path}; {advice}")

    def _renderer(self, name: str) -> Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], str]:
        """Renders the chat messages of an action, for the thread that the action has."""
        loop = asyncio.get_running_loop()

        async def rendered(messages: Sequence[Mapping[str, Any]], keywords: Mapping[str, Any]) -> str:
            return await self._registry.models[name].workers[0].prompts.render(messages, keywords)

        return lambda messages, keywords: asyncio.run_coroutine_threadsafe(rendered(messages, keywords), loop).result()

    def _named(self, dialect: Dialect, name: str | None) -> list[ModelStatus]:
        models = self._registry.models.values() if name is None else [find_model(self._registry, dialect, name)]
        return [status_of(model) for model in models]


def _dialect_near(path: str) -> Dialect:
    """The dialect with the path that shares the longest beginning (in segments) with this one; `DEFAULT` if none has
    any.

    If there are several, it is the dialect with a path of exactly these segments, or with most such paths.
    """
    segments = path.split("/")

    def likeness(dialect: Dialect) -> tuple[int, bool, int]:
        paths = [each.split("/") for each in dialect.all_paths]
        common = [sum(1 for _ in takewhile(bool, map(eq, segments, each))) for each in paths]
        most = max(common, default=0)
        return most, segments[:most] in paths, common.count(most)

    nearest = max(DIALECTS, key=likeness)
    return nearest if likeness(nearest)[0] > 1 else DEFAULT
