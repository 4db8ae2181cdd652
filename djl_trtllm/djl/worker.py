"""A DJL worker process: its model, its requests, what it logs, and the responses of its two modes.

In rolling batch mode DJL's engine calls repeatedly, from one thread, with its list of requests, and waits for the
result. The model runs on an event loop in a thread of its own. A call passes on new requests and returns all tokens
that have arrived for any request since the previous call.
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import uvloop
from msgspec.structs import replace

from djl_trtllm.api.base import Call, RawRequest, ResponseEncoder
from djl_trtllm.api.front_end import by_name, request_id, with_attributes
from djl_trtllm.api.registry import DEFAULT
from djl_trtllm.config import Options
from djl_trtllm.errors import DjlTrtllmError, InvalidRequestError, ModelError, RequestError
from djl_trtllm.logs import RequestContext, mark_lines, of_request
from djl_trtllm.request import OutputChunk
from djl_trtllm.service.clients import Clients
from djl_trtllm.service.engine import settle_garbage_collector
from djl_trtllm.service.lifecycle import ModelService, parse_call
from djl_trtllm.service.model import Model, open_source, prepare
from djl_trtllm.telemetry import ServedRequest, Telemetry

logger = logging.getLogger(__name__)

# -- a part of a response, as DJL's Java side reads it (`ai.djl.python.engine.Request.addResponse`) -------------------

_LENGTH = struct.Struct(">i")
_COUNT = struct.Struct(">h")


class Item(NamedTuple):
    """A part of the response to one request.

    `data` is UTF-8 text; DJL appends it to the body. The item with `last` ends the response, and has no data. With a
    `code`, an HTTP status, DJL sends `{"code", "error"}` instead of `data`, and answers with that status if it has sent
    nothing yet.
    `properties` become response headers until the first part is sent.
    """

    data: bytes = b""
    last: bool = False
    code: int | None = None
    error: str = ""
    properties: tuple[tuple[str, str], ...] = ()

    def encode(self) -> bytes:
        """`Output.binary_encode` of djl_python: the number of pairs, then keys and values, all as text."""
        if self.code is not None:
            return _ERROR_KEYS[0] + text(str(self.code)) + _ERROR_KEYS[1] + text(self.error) + _LAST
        return _DATA + _bytes(self.data) + (_LAST_KEY_TRUE if self.last else _LAST_KEY_FALSE)


def take(items: deque[Item]) -> Item:
    """Remove items of one request from the left and merge those that can be sent as one: not an error, nor the last.

    DJL marks a response as complete before it appends the last part to it (`ChunkedBytesSupplier.appendContent` of 0.34
    and 0.36): a client's thread that looks in between never gets that part. So nothing is in it.
    """
    whole = items.popleft()
    while items and items[0].code is None and whole.code is None and not items[0].last:
        more = items.popleft()
        whole = Item(whole.data + more.data, False, None, "", whole.properties + more.properties)
    return whole


def text(value: str) -> bytes:
    """Text on DJL's socket: its length in bytes, then UTF-8."""
    return _bytes(value.encode())


def content(value: bytes) -> bytes:
    """A content without a key on DJL's socket."""
    return b"\xff\xff\xff\xff" + _bytes(value)


def count(value: int) -> bytes:
    """A count or status on DJL's socket."""
    return _COUNT.pack(value)


def _bytes(value: bytes) -> bytes:
    return _LENGTH.pack(len(value)) + value


_DATA = count(2) + text("data")
_LAST_KEY_TRUE = text("last") + text("true")
_LAST_KEY_FALSE = text("last") + text("false")
_LAST = text("data") + text("") + _LAST_KEY_TRUE
_ERROR_KEYS = (count(4) + text("code"), text("error"))

QUIET = Item().encode()
"""An item without new data."""


_SUCCESS = 200


