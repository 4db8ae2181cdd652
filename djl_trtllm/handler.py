"""DJL Serving's entry point in rolling batch mode.

With `option.entryPoint=djl_trtllm.handler` and `option.rolling_batch=enable`.

DJL's Python engine calls `handle` with its whole list of requests, again and again while there are any. Use it for
compatibility; async mode (`djl_trtllm.async_handler`) handles failures better (docs/deploying.md).
"""

import logging
import socket
from typing import Any

from djl_trtllm.djl import worker
from djl_trtllm.errors import DjlTrtllmError

try:
    from djl_python.outputs import Output  # type: ignore[import-not-found]
except ImportError as error:
    raise ImportError(
        "djl_trtllm.handler runs inside DJL Serving's Python engine, which provides djl_python; without DJL, serve the "
        "model with `djl-trtllm serve`"
    ) from error

logger = logging.getLogger(__name__)

_OK = worker.count(200) + worker.text("OK")
_QUIET = worker.content(worker.QUIET)


class BatchOutput(Output):  # type: ignore[misc]
    """The new items of each request of a batch, by position; written with one call."""

    def __init__(self, items: list[worker.Item | None]) -> None:
        super().__init__()
        self._items = items

    def send(self, cl_socket: socket.socket) -> None:
        """Write status, message, properties and contents; a header of item 3 is the property `batch_3_NAME`."""
        properties = [
            worker.text(f"batch_{index}_{name}") + worker.text(value)
            for index, item in enumerate(self._items)
            if item is not None
            for name, value in item.properties
        ]
        contents = [_QUIET if item is None else worker.content(item.encode()) for item in self._items]
        cl_socket.sendall(
            b"".join((_OK, worker.count(len(properties)), *properties, worker.count(len(contents)), *contents)),
        )


_worker: worker.RollingWorker | None = None


def handle(inputs: Any) -> Any:
    """DJL's first call has no content and loads the model; later calls have its list of requests."""
    global _worker
    if _worker is None:
        if worker.is_passive():
            return None
        properties = inputs.get_properties()
        try:
            worker.require_mode(properties, rolling=True)
            _worker = worker.RollingWorker(worker.open_worker_model(properties))
        except DjlTrtllmError as error:
            logger.error("%s", error)
            return Output(code=worker.load_status(error), message=str(error))
    return None if inputs.is_empty() else BatchOutput(_worker.step(inputs))


def register_adapter(inputs: Any) -> Any:
    # It reads the header of the weights, perhaps over a network: in DJL's thread, which waits for it in any case, and
    # not on the loop of the model, whose requests go on.
    return _output(worker.register(_loaded().service, inputs))


def update_adapter(inputs: Any) -> Any:
    return _output(_loaded().call(lambda service: worker.update(service, inputs)))


def unregister_adapter(inputs: Any) -> Any:
    return _output(_loaded().call(lambda service: worker.unregister(service, inputs)))


def _output(item: worker.Item) -> Any:
    return Output().add(item.encode(), key="data")


def _loaded() -> worker.RollingWorker:
    assert _worker is not None, "DJL loads the model before it calls anything else"
    return _worker
