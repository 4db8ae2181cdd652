"""Dialects' gRPC services, each on a port of its own: calls over the models of a registry, and the requests that run.

A dialect's `RpcService` says what a message means; connections, access, memory, streams and reports are here.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar
from urllib.parse import unquote

import grpc
from msgspec.structs import replace

from djl_trtllm.api.base import DEFECT, Dialect, ModelStatus, RpcService, error_headers
from djl_trtllm.batching.sequence import RequestState
from djl_trtllm.config import Options
from djl_trtllm.errors import ConfigError, RequestError, clipped
from djl_trtllm.logs import RequestContext
from djl_trtllm.request import OutputChunk, joined
from djl_trtllm.server.access import Role
from djl_trtllm.server.context import ServerContext, find_model, status_of
from djl_trtllm.service.clients import Caller, label
from djl_trtllm.service.lifecycle import ModelService, Registry, ServedModel, State, run_by_size, shutting_down
from djl_trtllm.telemetry import ServedRequest

logger = logging.getLogger(__name__)

Response = TypeVar("Response")
Handler: TypeAlias = Callable[[Any, Any, ServedRequest], Awaitable[Response]]
UnaryHandler: TypeAlias = Callable[[bytes, Any, ServedRequest], Awaitable[bytes]]
Deliver: TypeAlias = "Callable[[Running, OutputChunk], None]"

_STATUSES = {code: status for status in grpc.StatusCode for code in (status, status.value[0])}
"""gRPC's statuses, also by number."""
_LONGEST_MS = 2**31 - 1
_MOST_CALLS = 1024
"""The calls of one connection at the same time; further ones wait in the client."""
_MOST_RUNNING = 256
"""The requests of one stream at the same time: the next is read when one has ended."""
_FLUSH_SECONDS = 2
"""How long clients may take to read the last messages after every request has ended."""


class GrpcServer:
    """Serves the gRPC service of a dialect."""

    def __init__(self, context: ServerContext, dialect: Dialect, port: int) -> None:
        self._shared = context
        self._dialect = dialect
        self.option = dialect.rpc_port
        """The option that has set the port."""
        self._service = dialect.rpc_service()
        self._models = Models(context.registry, dialect)
        self._options = context.options
        self._port = port
        self._streams: set[GrpcStream] = set()
        self._server: Any = None
        self.bound_port = 0
        """The port that the service listens on: a free one if the option is 0."""

    def bind(self) -> None:
        """Take the port; calls wait until `start`. Raises ConfigError."""
        # A connection over HTTP has one request at a time, so its bound is that of calls here.
        self._server = grpc.aio.server(
            options=_channel_options(self._options), maximum_concurrent_rpcs=self._options.max_connections
        )
        handlers = grpc.method_handlers_generic_handler(self._service.name, self._handlers())
        self._server.add_generic_rpc_handlers((handlers,))
        address = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
        try:
            self.bound_port = self._add_port(f"{address}:{self._port}")
        except RuntimeError as error:
            raise ConfigError(
                f"{self.option}={self._port}: cannot listen on {address}:{self._port}: {error}; end the program "
                f"that uses the port, or set SERVING_{self.option.upper()} to another one or to 0 for none"
            ) from None

    async def start(self) -> None:
        """Answer calls."""
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
        service = self._service
        unary: dict[str, UnaryHandler] = {service.unary: self._answering(self.infer, Role.INFER)}
        for name in service.pages:
            unary[name] = self._answering(self._page(name), None if name in service.health else Role.INFER)
        for name, explanation in service.refused.items():
            unary[name] = _refusing(explanation)
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(self._counting(name, handler)) for name, handler in unary.items()
        }
        stream = self._counting(service.stream, self.stream)
        return handlers | {service.stream: grpc.stream_stream_rpc_method_handler(stream)}

    def _answering(self, handler: UnaryHandler, role: Role | None) -> UnaryHandler:
        async def answer(request: bytes, context: Any, served: ServedRequest) -> bytes:
            try:
                self._shared.access.check(role, served.headers)
                return await handler(request, context, served)
            except Exception as error:
                served.error = type(error).__name__
                await self._abort(context, error)
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
            self._shared.request_id(headers),
            "gRPC",
            name,
            headers,
            self._dialect.name,
            client=label(self._shared.clients.client(None, headers, _address(context.peer()))),
            status=grpc.StatusCode.CANCELLED.name,
            # The requests of a stream have lines of their own.
            reads=name != self._service.unary,
            quiet=name in self._service.health,
        )

    def _page(self, name: str) -> UnaryHandler:
        async def page(message: bytes, *_: Any) -> bytes:
            return self._service.page(name, message, self._models)

        return page

    async def infer(self, message: bytes, context: Any, served: ServedRequest) -> bytes:
        """Answer one request with one response."""
        response = WholeResponse()
        requests = self._requests(context)
        with self._shared.bodies.holding(len(message)):  # to the end: gRPC keeps it as long
            request = await requests.read(message, served)
            running = await requests.start(request, len(message), response.deliver, served, stream=False)
            context.set_trailing_metadata([(name.lower(), value) for name, value in running.headers])
            try:
                return await response.result
            finally:
                # The client may be gone.
                running.end()

    async def stream(self, requests: AsyncIterator[bytes], context: Any, served: ServedRequest) -> None:
        """Answer each request of a stream."""
        stream = None
        try:
            fails = self._service.error_ends_stream(_headers(context))
            stream = GrpcStream(context.write, self._requests(context), served, fails)
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
            await self._abort(context, error)
        finally:
            if stream is not None:
                self._streams.discard(stream)

    def _requests(self, context: Any) -> "RpcRequests":
        """The requests of a call, as those of its caller. Raises RequestError."""
        headers, shared = _headers(context), self._shared
        key = shared.access.check(Role.INFER, headers)
        caller = shared.clients.caller(None if key is None else key.name, headers, _address(context.peer()))
        return RpcRequests(shared, self._dialect, self._service, self._models, caller)

    async def _abort(self, context: Any, error: Exception) -> None:
        """End a call with the status of an error."""
        if isinstance(error, grpc.aio.AbortError):
            raise error
        status = grpc.StatusCode[self._service.status(error)]
        if not isinstance(error, RequestError):
            logger.error("a gRPC request failed", exc_info=error)
            await context.abort(status, DEFECT)
        metadata = tuple((name.lower(), value) for name, value in error_headers(error))
        await context.abort(status, str(error), metadata)


