"""The application before the replicas: it reads requests and hands them to the deployment of their model.

It is the ingress deployment where requests are routed by what is in them (docs/ray.md). Everything else about a request
is left to the replica: errors of its content, keys, limits, the response.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import grpc
import orjson
from ray import serve
from ray.exceptions import RayActorError
from starlette.routing import Router
from starlette.types import Message, Receive, Scope, Send

from djl_trtllm.api import Dialect, RawRequest, Reply
from djl_trtllm.api.front_end import front_end_error
from djl_trtllm.api.registry import DEFAULT, DIALECTS
from djl_trtllm.cluster.forwarding import ForwardedRequest
from djl_trtllm.cluster.prompt_prefix import prefix_keys
from djl_trtllm.cluster.replica_call import ReplicaCall
from djl_trtllm.cluster.replica_metrics import ReplicaMetrics
from djl_trtllm.config import Options
from djl_trtllm.errors import NotReadyError, RequestError, UnknownModelError
from djl_trtllm.server.adapter_routes import PATHS as ADAPTER_PATHS
from djl_trtllm.server.bidirectional import BidirectionalStreams
from djl_trtllm.server.context import ServerContext
from djl_trtllm.server.exchange import ClientGone, Exchange
from djl_trtllm.server.model_routes import MODELS
from djl_trtllm.server.monitor.routes import PAGE as MONITOR
from djl_trtllm.server.path_router import PathRouter
from djl_trtllm.server.response_writer import start_now
from djl_trtllm.service.worker_threads import run_by_size

logger = logging.getLogger(__name__)

_SESSIONS = ("x-session-id", "x-amzn-sagemaker-session-id")
_ATTEMPTS = 3
_JOINED = frozenset({"/", "/ping", MODELS, "/v1/models"})
"""Pages about all models: those of several deployments become one."""
_METRICS = ("/metrics", "/prometheus/metrics")
_NO_MONITOR = front_end_error(
    404,
    "behind a gateway there is no live page: it would be that of one replica, whichever is chosen. /metrics has the "
    "figures of all replicas (docs/ray.md)",
)


class _SlowReaderError(Exception):
    """The client did not read for as long as `option.stream_write_timeout` allows."""


class Gateway:
    """An ASGI application over `deployments`, by the name of their model; they are of this application of Ray Serve.

    `prefixes`: whether requests go to a replica that had the beginning of their prompt.
    """

    def __init__(self, options: Options, deployments: Mapping[str, str], *, prefixes: bool) -> None:
        self._options = options
        self._deployments = deployments
        self._prefixes = prefixes
        self._models: dict[str, Any] = {}
        self._metrics = ReplicaMetrics(self._models)
        # Who may do what is checked by the replicas.
        self._context = ServerContext(options)
        self._health = {path for dialect in DIALECTS for path in dialect.health} | {"/ping"}
        paths = {path: dialect for dialect in DIALECTS for path in (*dialect.paths, *dialect.pages, *dialect.actions)}
        managing = (MODELS, MODELS + "/{model}", *(path + end for path in ADAPTER_PATHS for end in ("", "/{adapter}")))
        monitor = (MONITOR, MONITOR + "/{file}")
        paths |= dict.fromkeys((*managing, *monitor, *_METRICS, "/", "/ping"), DEFAULT)
        endpoints = {path: _Endpoint(partial(self._serve, dialect, path)) for path, dialect in paths.items()}
        router = PathRouter(endpoints, _Endpoint(partial(self._serve, DEFAULT, "")), self._lifespan)
        # Each message of a WebSocket is a request, which has a replica of its own.
        self._asgi = BidirectionalStreams(router, self._context)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._asgi(scope, receive, send)

    def add_exception_handler(self, error: type[Exception], handler: object) -> None:
        """Ray 2.55 calls it on every application, for errors of its handles. They are errors of this one."""

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Router) -> AsyncIterator[None]:
        for model, deployment in self._deployments.items():
            handle = serve.get_deployment_handle(deployment)
            self._models[model] = handle.options(stream=True).answer
        yield

    async def _serve(self, dialect: Dialect, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        counts, bodies = self._context.counts, self._context.bodies
        exchange = Exchange(scope, receive, send, self._options, counts, dialect, bodies)
        exchange.route = path
        try:
            body = await exchange.body()
            page = await self._page(exchange, body) if scope["method"] in ("GET", "HEAD") else None
            if page is not None:
                await exchange.reply(page)
            else:
                model = await self._model_of(exchange, body)
                await self._forward(model, await self._request(exchange, body), exchange)
        except ClientGone:
            pass
        except RequestError as error:
            await exchange.fail(error)
        except Exception as error:
            if exchange.sent_head:
                raise
            logger.exception("%s: it failed", exchange.request_id)
            await exchange.fail(error)
        finally:
            exchange.release()

    async def _model_of(self, exchange: Exchange, body: bytes) -> str:
        """The model that the request is for. Raises RequestError."""
        if len(self._models) == 1:
            return next(iter(self._models))
        dialect, parameters = exchange.dialect, exchange.scope.get("path_params", {})
        name = parameters.get("model") or exchange.model_name
        if name is None and dialect.names_model and body:
            request = RawRequest(body, exchange.properties, exchange.route, parameters, exchange.query)
            name = await run_by_size(len(body), lambda: dialect.model_name(request))
        name = name or exchange.endpoint
        if name in self._models:
            return name
        if exchange.scope["method"] in ("GET", "HEAD") and name is None:
            return next(iter(self._models))
        known = ", ".join(self._models)
        if name is None:
            raise UnknownModelError(f"the request names no model: this cluster has {known}", name=None)
        raise UnknownModelError(f"there is no model named {name!r} here; there are {known}", name=name)

    async def _request(self, exchange: Exchange, body: bytes) -> ForwardedRequest:
        properties = exchange.properties
        session = next((properties[name] for name in _SESSIONS if properties.get(name)), "")
        keys: tuple[bytes, ...] = ()
        if self._prefixes and body and not session:
            keys = await run_by_size(len(body), lambda: prefix_keys(body))
        return ForwardedRequest.of(exchange.scope, body, session, keys)

    async def _forward(self, model: str, request: ForwardedRequest, exchange: Exchange) -> None:
        """Send the replica's response. What has no byte of it yet when its replica dies is sent to another one.

        A response that breaks off ends without its last chunk, so that no client takes it for a whole one.
        """
        for _ in range(_ATTEMPTS):
            call = ReplicaCall(model, self._models[model], request)
            gone = asyncio.ensure_future(_cancelled_when_gone(exchange, call))
            try:
                await self._send_all(call, exchange)
                return
            except _SlowReaderError:
                logger.warning("%s: the client does not read (option.stream_write_timeout)", exchange.request_id)
                exchange.abort()
                return
            except Exception as error:
                if gone.done():  # the call was cancelled because the client has left
                    return
                end = "broke off" if exchange.sent_head else "did not begin"
                logger.warning("%s: its response %s: %r", exchange.request_id, end, error)
                if exchange.sent_head:
                    return
                if not _is_lost(error):
                    await exchange.fail(error)
                    return
            finally:
                gone.cancel()
                call.cancel()
        raise _all_lost()

    async def _send_all(self, call: ReplicaCall, exchange: Exchange) -> None:
        """Raises NotReadyError, _SlowReaderError, and what the call raises."""
        head = await call.head()
        exchange.release()
        exchange.sent_head = True
        start = {"type": "http.response.start", "status": head.status, "headers": head.headers}
        await self._send(exchange, start, _body(head.body, more=not head.whole))
        if head.whole:
            return
        async for part in call.rest:
            await self._send(exchange, _body(part, more=True))
        await self._send(exchange, _body(b"", more=False))

    async def _send(self, exchange: Exchange, *messages: Message) -> None:
        rest = start_now(_sent(exchange, messages))
        if rest is not None:
            try:
                await asyncio.wait_for(rest, self._options.stream_write_timeout)
            except asyncio.TimeoutError:
                raise _SlowReaderError from None

    async def _page(self, exchange: Exchange, body: bytes) -> Reply | None:
        """A page that is not one replica's; None for others."""
        path, request = exchange.route, ForwardedRequest.of(exchange.scope, body)
        if path in _METRICS:
            return await self._metrics.reply(request)
        if path.startswith(MONITOR):
            return _NO_MONITOR
        if len(self._models) > 1 and path in self._health | _JOINED:
            return await self._page_of_all(path, request)
        return None

    async def _page_of_all(self, path: str, request: ForwardedRequest) -> Reply:
        """One page of those of all models: the worst, or if all are well, what is in any of them."""
        replies = await asyncio.gather(*(self._reply(model, request) for model in self._models))
        worst = max(replies, key=lambda reply: reply.status)
        if worst.status != 200 or path in self._health - _JOINED:
            return worst
        joined: dict[str, Any] = {}
        for reply in replies:
            for name, value in orjson.loads(reply.body or b"{}").items():
                joined[name] = [*joined.get(name, ()), *value] if type(value) is list else value
        return Reply.json(joined)

    async def _reply(self, model: str, request: ForwardedRequest) -> Reply:
        """A response that is no stream. If a replica dies, another one is asked.

        Raises NotReadyError, and what calls of replicas raise.
        """
        for _ in range(_ATTEMPTS):
            call = ReplicaCall(model, self._models[model], request)
            try:
                whole = await call.whole()
            except Exception as error:
                if not _is_lost(error):
                    raise
            else:
                return Reply(whole.status, whole.header(b"content-type"), whole.body)
            finally:
                call.cancel()
        raise _all_lost()


class _Endpoint:
    """An ASGI application (Starlette takes functions for something else)."""

    def __init__(self, serve: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(scope, receive, send)


def _is_lost(error: Exception) -> bool:
    """Whether the replica has died, or closed its port at its end."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code() is grpc.StatusCode.CANCELLED
    return isinstance(error, RayActorError)


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def _sent(exchange: Exchange, messages: Sequence[Message]) -> None:
    for message in messages:
        await exchange.send(message)


async def _cancelled_when_gone(exchange: Exchange, call: ReplicaCall) -> None:
    """Cancel the call of the replica when the client is gone."""
    while (await exchange.receive())["type"] != "http.disconnect":
        pass
    call.cancel()


def _all_lost() -> NotReadyError:
    return NotReadyError(f"{_ATTEMPTS} replicas died before they answered", retry_after=1)