class ItemWriter:
    """Encodes the output of one request and emits items; exactly one of them is the last, and has no data.

    `served` is the request, which `telemetry` reports after that.
    """

    def __init__(
        self,
        put: Callable[[Item], None],
        options: Options,
        served: ServedRequest,
        telemetry: Telemetry,
    ) -> None:
        self.served = served
        self._telemetry = telemetry
        self.complete = False
        self._put = put
        self._options = options
        self._encoder: ResponseEncoder | None = None
        self._headers: tuple[tuple[str, str], ...] = ()
        self._unfinished: int
        self._begun = False

    def expect(self, call: Call) -> None:
        """Call when the request is parsed: its encoder makes the response from now on."""
        self._telemetry.began(self.served, call.requests)
        self._encoder = call.encoder
        self._headers = call.headers
        self._unfinished = call.sequences

    def deliver(self, chunk: OutputChunk) -> None:
        if self.complete:
            return
        assert self._encoder is not None
        finished = chunk.finished
        if finished is not None:
            self._unfinished -= 1
            if finished.error is not None and not self._begun:
                self.fail(finished.error)
                return
        try:
            data = self._encoder.encode(chunk)
        except Exception as error:
            self.fail(error)
            return
        last = not self._unfinished
        if data or last:
            self._send(data, last)

    def fail(self, error: Exception) -> None:
        """End the response with an error: a status if nothing was sent yet, else in the dialect's format."""
        if self.complete:
            return
        if not isinstance(error, RequestError):
            logger.error("a request failed", exc_info=error, extra=of_request(self.served.id))
        self.served.error = type(error).__name__
        encoder = self._encoder if self._begun else None
        if encoder is not None and isinstance(error, RequestError) and (data := encoder.error(error)):
            self._send(data, last=True)
            return
        reply = DEFAULT.encode_error(error, self._options)
        self._complete(reply.status)
        message = str(error) if isinstance(error, RequestError) else "Internal server error, see the server's log."
        self._put(Item(b"", True, reply.status, message, (("Content-Type", "application/json"), *reply.headers)))

    def _complete(self, status: int) -> None:
        self.complete = True
        self.served.status = status
        self._telemetry.ended_soon(self.served)

    def _send(self, data: bytes, last: bool) -> None:
        assert self._encoder is not None
        properties = () if self._begun else (("Content-Type", self._encoder.content_type), *self._headers)
        self._begun = True
        if last:
            self._complete(_SUCCESS)
        if data:
            self._put(Item(data, False, None, "", properties))
            properties = ()
        if last:
            self._put(Item(b"", True, None, "", properties))


# -- the model, and what is asked of it --------------------------------------------------------------------------------

METRICS_SECONDS = 60.0
_MPI_VARIABLES = ("OMPI_", "PMIX_", "PMI_", "PRTE_")


def is_passive() -> bool:
    """Whether mpirun started this process as one that never gets a request (`engine=MPI`).

    DJL then starts one process per GPU and talks to the first, which here runs the model on all GPUs.
    """
    return os.environ.get("OMPI_COMM_WORLD_RANK", "0") != "0"


def open_worker_model(properties: Mapping[str, Any]) -> Model:
    """The model that DJL's properties name, prepared to be run. Raises DjlTrtllmError.

    Reads the configuration from the directory and the environment, so that every value has its origin. Of DJL's own
    properties it uses only the path of a model that DJL has downloaded.
    """
    mark_lines()
    # The engine process must not join DJL's MPI world.
    for name in [name for name in os.environ if name.startswith(_MPI_VARIABLES)]:
        del os.environ[name]
    directory = Path(str(properties.get("model_dir") or Path.cwd()))
    source = open_source(directory, os.environ)
    given, own = properties.get("model_id"), source.config.options.model_id
    if given and given != own and Path(str(given)).is_dir():
        source = open_source(directory, os.environ, [f"option.model_id={given}"])
    return prepare(source, under_djl=True)