def _channel_options(options: Options) -> list[tuple[str, int]]:
    """Return gRPC's settings for the bounds that HTTP has too."""
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
    """Return the metadata of a call whose values are text."""
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


class Models:
    """The models of a registry, as an `RpcService` sees them."""

    def __init__(self, registry: Registry, dialect: Dialect) -> None:
        self._registry = registry
        self._dialect = dialect

    def all(self) -> Sequence[ModelStatus]:
        return [status_of(model) for model in self._registry.models.values()]

    def find(self, name: str) -> ModelStatus:
        return status_of(self.served(name))

    def served(self, name: str) -> ServedModel:
        """The model of that name. Raises UnknownModelError."""
        return find_model(self._registry, self._dialect, name or None)


@dataclass(eq=False)
class Running:
    """A request that runs: `unfinished` of its sequences. `named` has the model and the id that the client gave."""

    encoder: Any
    unfinished: int
    headers: Sequence[tuple[str, str]]
    service: ModelService
    served: ServedRequest
    caller: Caller
    named: tuple[str, str]
    generations: list[RequestState] = field(default_factory=list)
    ended: bool = False

    def encode(self, chunk: OutputChunk) -> bytes:
        data: bytes = self.encoder.encode(chunk)
        return data

    def end(self) -> None:
        """Cancel what still runs of the request. Called once."""
        self.service.cancel(self.generations)
        self.caller.leave()


@dataclass
class RpcRequests:
    """Reads and starts the requests of a call. Both methods raise RequestError."""

    shared: ServerContext
    dialect: Dialect
    service: RpcService
    models: Models
    caller: Caller

    async def read(self, message: bytes, served: ServedRequest) -> Any:
        served.client = self.caller.label
        request = await run_by_size(len(message), lambda: self.service.read(message))
        if request.id:
            served.id = self.shared.request_id({self.shared.options.request_id_header_key.lower(): request.id})
        served.model = clipped(request.model_name)
        return request

    async def start(self, request: Any, size: int, deliver: Deliver, served: ServedRequest, *, stream: bool) -> Running:
        """Start a request, whose chunks go to `deliver`. `size` is that of its message."""
        model = self.models.served(request.model_name)
        if model.state is State.DRAINING:
            raise shutting_down(model.name)
        served.model = model.name
        # The functions of a model directory run on the event loop.
        size = 0 if model.model.custom is not None else size
        call = await run_by_size(size, lambda: self.service.parse(request, model.model, stream=stream))
        service = model.pick()
        call = service.with_warnings(replace(call, origin=self.caller.origin(served.id, self.dialect.name)))
        named = (request.model_name, request.id)
        running = Running(call.encoder, call.sequences, call.headers, service, served, self.caller, named)
        self.shared.telemetry.began(served, call.requests)
        self.caller.enter()
        try:
            with RequestContext(served.id):
                states = await service.generate(call, lambda chunk: deliver(running, chunk))
        except BaseException:
            self.caller.leave()
            raise
        served.generations = running.generations = states
        return running


class WholeResponse:
    """The one response of a request by itself: `result` has it, or its error."""

    def __init__(self) -> None:
        self.result: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def deliver(self, running: Running, chunk: OutputChunk) -> None:
        if self.result.done():
            return
        try:
            if chunk.finished is not None and chunk.finished.error is not None:
                raise chunk.finished.error
            if data := running.encode(chunk):
                self.result.set_result(data)
        except Exception as error:
            self.result.set_exception(error)


