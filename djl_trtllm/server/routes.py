"""The HTTP routes: find the model, read the body, let the dialect and the service do the rest."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import orjson
from starlette.routing import Route, Router
from starlette.types import Lifespan, Receive, Scope, Send

from djl_trtllm.api import Reply
from djl_trtllm.api.lmi.errors import front_end
from djl_trtllm.errors import NotReadyError, RequestError
from djl_trtllm.server.adapter_routes import PATHS as ADAPTER_PATHS
from djl_trtllm.server.adapter_routes import AdapterRoutes
from djl_trtllm.server.exchange import ClientGone, Exchange, HttpSettings
from djl_trtllm.server.metrics import MetricsPage, ServerCounts
from djl_trtllm.server.model_routes import MODELS, ModelRoutes
from djl_trtllm.server.response_writer import ResponseWriter
from djl_trtllm.service import Registry, ServedModel, State

logger = logging.getLogger(__name__)

_HEALTH = {
    State.LOADING: (503, "PENDING"),
    State.READY: (200, "Healthy"),
    State.RECOVERING: (503, "Unhealthy"),
    State.DRAINING: (503, "Unhealthy"),
    State.FAILED: (500, "FAILED"),
    State.STOPPED: (503, "Unhealthy"),
}
"""Status of /ping and DJL's word for the state."""


Handler = Callable[[Exchange], Awaitable[None]]


class Endpoint:
    """A handler as an ASGI application (a class, so that Starlette passes scope, receive and send as they are).

    `method` None takes every method.
    """

    def __init__(self, handler: Handler, method: str | None, settings: HttpSettings, counts: ServerCounts) -> None:
        self._handler = handler
        self._method = method
        self._settings = settings
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._settings, self._counts)
        try:
            if self._method is not None and not self._takes(scope["method"]):
                message = f"{scope['path']} takes {self._method}, not {scope['method']}"
                await exchange.reply(front_end(405, message)._replace(headers=(("Allow", self._method),)))
                return
            await self._handler(exchange)
        except ClientGone:
            pass
        except RequestError as error:
            await exchange.fail(error)
        except Exception as error:
            if exchange.sent_head:
                raise
            logger.exception("request %s failed", exchange.request_id)
            await exchange.fail(error)

    def _takes(self, method: str) -> bool:
        return method == self._method or (method == "HEAD" and self._method == "GET")


class Routes:
    """The handlers, over the models of a registry."""

    def __init__(
        self,
        registry: Registry,
        models: ModelRoutes,
        settings: HttpSettings,
        metrics: MetricsPage,
        counts: ServerCounts,
    ) -> None:
        self._registry = registry
        self._models = models
        self._settings = settings
        self._metrics = metrics
        self._counts = counts

    def router(self, lifespan: Lifespan[Router]) -> Router:
        """The ASGI application."""
        adapters = AdapterRoutes(self._registry)
        paths: list[tuple[str, str | None, Handler]] = [
            ("/ping", "GET", self.ping),
            ("/metrics", "GET", self.metrics),
            ("/invocations", "POST", self.invoke),
            ("/predictions/{model}", "POST", self.invoke),
            ("/models/{model}/invoke", "POST", self.invoke),
            ("/endpoints/{endpoint}/invocations", "POST", self.invoke),
            (MODELS, None, self._models.collection),
            (MODELS + "/{model}", None, self._models.member),
            *((path, None, adapters.collection) for path in ADAPTER_PATHS),
            *((path + "/{adapter}", None, adapters.member) for path in ADAPTER_PATHS),
        ]
        routes = [
            Route(path, Endpoint(handler, method, self._settings, self._counts)) for path, method, handler in paths
        ]
        not_found = Endpoint(self.not_found, None, self._settings, self._counts)
        return Router(routes, default=not_found, lifespan=lifespan, redirect_slashes=False)

    async def ping(self, exchange: Exchange) -> None:
        """200 only when every model can generate that the server was started with.

        Answered from state alone, so never slower under load.
        """
        models = self._registry.models.values()
        status = max(
            (_HEALTH[model.state][0] for model in models if model.at_startup),
            key=lambda code: (code == 500, code),
            default=200,
        )
        body = {model.name: {"status": _HEALTH[model.state][1]} for model in models}
        await exchange.reply(Reply(status, "application/json", orjson.dumps(body)))

    async def metrics(self, exchange: Exchange) -> None:
        """Prometheus metrics."""
        await exchange.reply(self._metrics.reply())

    async def invoke(self, exchange: Exchange) -> None:
        """Generate."""
        model = self._model(exchange)
        if model is None:
            await exchange.reply(self._unknown(exchange))
            return
        if model.state is State.DRAINING:
            # Keep-alive clients are told to go elsewhere.
            error = NotReadyError(f"model {model.name} is shutting down")
            await exchange.fail(error, (("Connection", "close"),))
            return
        body = await exchange.body()
        if body is None:
            limit = self._settings.max_request_size
            await exchange.reply(front_end(413, f"the request body is larger than max_request_size={limit} bytes"))
            return
        call = model.model.parse(body, exchange.properties.get("content-type"), exchange.properties)
        answer = ResponseWriter(call.encoder, exchange, sequences=call.request.sampling.n)
        service = model.pick()
        generation = await service.generate(call, answer.deliver)
        try:
            await answer.wait()
        finally:
            # The client may be gone, or its answer have ended before its tokens did.
            service.cancel(generation)

    async def not_found(self, exchange: Exchange) -> None:
        """Any other path."""
        await exchange.reply(front_end(404, f"there is nothing at {exchange.scope['path']}"))

    def _model(self, exchange: Exchange) -> ServedModel | None:
        params = exchange.scope["path_params"]
        if "endpoint" in params:
            # SageMaker's client names the endpoint, which says nothing about the model unless it is one's name.
            return self._registry.find(params["endpoint"]) or self._registry.find(None)
        return self._registry.find(params.get("model") or exchange.model_name)

    def _unknown(self, exchange: Exchange) -> Reply:
        name = exchange.scope["path_params"].get("model") or exchange.model_name
        known = ", ".join(sorted(self._registry.models)) or "none"
        if name is None:
            return front_end(400, f"Parameter model_name is required; loaded: {known}")
        return front_end(404, f"there is no model named {name!r} here; loaded: {known}")