def require_mode(properties: Mapping[str, Any], *, rolling: bool) -> None:
    """Raise ModelError if DJL uses the handler in the other mode."""
    if (str(properties.get("rolling_batch") or "disable") != "disable") is rolling:
        return
    if rolling:
        raise ModelError(
            "option.entryPoint=djl_trtllm.handler is for DJL's rolling batch: set option.rolling_batch=enable (DJL "
            "Serving 0.36 turns auto into disable), or use option.entryPoint=djl_trtllm.async_handler with "
            "option.async_mode=true"
        )
    raise ModelError(
        "option.entryPoint=djl_trtllm.async_handler is for DJL's async mode: set option.async_mode=true and "
        "option.rolling_batch=disable, or use option.entryPoint=djl_trtllm.handler"
    )


def load_status(error: DjlTrtllmError) -> int:
    """The status that DJL gets for a model that failed to load; 507 means out of memory."""
    return 507 if "out of memory" in str(error).lower() else 500


def served_request(properties: Iterable[tuple[str, str]], model: str) -> ServedRequest:
    """Return the record that is reported at the end of a request; `properties` are its headers."""
    headers = by_name(properties)
    return ServedRequest(request_id(with_attributes(headers)), "DJL", "/invocations", headers, DEFAULT.name, model)


async def generate(service: ModelService, clients: Clients, writer: ItemWriter, read: Callable[[], bytes]) -> None:
    """Parse a request, whose body `read` returns, and bring it into the batch. An error is its response."""
    served = writer.served
    try:
        call = await parse_call(DEFAULT, RawRequest(read(), with_attributes(served.headers)), service.model)
        caller = clients.caller(None, served.headers, None)
        served.client = caller.label
        call = service.with_warnings(replace(call, origin=caller.origin(served.id, served.dialect)))
        writer.expect(call)
        with RequestContext(served.id):
            served.generations = await service.generate(call, writer.deliver)
    except Exception as error:
        writer.fail(error)


class Metrics:
    """Metrics for DJL's log: lines on stdout, totals since the previous ones."""

    def __init__(self, service: ModelService) -> None:
        self._service = service
        self._requests = 0
        self._tokens = 0
        self._dimensions = f"|#Model:{service.name},Host:{socket.gethostname()}"

    def lines(self) -> list[str]:
        """The new lines; empty while nothing happens. Format: `ai.djl.metric.Metric.parse`."""
        statistics, batch = self._service.statistics, self._service.batch
        requests, tokens = statistics.requests - self._requests, statistics.generated_tokens - self._tokens
        running, waiting = (batch.running, batch.waiting) if batch is not None else (0, 0)
        if not (requests or tokens or running or waiting):
            return []
        self._requests, self._tokens = statistics.requests, statistics.generated_tokens
        values = {"Requests": requests, "GeneratedTokens": tokens, "Running": running, "Waiting": waiting}
        return [f"[METRICS]{name}.Count:{value}{self._dimensions}" for name, value in values.items()]


# -- LoRA adapters -----------------------------------------------------------------------------------------------------

_FAILED = 424


def register(service: ModelService, inputs: Any) -> Item:
    """Register the adapter `name` from the model's own folder; `src` is its path there, or its absolute path."""
    name = inputs.get_property("name") or ""
    try:
        if not service.serves_adapters:
            raise InvalidRequestError("LoRA is not enabled: set option.enable_lora=true, on TensorRT-LLM or vLLM")
        service.adapters.register(name, inputs.get_property("src") or name)
    except RequestError as error:
        return Item(b"", True, _FAILED, str(error))
    return Item(f"Adapter {name} registered".encode(), True)


def update(service: ModelService, inputs: Any) -> Item:
    """Refuse: the engine keeps adapters by id, so changed weights need a new registration."""
    return Item(b"", True, _FAILED, "an adapter cannot be changed: unregister it, then register it again")


def unregister(service: ModelService, inputs: Any) -> Item:
    name = inputs.get_property("name") or ""
    try:
        service.adapters.unregister(name)
    except RequestError as error:
        return Item(b"", True, _FAILED, str(error))
    return Item(f"Adapter {name} unregistered".encode(), True)


