"""DJL Serving's entry point in async mode: `option.entryPoint=djl_trtllm.async_handler`, `option.async_mode=true`.

DJL's Python engine calls `handle` on its event loop; the model runs on the same loop, its engine in a separate process.
Responses are those of the HTTP server. Every response ends with an item marked as the last, whatever happens.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable
from typing import Any

from djl_trtllm.config import Options
from djl_trtllm.djl import worker
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.service.clients import Clients
from djl_trtllm.service.engine import settle_garbage_collector
from djl_trtllm.service.lifecycle import ModelService
from djl_trtllm.telemetry import Telemetry

try:
    from djl_python.outputs import Output  # type: ignore[import-not-found]  # DJL's own
except ImportError as error:
    raise ImportError(
        "djl_trtllm.async_handler runs inside DJL Serving's Python engine, which provides djl_python; without DJL, "
        "serve the model with `djl-trtllm serve`"
    ) from error

logger = logging.getLogger(__name__)

_EXIT_DELAY_SECONDS = 1.0


class Worker:
    def __init__(self, service: ModelService, options: Options, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self.service = service
        self._options = options
        self._clients = Clients(options)
        self._streams = worker.Streams()
        self._metrics = worker.Metrics(service)
        self._print_metrics()

    @classmethod
    async def load(cls, properties: dict[str, Any]) -> "Worker":
        """Prepare and load the model. Raises DjlTrtllmError."""
        worker.require_mode(properties, rolling=False)
        loop = asyncio.get_running_loop()
        model = await asyncio.to_thread(worker.open_worker_model, properties)
        telemetry = Telemetry.open(model.options)

        def failed(error: DjlTrtllmError) -> None:
            # DJL starts another worker, up to its retry_threshold; the delay lets responses reach the clients first.
            # After a failed load, it lets DJL read the status of the load. DJL then kills this process
            # (PyProcess.predictStandard), except for models with a MAR-INF folder (PyModel: failOnInitialize): there
            # this process has to exit by itself, or it would take the next request for the load.
            loop.call_later(_EXIT_DELAY_SECONDS, os._exit, 1)

        service = ModelService(model.name, on_failed=failed)
        await service.load(model)
        settle_garbage_collector()
        return cls(service, model.options, telemetry)

    async def respond(self, inputs: Any) -> AsyncGenerator[worker.Streams, None]:
        """Generate for a request; yields what djl_python has to send."""
        stream = worker.Stream(self._streams, inputs.get_property("request_tracking_id"))
        properties = ((key, str(value)) for key, value in inputs.get_properties().items())
        served = worker.served_request(properties, self.service.name)
        writer = worker.ItemWriter(stream.put, self._options, served, self._telemetry)
        await worker.generate(self.service, self._clients, writer, lambda: bytes(inputs.get_as_bytes() or b""))
        try:
            async for streams in stream.carry():
                yield streams
        finally:
            # The response may have ended before its tokens did.
            self.service.cancel(served.generations)

    def change_adapters(self, change: Callable[[ModelService, Any], worker.Item], inputs: Any) -> Any:
        return Output().add(change(self.service, inputs).encode(), key="data")

    def _print_metrics(self) -> None:
        asyncio.get_running_loop().call_later(worker.METRICS_SECONDS, self._print_metrics)
        for line in self._metrics.lines():
            print(line, flush=True)


_worker: Worker | None = None


async def handle(inputs: Any) -> Any:
    """DJL's first call has no content and loads the model; every other one is a request."""
    global _worker
    if _worker is None:
        if worker.is_passive():
            return None
        try:
            _worker = await Worker.load(inputs.get_properties())
        except DjlTrtllmError as error:
            logger.error("%s", error)
            return Output(code=worker.load_status(error), message=str(error))
    return None if inputs.is_empty() else _worker.respond(inputs)


async def register_adapter(inputs: Any) -> Any:
    # It reads the header of the weights, perhaps over a network.
    return await asyncio.to_thread(_loaded().change_adapters, worker.register, inputs)


async def update_adapter(inputs: Any) -> Any:
    return _loaded().change_adapters(worker.update, inputs)


async def unregister_adapter(inputs: Any) -> Any:
    return _loaded().change_adapters(worker.unregister, inputs)


def _loaded() -> Worker:
    assert _worker is not None, "DJL loads the model before it calls anything else"
    return _worker
