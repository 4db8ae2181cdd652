"""Triton's gRPC API on a port of its own, over the models of a registry."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from djl_trtllm.api import ModelStatus
from djl_trtllm.api.base import error_headers
from djl_trtllm.api.headers import request_id
from djl_trtllm.api.json_body import SMALL
from djl_trtllm.api.triton import description, protocol, refusals
from djl_trtllm.api.triton.dialect import TRITON
from djl_trtllm.api.triton.errors import DEFECT, status_of
from djl_trtllm.config import Options
from djl_trtllm.errors import (
    ConfigError,
    InvalidRequestError,
    NotReadyError,
    RequestError,
    UnknownModelError,
)
from djl_trtllm.logs import RequestContext
from djl_trtllm.server import find_model
from djl_trtllm.server.access import Role
from djl_trtllm.server.context import ServerContext
from djl_trtllm.server.triton_stream import SlowClient, TritonStream, WholeResponse, start
from djl_trtllm.service import Registry, ServedModel, State
from djl_trtllm.service.clients import Caller
from djl_trtllm.telemetry import ServedRequest

logger = logging.getLogger(__name__)

Response = TypeVar("Response")
Handler: TypeAlias = Callable[[Any, Any, ServedRequest], Awaitable[Response]]
UnaryHandler: TypeAlias = Callable[[bytes, Any, ServedRequest], Awaitable[bytes]]

_CODES = {
    "INVALID_ARG": grpc.StatusCode.INVALID_ARGUMENT,
    "NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "PERMISSION_DENIED": grpc.StatusCode.PERMISSION_DENIED,
    "UNAUTHENTICATED": grpc.StatusCode.UNAUTHENTICATED,
    "RESOURCE_EXHAUSTED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "INTERNAL": grpc.StatusCode.INTERNAL,
}
_STATUSES = {code: status for status in grpc.StatusCode for code in (status, status.value[0])}
"""gRPC's statuses, also by number."""
_LONGEST_MS = 2**31 - 1
_MOST_CALLS = 1024
"""Of one connection at the same time; further ones wait in the client."""
_FLUSH_SECONDS = 2
"""How long clients may take to read the last messages after every request has ended."""
_HEALTH = ("ServerLive", "ServerReady", "ModelReady")
"""The methods that need no API key."""
_ERRORS_END_STREAMS = ("triton_grpc_error", "true")
"""The metadata of clients that want the first error of a stream as its status."""