# -- async mode --------------------------------------------------------------------------------------------------------

_TRACKING_ID = "request_tracking_id"
_OK = count(200) + text("OK")


class Stream:
    """The items of one request on their way to DJL, which identifies it by its tracking id."""

    def __init__(self, streams: "Streams", tracking_id: str) -> None:
        self._streams = streams
        self._tracking = text(_TRACKING_ID) + text(tracking_id)
        self._plain = _OK + count(1) + self._tracking + count(1)
        self._woken = asyncio.Event()
        self._carries = False
        self._complete = False

    def put(self, item: Item) -> None:
        """Send an item as soon as the socket accepts it."""
        if self._streams.add(self, item):
            self._carries = True
            self._woken.set()
        if item.last:
            self._complete = True
            self._woken.set()

    async def carry(self) -> "AsyncGenerator[Streams, None]":
        """Yield what djl_python is to send, until the response is complete."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            if self._carries:
                self._carries = False
                yield self._streams
            if self._complete and not self._carries:
                return

    def frame(self, item: Item) -> bytes:
        """An item as a frame on DJL's socket: status, message, properties, contents."""
        if not item.properties:
            return self._plain + content(item.encode())
        pairs = b"".join(text(key) + text(value) for key, value in item.properties)
        return _OK + count(1 + len(item.properties)) + self._tracking + pairs + count(1) + content(item.encode())


class Streams:
    """All items that wait to be sent. At most one reference to it is in djl_python's queue."""

    def __init__(self) -> None:
        # Appended on the event loop, drained in djl_python's sender thread.
        self._waiting: deque[tuple[Stream, Item]] = deque()
        self._queued = False

    def add(self, stream: Stream, item: Item) -> bool:
        """Add an item. True if `stream` has to put this object into the queue."""
        self._waiting.append((stream, item))
        if self._queued:
            return False
        self._queued = True
        return True

    # -- called by djl_python --------------------------------------------------------------------------------------

    def add_property(self, key: str, value: object) -> None:
        """Ignore the tracking id of the request that queued this object; every frame has its own."""

    def send(self, connection: socket.socket) -> None:
        # Reset first: an item added from now on is either seen below, or queued again.
        self._queued = False
        pending: dict[Stream, deque[Item]] = {}
        while self._waiting:
            stream, item = self._waiting.popleft()
            pending.setdefault(stream, deque()).append(item)
        frames: list[bytes] = []
        for stream, items in pending.items():
            while items:
                frames.append(stream.frame(take(items)))
        if frames:
            connection.sendall(b"".join(frames))


# -- rolling batch mode ------------------------------------------------------------------------------------------------

T = TypeVar("T")

_WAIT_SECONDS = 0.008
"""How long a call waits for the first item. Returning nothing at once would make DJL spin; waiting long would delay new
requests."""

_RESTART_SECONDS = 5.0
"""Interval between restarts of a model that has failed for good. Ending this process would not help: DJL (0.34 and
0.36) does not replace a worker that ends while idle, and refuses every later request with 400."""


class _Request:
    """One entry of DJL's list."""

    def __init__(self, arrived: threading.Event, options: Options, served: ServedRequest, telemetry: Telemetry) -> None:
        self.items: deque[Item] = deque()
        self.writer = ItemWriter(self._put, options, served, telemetry)
        self.abandoned = False
        self.arrived = arrived

    def _put(self, item: Item) -> None:
        self.items.append(item)
        if not self.arrived.is_set():
            self.arrived.set()