@dataclass(eq=False)
class GrpcStream:
    """The requests of a stream and their responses, which `write` sends.

    Chunks that come while the client does not read are kept, and those of a sequence are sent together when it reads
    again; after `stream_write_timeout` seconds it is dropped. With `fails` the first error ends the stream.
    """

    write: Callable[[bytes], Awaitable[None]]
    requests: RpcRequests
    call: ServedRequest
    fails: bool

    def __post_init__(self) -> None:
        self._service = self.requests.service
        self._shared = self.requests.shared
        self._running: set[Running] = set()
        self._kept: dict[Running, list[OutputChunk]] = {}
        self._errors: list[bytes] = []
        self._failure: Exception | None = None
        self._room = asyncio.Semaphore(_MOST_RUNNING)
        self._wake = asyncio.Event()
        self._ending = self._slow = False
        self._task: asyncio.Task[None] | None = None

    def end(self) -> None:
        """End the stream when nothing runs any more, whatever the client does."""
        self._ending = True
        self._wake.set()

    async def run(self, requests: AsyncIterator[bytes]) -> None:
        """Run until the client has ended the stream and has every response.

        Raises SlowClient, and the error that ends the stream if one does.
        """
        self._task = asyncio.current_task()
        reader = asyncio.ensure_future(self._read(requests))
        reader.add_done_callback(lambda _: self._wake.set())
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await self._send()
                if (reader.done() or self._ending) and not (self._running or self._kept):
                    return
        except asyncio.CancelledError:
            if self._slow:
                raise SlowClient from None
            raise
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            for running in self._running:
                running.ended = True
                running.end()
                self._ended(running.served, grpc.StatusCode.CANCELLED.name)
            # The call itself ends only when its client reads or disconnects.
            self._kept.clear()

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _read(self, messages: AsyncIterator[bytes]) -> None:
        async for message in messages:
            await self._room.acquire()
            call, request = self.call, None
            served = ServedRequest(call.id, call.method, call.path, call.headers, call.dialect)
            try:
                with self._shared.bodies.holding(len(message)):
                    request = await self.requests.read(message, served)
                    running = await self.requests.start(request, len(message), self._deliver, served, stream=True)
            except asyncio.CancelledError:
                self._ended(served, grpc.StatusCode.CANCELLED.name)
                raise
            except Exception as error:
                self._room.release()
                self._ended(served, self._service.status(error), error)
                self._tell(error, ("", "") if request is None else (request.model_name, request.id))
                continue
            self._running.add(running)

    def _deliver(self, running: Running, chunk: OutputChunk) -> None:
        if not running.ended:
            self._kept.setdefault(running, []).append(chunk)
            running.unfinished -= chunk.finished is not None
            self._wake.set()

    # -- responses -----------------------------------------------------------------------------------------------------

    async def _send(self) -> None:
        while self._kept or self._errors or self._failure:
            if self._failure is not None:
                raise self._failure
            errors, self._errors = self._errors, []
            for data in errors:
                await self._put(data)
            kept, self._kept = self._kept, {}
            for running, chunks in kept.items():
                await self._send_chunks(running, joined(chunks))

    async def _send_chunks(self, running: Running, chunks: list[OutputChunk]) -> None:
        for chunk in chunks:
            try:
                data = running.encode(chunk)
            except Exception as error:
                self._fail(running, error)
                return
            if data:
                await self._put(data)
            if chunk.finished is not None and chunk.finished.error is not None:
                self._fail(running, chunk.finished.error)
                return
        if running.unfinished or running in self._kept:
            return
        if data := self._service.end(running.encoder):
            await self._put(data)
        self._forget(running)

    def _fail(self, running: Running, error: Exception) -> None:
        self._tell(error, running.named)
        self._forget(running, error)

    def _forget(self, running: Running, error: Exception | None = None) -> None:
        running.ended = True
        running.end()
        self._ended(running.served, "OK" if error is None else self._service.status(error), error)
        self._kept.pop(running, None)
        self._running.discard(running)
        self._room.release()

    def _ended(self, served: ServedRequest, status: str, error: Exception | None = None) -> None:
        served.status = status
        served.error = "" if error is None else type(error).__name__
        self._shared.telemetry.ended(served)

    def _tell(self, error: Exception, named: tuple[str, str]) -> None:
        if self.fails:
            self._failure = error
        elif isinstance(error, RequestError):
            self._errors.append(self._service.failure(str(error), *named))
        else:
            logger.error("a gRPC request failed", exc_info=error)
            self._errors.append(self._service.failure(DEFECT, *named))
        self._wake.set()

    async def _put(self, data: bytes) -> None:
        timer = asyncio.get_running_loop().call_later(self._shared.options.stream_write_timeout, self._drop)
        try:
            await self.write(data)
        finally:
            timer.cancel()

    def _drop(self) -> None:
        self._slow = True
        if self._task is not None:
            self._task.cancel()


class SlowClient(Exception):
    """The client of a stream has not read for `stream_write_timeout` seconds."""
