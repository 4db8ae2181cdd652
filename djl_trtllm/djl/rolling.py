"""Rolling batch mode: DJL calls repeatedly with its list of requests and gets the new output of each.

DJL's engine calls from one thread and waits for the result. The model runs on an event loop in a thread of its own. A
call passes on new requests and returns all tokens that have arrived for any request since the previous call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import uvloop

from djl_trtllm.config import Options
from djl_trtllm.djl.items import Item, ItemWriter, take
from djl_trtllm.djl.worker import METRICS_SECONDS, Metrics, generate, served_request
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.service import Model, ModelService, settle_garbage_collector
from djl_trtllm.service.clients import Clients
from djl_trtllm.telemetry import ServedRequest, Telemetry

logger = logging.getLogger(__name__)

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
        self.writer = ItemWriter(self._put, options, served, telemetry.ended_soon)
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