class RollingWorker:
    """A loaded model and a mirror of DJL's list. Call `step` from one thread only."""

    def __init__(self, model: Model) -> None:
        """Start the engine process. Raises ExecutorStartError."""
        self._model = model
        self._telemetry = Telemetry.open(model.options)
        self._clients = Clients(model.options)
        self.service = ModelService(model.name, on_failed=self._failed)
        self.metrics = Metrics(self.service)
        self._loaded = False
        self._loading: asyncio.Task[None] | None = None
        self._list: list[_Request] = []
        self.arrived = threading.Event()
        self.loop = uvloop.new_event_loop()
        # The thread lives as long as the process: Linux ends the engine process with the thread that started it.
        threading.Thread(target=self.loop.run_forever, name="model", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._load(), self.loop).result()

    def step(self, inputs: Any) -> list[Item | None]:
        """The items for DJL's list, by position; None where there is nothing new.

        `inputs` is DJL's batch. A request that DJL sends for the first time has a `seed` and comes after the earlier
        ones.
        """
        properties, content = inputs.get_properties(), inputs.get_content()
        size = int(properties["batch_size"])
        new = [int(key[6:9]) for key in content.get_keys() if key.endswith(".seed")]
        if "reset_rollingbatch" in properties or size - len(new) != len(self._list):
            self._drop_all()
        for index in new:
            self._list.append(self._begin(inputs, index, properties, content))
        # DJL keeps requests that were dropped here only if the lists differ, which should never happen.
        lost = size - len(self._list)
        self.arrived.wait(_WAIT_SECONDS)
        self.arrived.clear()
        items = [take(request.items) if request.items else None for request in self._list]
        if any(request.items for request in self._list):
            self.arrived.set()
        self._list = [request for request, item in zip(self._list, items, strict=True) if item is None or not item.last]
        gone = Item(b"", True, 500, "the request was lost between DJL Serving and its worker; it may be repeated")
        return [*([gone] * lost), *items]

    def call(self, work: Callable[[ModelService], T]) -> T:
        async def run() -> T:
            return work(self.service)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result()

    # -- in DJL's thread -------------------------------------------------------------------------------------------

    def _begin(self, inputs: Any, index: int, properties: dict[str, str], content: Any) -> _Request:
        prefix = f"batch_{index:03d}."
        own = ((key[len(prefix) :], str(value)) for key, value in properties.items() if key.startswith(prefix))
        served = served_request(own, self._model.name)
        request = _Request(self.arrived, self._model.options, served, self._telemetry)
        body = bytes(content.get(prefix + "data") or b"")
        asyncio.run_coroutine_threadsafe(self._generate(request, body), self.loop)
        return request

    def _drop_all(self) -> None:
        """Cancel everything: DJL has cleared its list, so nothing reads these responses."""
        dropped, self._list = self._list, []
        if dropped:
            logger.warning("DJL dropped %d running requests; they are cancelled", len(dropped))
            self.loop.call_soon_threadsafe(self._abandon, dropped)

    # -- on the event loop -----------------------------------------------------------------------------------------

    async def _load(self) -> None:
        await self.service.load(self._model)
        settle_garbage_collector()
        self._loaded = True
        self._print_metrics()

    async def _load_again(self) -> None:
        await self.service.close()
        self.service = ModelService(self._model.name, on_failed=self._failed)
        self.metrics = Metrics(self.service)
        # `_failed` has already run if this fails again.
        with contextlib.suppress(DjlTrtllmError):
            await self.service.load(self._model)

    async def _generate(self, request: _Request, body: bytes) -> None:
        await generate(self.service, self._clients, request.writer, lambda: body)
        if request.abandoned:
            self.service.cancel(request.writer.served.generations)

    def _abandon(self, requests: list[_Request]) -> None:
        for request in requests:
            request.abandoned = True
            self.service.cancel(request.writer.served.generations)

    def _failed(self, error: DjlTrtllmError) -> None:
        if self._loaded and self.service.retry_in is None:
            logger.error("restarting model %s in %g seconds", self._model.name, _RESTART_SECONDS)
            self.loop.call_later(_RESTART_SECONDS, self._restart)

    def _restart(self) -> None:
        self._loading = self.loop.create_task(self._load_again())

    def _print_metrics(self) -> None:
        self.loop.call_later(METRICS_SECONDS, self._print_metrics)
        for line in self.metrics.lines():
            print(line, flush=True)
