"""A DJL worker process: its model, its requests, what it logs, and the responses of its async mode."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from djl_trtllm.api import RawRequest
from djl_trtllm.api.front_end import by_name, request_id, with_attributes
from djl_trtllm.api.registry import DEFAULT
from djl_trtllm.djl.items import Item, ItemWriter, content, count, take, text
from djl_trtllm.errors import DjlTrtllmError, InvalidRequestError, ModelError, RequestError
from djl_trtllm.logs import RequestContext, mark_lines
from djl_trtllm.service import Model, ModelService, open_source, prepare
from djl_trtllm.service.clients import Clients
from djl_trtllm.service.lifecycle import parse_call
from djl_trtllm.telemetry import ServedRequest

logger = logging.getLogger(__name__)

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
        call = service.with_warnings(call._replace(origin=caller.origin(served.id, served.dialect)))
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
            raise InvalidRequestError("LoRA is not enabled: set option.enable_lora=true, on TensorRT-LLM")
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

    def __init__(self, streams: Streams, tracking_id: str) -> None:
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

    async def carry(self) -> AsyncGenerator[Streams, None]:
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
