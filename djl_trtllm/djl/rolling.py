"""Rolling batch mode: DJL calls again and again with its list of requests, and gets for each what has come up.

DJL's engine calls from one thread and waits for the answer. The model lives on an event loop in a thread of its own; a
call hands over the new requests and returns all tokens that have arrived for any request since the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from djl_trtllm.api.headers import properties as properties_of
from djl_trtllm.api.lmi.errors import StatusCodes
from djl_trtllm.batching.request_state import RequestState
from djl_trtllm.djl.item import Item, take
from djl_trtllm.djl.item_writer import ItemWriter, status_codes
from djl_trtllm.djl.worker import METRICS_SECONDS, Metrics
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.service import Model, ModelService, settle_garbage_collector

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PATIENCE_SECONDS = 0.008
"""How long a call waits for the first news. One that returned nothing at once would make DJL spin; one that waited for
long would keep new requests out."""

_AGAIN_SECONDS = 5.0
"""After the model has failed for good, it is started anew so often. Ending this process would be no help: DJL (0.34 and
0.36) does not replace a worker that ends while it has nothing to do, and refuses every later request with 400."""


class _Request:
    """A place in DJL's list."""

    def __init__(self, news: threading.Event, codes: StatusCodes) -> None:
        self.items: deque[Item] = deque()
        self.answer = ItemWriter(self._put, codes)
        self.generation: RequestState | None = None
        self.abandoned = False
        self._news = news

    def _put(self, item: Item) -> None:
        self.items.append(item)
        if not self._news.is_set():
            self._news.set()


class RollingWorker:
    """A loaded model and the mirror of DJL's list. `step` is called from one thread."""

    def __init__(self, model: Model) -> None:
        """Start the executor host. Raises ExecutorStartError."""
        self._model = model
        self._codes = status_codes(model.config.options)
        self._service = ModelService(model.name, on_failed=self._failed)
        self._metrics = Metrics(self._service)
        self._loaded = False
        self._loading: asyncio.Task[None] | None = None
        self._list: list[_Request] = []
        self._news = threading.Event()
        self._loop = _new_event_loop()
        # One thread to its end: Linux ends the host with the thread that started it.
        threading.Thread(target=self._loop.run_forever, name="model", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._load(), self._loop).result()

    def step(self, inputs: Any) -> list[Item | None]:
        """The items for DJL's list, by position; None for nothing new.

        `inputs` is DJL's batch. What it sends of a request for the first time has a `seed`, and follows what it sent
        before.
        """
        properties, content = inputs.get_properties(), inputs.get_content()
        size = int(properties["batch_size"])
        new = [int(key[6:9]) for key in content.get_keys() if key.endswith(".seed")]
        if "reset_rollingbatch" in properties or size - len(new) != len(self._list):
            self._drop_all()
        for index in new:
            self._list.append(self._begin(inputs, index, properties, content))
        # DJL goes on with requests that were dropped here only if the lists differ, which nothing should bring about.
        lost = size - len(self._list)
        self._news.wait(_PATIENCE_SECONDS)
        self._news.clear()
        items = [take(request.items) if request.items else None for request in self._list]
        if any(request.items for request in self._list):
            self._news.set()
        self._list = [request for request, item in zip(self._list, items, strict=True) if item is None or not item.last]
        gone = Item(b"", True, 500, "the request was lost between DJL Serving and its worker; it may be repeated")
        return [*([gone] * lost), *items]

    def call(self, work: Callable[[ModelService], T]) -> T:
        """Run `work` on the model's event loop."""

        async def run() -> T:
            return work(self._service)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    # -- in DJL's thread -------------------------------------------------------------------------------------------

    def _begin(self, inputs: Any, index: int, properties: dict[str, str], content: Any) -> _Request:
        request = _Request(self._news, self._codes)
        prefix = f"batch_{index:03d}."
        own = properties_of(
            (key[len(prefix) :], str(value)) for key, value in properties.items() if key.startswith(prefix)
        )
        body = bytes(content.get(prefix + "data") or b"")
        asyncio.run_coroutine_threadsafe(self._generate(request, body, own), self._loop)
        return request

    def _drop_all(self) -> None:
        """DJL has forgotten its list: nobody waits for these answers any more."""
        dropped, self._list = self._list, []
        if dropped:
            logger.warning("DJL dropped %d running requests; they are cancelled", len(dropped))
            self._loop.call_soon_threadsafe(self._abandon, dropped)

    # -- on the event loop -----------------------------------------------------------------------------------------

    async def _load(self) -> None:
        await self._service.load(self._model)
        settle_garbage_collector()
        self._loaded = True
        self._print_metrics()

    async def _load_again(self) -> None:
        await self._service.close()
        self._service = ModelService(self._model.name, on_failed=self._failed)
        self._metrics = Metrics(self._service)
        # Where it fails again, `_failed` has been told.
        with contextlib.suppress(DjlTrtllmError):
            await self._service.load(self._model)

    async def _generate(self, request: _Request, body: bytes, properties: dict[str, str]) -> None:
        try:
            call = self._service.model.parse(body, properties.get("content-type"), properties)
            request.answer.expect(call.encoder, call.request.sampling.n)
            request.generation = await self._service.generate(call, request.answer.deliver)
        except Exception as error:
            request.answer.fail(error)
            return
        if request.abandoned:
            self._service.cancel(request.generation)

    def _abandon(self, requests: list[_Request]) -> None:
        for request in requests:
            request.abandoned = True
            if request.generation is not None:
                self._service.cancel(request.generation)

    def _failed(self, error: DjlTrtllmError) -> None:
        if self._loaded:
            logger.error("model %s is started anew in %g seconds", self._model.name, _AGAIN_SECONDS)
            self._loop.call_later(_AGAIN_SECONDS, self._begin_again)

    def _begin_again(self) -> None:
        self._loading = self._loop.create_task(self._load_again())

    def _print_metrics(self) -> None:
        self._loop.call_later(METRICS_SECONDS, self._print_metrics)
        for line in self._metrics.lines():
            print(line, flush=True)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