class TritonGrpcServer:
    """Serves `inference.GRPCInferenceService`."""

    def __init__(self, context: ServerContext, port: int) -> None:
        self._shared = context
        self._options = context.options
        self._port = port
        self._streams: set[TritonStream] = set()
        self._server: Any = None
        self.bound_port = 0
        """The port that it listens on, another one if it was to be any."""

    async def start(self) -> None:
        """Listen. Raises ConfigError."""
        # A connection over HTTP has one request at a time, so its bound is that of calls here.
        self._server = grpc.aio.server(
            options=_channel_options(self._options), maximum_concurrent_rpcs=self._options.max_connections
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(protocol.SERVICE, self._handlers()),)
        )
        address = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
        try:
            self.bound_port = self._add_port(f"{address}:{self._port}")
        except RuntimeError as error:
            raise ConfigError(
                [
                    f"triton_grpc_port={self._port}: cannot listen on {address}:{self._port}: {error}; end the program "
                    "that uses the port, or set SERVING_TRITON_GRPC_PORT to another one or to 0 for none"
                ]
            ) from None
        await self._server.start()

    def _add_port(self, address: str) -> int:
        options = self._options
        if options.certificate_file is None or options.private_key_file is None:
            return int(self._server.add_insecure_port(address))
        authorities = options.client_ca_file
        credentials = grpc.ssl_server_credentials(
            [(options.private_key_file.read_bytes(), options.certificate_file.read_bytes())],
            root_certificates=None if authorities is None else authorities.read_bytes(),
            require_client_auth=authorities is not None,
        )
        return int(self._server.add_secure_port(address, credentials))

    async def close(self) -> None:
        """Stop listening; responses that are complete may still be read for a moment. Call it when nothing runs."""
        if self._server is not None:
            server, self._server = self._server, None
            for stream in self._streams:
                stream.end()
            await server.stop(_FLUSH_SECONDS)

    def _handlers(self) -> dict[str, Any]:
        handlers = {}
        for method in protocol.methods():
            if method.name == "ModelStreamInfer":
                handlers[method.name] = grpc.stream_stream_rpc_method_handler(self._counting(method.name, self.stream))
                continue
            handler = self.infer if method.name == "ModelInfer" else self._page(method)
            role = None if method.name in _HEALTH else Role.INFER
            answering = self._counting(method.name, self._answering(handler, role))
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(answering)
        for name, explanation in refusals.METHODS.items():
            handlers[name] = grpc.unary_unary_rpc_method_handler(self._counting(name, _refusing(explanation)))
        return handlers

    def _answering(self, handler: UnaryHandler, role: Role | None) -> UnaryHandler:
        async def answer(request: bytes, context: Any, served: ServedRequest) -> bytes:
            try:
                self._shared.access.check(role, served.headers)
                return await handler(request, context, served)
            except Exception as error:
                served.error = type(error).__name__
                await _abort(context, error)
                raise AssertionError("abort always raises") from None

        return answer

    def _counting(self, name: str, handler: Handler[Response]) -> Callable[[Any, Any], Awaitable[Response]]:
        """Counts the calls of a method, and reports each at its end."""

        async def call(request: Any, context: Any) -> Response:
            served = self._begun(name, context)
            try:
                with RequestContext(served.id):
                    response = await handler(request, context, served)
                if not context.cancelled():  # a stream of requests ends where its client cancels the call
                    served.status = grpc.StatusCode.OK.name
            except grpc.aio.AbortError as error:
                served.status = _STATUSES[context.code()].name
                # The call keeps it, in a cycle. Its frames have the message and all that was made of it, which would
                # stay until garbage of this age is collected.
                error.__context__ = None
                raise error.with_traceback(None) from None
            finally:
                del request
                self._shared.counts.grpc_call(str(served.status))
                self._shared.telemetry.ended(served)
            return response

        return call

    def _begun(self, name: str, context: Any) -> ServedRequest:
        headers = _headers(context)
        return ServedRequest(
            request_id(headers, self._options.request_id_header_key),
            "gRPC",
            name,
            headers,
            TRITON.name,
            status=grpc.StatusCode.CANCELLED.name,
            # The requests of a stream have lines of their own.
            reads=name != "ModelInfer",
            quiet=name in _HEALTH,
        )

    # -- what needs no engine ------------------------------------------------------------------------------------------

    def _page(self, method: Any) -> UnaryHandler:
        read, response = (protocol.message(each.name) for each in (method.input_type, method.output_type))
        describe = _PAGES[method.name]

        async def page(message: bytes, *_: Any) -> bytes:
            if len(message) > SMALL:
                raise InvalidRequestError(f"the message has {len(message)} bytes: expected at most {SMALL}")
            try:
                request = read.FromString(message)
            except DecodeError:
                raise InvalidRequestError(f"the message is not a valid inference.{method.input_type.name}") from None
            # Statistics have more in JSON than in the messages that are here.
            made = json_format.ParseDict(
                describe(self._shared.registry, request), response(), ignore_unknown_fields=True
            )
            data: bytes = made.SerializeToString()
            return data

        return page

    # -- what generates ------------------------------------------------------------------------------------------------

    async def infer(self, request: bytes, context: Any, served: ServedRequest) -> bytes:
        """ModelInfer."""
        response = WholeResponse()
        message = protocol.ModelInferRequest()
        caller = self._caller(context)
        with self._shared.bodies.holding(len(request)):  # to the end: gRPC keeps it as long
            running = await start(request, message, self._model_for, response.deliver, served, caller, streams=False)
            if headers := [(name.lower(), value) for name, value in running.headers]:
                context.set_trailing_metadata(headers)
            try:
                return await response.of(running)
            finally:
                # The client may be gone.
                running.end()

    async def stream(self, requests: AsyncIterator[bytes], context: Any, served: ServedRequest) -> None:
        """ModelStreamInfer."""
        fails = any(pair[0] == _ERRORS_END_STREAMS[0] and pair[1] == "true" for pair in context.invocation_metadata())
        timeout, stream = self._options.stream_write_timeout, None
        try:
            caller = self._caller(context)
            stream = TritonStream(
                context.write,
                self._model_for,
                timeout,
                served,
                self._shared.telemetry,
                caller,
                self._shared.bodies,
                fails=fails,
            )
            self._streams.add(stream)
            await stream.run(requests)
        except SlowClient:
            logger.warning(
                "a client did not read its gRPC stream for %g seconds (option.stream_write_timeout) and is dropped",
                self._options.stream_write_timeout,
            )
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the client did not read")
        except Exception as error:
            served.error = type(error).__name__
            await _abort(context, error)
        finally:
            if stream is not None:
                self._streams.discard(stream)

    def _caller(self, context: Any) -> Caller:
        """Whose call it is. Raises RequestError."""
        headers = _headers(context)
        key = self._shared.access.check(Role.INFER, headers)
        return self._shared.clients.caller(None if key is None else key.name, headers, _address(context.peer()))

    def _model_for(self, request: Any) -> ServedModel:
        """The model that a request names. Raises RequestError."""
        model = _find(self._shared.registry, request.model_name, request.model_version)
        description.check_takes_requests(request.model_name)
        if model.state is State.DRAINING:
            raise NotReadyError(f"model {model.name} is shutting down")
        return model


