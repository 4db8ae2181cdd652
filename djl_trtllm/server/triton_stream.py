"""Requests of Triton's gRPC API while they run: one by itself, or several in one stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError

from djl_trtllm.api.headers import REQUEST_ID, request_id
from djl_trtllm.api.triton.dialect import TRITON
from djl_trtllm.api.triton.errors import DEFECT, status_of
from djl_trtllm.api.triton.message_bounds import require_little_work
from djl_trtllm.api.triton.protocol import ModelInferRequest
from djl_trtllm.api.triton.rpc import RpcEncoder, failure, parse_rpc
from djl_trtllm.batching.request_state import RequestState
from djl_trtllm.errors import InvalidRequestError, RequestError
from djl_trtllm.logs import RequestContext
from djl_trtllm.request import Origin, OutputChunk
from djl_trtllm.server.body_memory import BodyMemory
from djl_trtllm.service import ModelService, ServedModel
from djl_trtllm.service.clients import Caller
from djl_trtllm.service.worker_threads import run_by_size
from djl_trtllm.telemetry import ServedRequest, Telemetry
from djl_trtllm.telemetry.served_request import Asked

logger = logging.getLogger(__name__)

Deliver: TypeAlias = "Callable[[Running, OutputChunk], None]"
FindModel: TypeAlias = Callable[[Any], ServedModel]

_OK, _CANCELLED = "OK", "CANCELLED"
_MOST_RUNNING = 256
"""Requests of one stream: the next is read when one has ended."""


class Running:
    """A request that runs. `unfinished` counts its sequences."""

    def __init__(
        self,
        encoder: Any,
        sequences: int,
        headers: Iterable[tuple[str, str]],
        service: ModelService,
        served: ServedRequest,
        caller: Caller,
    ) -> None:
        self.served = served
        self.encoder: RpcEncoder = encoder
        self.unfinished = sequences
        self.headers = tuple(headers)
        self.generations: list[RequestState] = []
        self.ended = False
        self._encode = encoder.encode
        self._service = service
        self._caller = caller

    def encode(self, chunk: OutputChunk) -> bytes:
        data: bytes = self._encode(chunk)
        return data

    def end(self) -> None:
        """It is over for its client; what still runs is cancelled. Called once."""
        self._service.cancel(self.generations)
        self._caller.leave()


async def start(
    data: bytes,
    request: Any,
    find: FindModel,
    deliver: Deliver,
    served: ServedRequest,
    caller: Caller,
    *,
    streams: bool,
) -> Running:
    """Start a request, whose chunks go to `deliver`: `request` becomes the message of `data`. Raises RequestError."""
    await run_by_size(len(data), lambda: _read_message(request, data))
    if request.id:
        served.id = request_id({REQUEST_ID: request.id})
    served.model = request.model_name
    model = find(request)
    served.model = model.name
    size = 0 if model.model.custom is not None else len(data)
    call = await run_by_size(size, lambda: parse_rpc(request, model.model, streams=streams))
    service = model.pick()
    origin = Origin(served.id, TRITON.name, caller.share, caller.priority)
    call = service.with_warnings(call._replace(origin=origin))
    running = Running(call.encoder, call.sequences, call.headers, service, served, caller)
    served.asked = Asked.of(call.requests[0])
    caller.enter()
    try:
        with RequestContext(served.id):
            states = await service.generate(call, lambda chunk: deliver(running, chunk))
    except BaseException:
        caller.leave()
        raise
    served.generations = running.generations = states
    return running


def _read_message(request: Any, data: bytes) -> None:
    try:
        require_little_work(data, request.DESCRIPTOR)
        request.ParseFromString(data)
    except DecodeError:
        raise InvalidRequestError("the message is not a valid inference.ModelInferRequest") from None


class WholeResponse:
    """The one response of a request by itself."""

    def __init__(self) -> None:
        self._response: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def deliver(self, running: Running, chunk: OutputChunk) -> None:
        if self._response.done():
            return
        try:
            if chunk.finished is not None and chunk.finished.error is not None:
                raise chunk.finished.error
            if data := running.encode(chunk):
                self._response.set_result(data)
        except Exception as error:
            self._response.set_exception(error)

    async def of(self, running: Running) -> bytes:
        """Wait for it. Raises RequestError."""
        return await self._response


class TritonStream:
    """The requests of a stream of ModelStreamInfer and their responses, which `write` sends.

    Chunks that come while the client does not read are kept, and those of a sequence are sent together when it reads
    again; after `write_timeout` seconds it is dropped. With `fails` the first error ends the stream.
    """

    def __init__(
        self,
        write: Callable[[bytes], Awaitable[None]],
        find: FindModel,
        write_timeout: float,
        call: ServedRequest,
        telemetry: Telemetry,
        caller: Caller,
        bodies: BodyMemory,
        *,
        fails: bool,
    ) -> None:
        self._bodies = bodies
        self._call = call
        self._telemetry = telemetry
        self._write = write
        self._find = find
        self._write_timeout = write_timeout
        self._caller = caller
        self._fails = fails
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
        """Until the client has ended the stream and has every response.

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
                running.served.status = _CANCELLED
                self._telemetry.ended(running.served)
            # The call itself ends only when its client reads or disconnects.
            self._kept.clear()

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        async for data in requests:
            await self._room.acquire()
            request, call = ModelInferRequest(), self._call
            served = ServedRequest(call.id, call.method, call.path, call.headers, call.dialect)
            try:
                with self._bodies.holding(len(data)):
                    running = await start(data, request, self._find, self._deliver, served, self._caller, streams=True)
            except asyncio.CancelledError:
                served.status = _CANCELLED
                self._telemetry.ended(served)
                raise
            except Exception as error:
                self._room.release()
                self._ended(served, error)
                self._tell(error, request)
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
        if data := running.encoder.end():
            await self._put(data)
        self._forget(running)

    def _fail(self, running: Running, error: Exception) -> None:
        self._tell(error, running.encoder.head)
        self._forget(running, error)

    def _forget(self, running: Running, error: Exception | None = None) -> None:
        running.ended = True
        running.end()
        self._ended(running.served, error)
        self._kept.pop(running, None)
        self._running.discard(running)
        self._room.release()

    def _ended(self, served: ServedRequest, error: Exception | None) -> None:
        served.status = _OK if error is None else status_of(error).grpc
        served.error = "" if error is None else type(error).__name__
        self._telemetry.ended(served)

    def _tell(self, error: Exception, head: Any) -> None:
        if self._fails:
            self._failure = error
        elif isinstance(error, RequestError):
            self._errors.append(failure(str(error), head))
        else:
            logger.error("a gRPC request failed", exc_info=error)
            self._errors.append(failure(DEFECT, head))
        self._wake.set()

    async def _put(self, data: bytes) -> None:
        timer = asyncio.get_running_loop().call_later(self._write_timeout, self._drop)
        try:
            await self._write(data)
        finally:
            timer.cancel()

    def _drop(self) -> None:
        self._slow = True
        if self._task is not None:
            self._task.cancel()


class SlowClient(Exception):
    """The client of a stream has not read for `stream_write_timeout` seconds."""


def joined(chunks: list[OutputChunk]) -> list[OutputChunk]:
    """The chunks with those of a sequence joined to one."""
    if len(chunks) == 1:
        return chunks
    found: dict[tuple[int, int], OutputChunk] = {}
    for chunk in chunks:
        key = (chunk.generation, chunk.index)
        earlier = found.get(key)
        if earlier is None:
            found[key] = chunk
        else:
            tokens = [*earlier.tokens, *chunk.tokens]
            found[key] = OutputChunk(chunk.index, tokens, chunk.finished, chunk.generation)
    return list(found.values())