def _channel_options(options: Options) -> list[tuple[str, int]]:
    """The bounds of HTTP, as far as gRPC has them."""
    idle, handshake = (
        min(round(seconds * 1000), _LONGEST_MS) for seconds in (options.keep_alive_timeout, options.header_read_timeout)
    )
    return [
        ("grpc.max_receive_message_length", options.max_request_size),
        ("grpc.max_metadata_size", options.max_header_size),
        ("grpc.absolute_max_metadata_size", options.max_header_size),
        ("grpc.max_allowed_incoming_connections", options.max_connections),
        ("grpc.max_concurrent_streams", _MOST_CALLS),
        ("grpc.server_handshake_timeout_ms", handshake),
        ("grpc.max_connection_idle_ms", idle),
        # A client that has vanished leaves a stream open, which the pings of an open connection notice.
        ("grpc.keepalive_time_ms", idle),
        # Otherwise a second server on this port takes half of the connections.
        ("grpc.so_reuseport", 0),
    ]


def _headers(context: Any) -> dict[str, str]:
    """The metadata of a call that are text."""
    return {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}


def _address(peer: str) -> str | None:
    """The address in gRPC's name of a peer, such as `ipv6:[::1]:5000`; None on a Unix socket."""
    family, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if family in ("ipv4", "ipv6") else None


def _refusing(explanation: str) -> UnaryHandler:
    async def refuse(_: bytes, context: Any, served: ServedRequest) -> bytes:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, explanation)
        raise AssertionError("abort always raises")

    return refuse


async def _abort(context: Any, error: Exception) -> None:
    """End a call with the status of an error."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, RequestError):
        logger.error("a gRPC request failed", exc_info=error)
        await context.abort(grpc.StatusCode.INTERNAL, DEFECT)
    metadata = tuple((name.lower(), value) for name, value in error_headers(error))
    await context.abort(_CODES[status_of(error).name], str(error), metadata)


def _find(registry: Registry, name: str, version: str = "") -> ServedModel:
    model = find_model.find_model(registry, TRITON, name or None)
    description.check_version(version, name)
    return model


def _models(registry: Registry, request: Any) -> list[ModelStatus]:
    if request.name:
        return [find_model.status_of(_find(registry, request.name, request.version))]
    return [find_model.status_of(model) for model in registry.models.values()]


def _server_ready(registry: Registry, _: Any) -> dict[str, Any]:
    models = registry.models.values()
    return {"ready": bool(models) and all(model.state is State.READY for model in models)}


def _model_ready(registry: Registry, request: Any) -> dict[str, Any]:
    """A model that is not there is not ready."""
    try:
        return {"ready": _find(registry, request.name, request.version).state is State.READY}
    except UnknownModelError:
        return {"ready": False}


def _model_metadata(registry: Registry, request: Any) -> dict[str, Any]:
    (model,) = _models(registry, request)
    description.require_context(model)
    return description.model_metadata(request.name or model.name)


def _model_config(registry: Registry, request: Any) -> dict[str, Any]:
    (model,) = _models(registry, request)
    return {"config": description.model_config(request.name or model.name, description.require_context(model))}


_PAGES: dict[str, Callable[[Registry, Any], dict[str, Any]]] = {
    "ServerLive": lambda registry, request: {"live": True},
    "ServerReady": _server_ready,
    "ModelReady": _model_ready,
    "ServerMetadata": lambda registry, request: description.server_metadata(),
    "ModelMetadata": _model_metadata,
    "ModelConfig": _model_config,
    "ModelStatistics": lambda registry, request: description.statistics(
        _models(registry, request), request.name or None
    ),
    "RepositoryIndex": lambda registry, request: {
        "models": description.repository_index(
            [find_model.status_of(model) for model in registry.models.values()], ready_only=request.ready
        )
    },
}
"""What each of these methods answers, as a dictionary of its message's fields."""
