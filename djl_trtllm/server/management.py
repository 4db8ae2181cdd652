"""DJL's management API for models, which is also that of a SageMaker multi-model container, and for LoRA adapters."""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from djl_trtllm.api.base import Reply, read_json
from djl_trtllm.api.parameters import BOOLEAN, IGNORED, TEXT, Parameter, Problems, Table
from djl_trtllm.errors import DjlTrtllmError, InvalidRequestError, NotReadyError, UnknownAdapterError
from djl_trtllm.request import Adapter
from djl_trtllm.server.exchange import Exchange, refused
from djl_trtllm.service.adapters import problem_of_name, problem_of_text
from djl_trtllm.service.lifecycle import Registry, ServedModel, State
from djl_trtllm.service.model import open_source, prepare_apart

logger = logging.getLogger(__name__)

MODELS = "/models"
_CONFLICT, _NO_MEMORY, _FAILED = 409, 507, 500
_MOST_WORKERS = 64
_MOST_DIGITS = 19
_PAGE = 100
"""Models on one page, and the most that a request may ask for."""


class ModelRoutes:
    """The handlers of models. `store` is the folder of models that may be registered; None: none may.

    GET    /models            all of them, 100 on a page: `limit`, `next_page_token`
    POST   /models            register: `url` and `model_name`, in the query or as JSON
    GET    /models/{model}    describe
    PUT    /models/{model}    scale: `min_worker`, `max_worker`
    DELETE /models/{model}    unregister

    Models are registered from the model store only, because their directories may contain code. A server without a
    model store keeps the models that it was started with.
    """

    def __init__(self, registry: Registry, store: Path | None, shutdown_timeout: float) -> None:
        self._registry = registry
        self._store = store
        self._shutdown_timeout = shutdown_timeout
        self._work: dict[str, asyncio.Task[None]] = {}

    async def close(self) -> None:
        """Cancel the loads that still run."""
        for task in self._work.values():
            task.cancel()
        await asyncio.gather(*self._work.values(), return_exceptions=True)

    async def page(self, exchange: Exchange) -> Reply:
        """The models in the order of their registration; `nextPageToken` is there if there are more."""
        values = exchange.query
        limit = _count(values, "limit", _PAGE, _PAGE)
        start = _count(values, "next_page_token", 0, sys.maxsize)
        models = list(self._registry.models.values())
        end = start + max(1, limit)
        body: dict[str, Any] = {"models": [_listed(model) for model in models[start:end]]}
        if end < len(models):
            body["nextPageToken"] = str(end)
        return Reply.json(body)

    async def register(self, exchange: Exchange) -> Reply:
        values = exchange.query
        body = await exchange.small_body()
        if body:
            given = _given(body, "model_name and url")
            values = {key: str(value) for key, value in given.items() if value is not None} | values
        url = values.get("url", "")
        path = self._path(url)
        name = values.get("model_name") or path.name.removesuffix(".tar.gz")
        if (problem := problem_of_name(name, "a model")) is not None:
            raise refused(400, problem)
        if name in self._registry.models:
            raise refused(_CONFLICT, f"there is a model named {name!r} already: unregister it first")
        workers = _count(values, "min_worker" if "min_worker" in values else "initial_workers", 1)
        model = ServedModel(name, url, at_startup=False)
        self._registry.add(model)
        task = self._start(name, self._load(model, path, max(1, workers)))
        if values.get("synchronous", "").lower() == "false":
            return Reply.json({"status": f'Model "{name}" registration scheduled.'}, 202)
        await asyncio.wait({task})
        if model.state is State.READY:
            return Reply.json({"status": f'Model "{name}" registered.'})
        self._registry.remove(model)
        await model.close()
        message = str(model.failure or "the model was unregistered while it was loading")
        raise refused(_NO_MEMORY if "out of memory" in message.lower() else _FAILED, message, "ModelException")

    async def _load(self, model: ServedModel, path: Path, workers: int) -> None:
        # HF_MODEL_ID names the model that the server was started with.
        environ = {key: value for key, value in os.environ.items() if key != "HF_MODEL_ID"}
        with contextlib.suppress(DjlTrtllmError):  # `model.failure` has the reason, and the log
            await model.load(lambda: prepare_apart(str(path), partial(open_source, path, environ)), workers)

    def _path(self, url: str) -> Path:
        """The path in the model store that `url` names."""
        if self._store is None:
            raise refused(400, "this server registers no models: start it with --model-store DIR (SERVING_MODEL_STORE)")
        if not url:
            raise refused(400, "Parameter url is required.")
        if (problem := problem_of_text(url, "Parameter url")) is not None:
            raise refused(400, problem)
        store = _real(self._store)
        path = _real(store / url.removeprefix("file://"))
        if not path.is_relative_to(store) or path == store:
            raise refused(400, f"{url!r} is not in the model store: models are registered from there only")
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise refused(404, f"there is no {url!r} in the model store") from None
        except OSError as error:
            raise refused(400, f"{url!r} in the model store: {error.strerror}") from None
        return path

    def _named(self, exchange: Exchange) -> ServedModel:
        name = exchange.scope["path_params"]["model"]
        model = self._registry.find(name)
        if model is None:
            raise refused(404, f"there is no model named {name!r} here")
        return model

    async def describe(self, exchange: Exchange) -> Reply:
        return Reply.json([_described(self._named(exchange))])

    async def scale(self, exchange: Exchange) -> Reply:
        model, values = self._named(exchange), exchange.query
        fewest = _count(values, "min_worker", len(model.workers))
        most = _count(values, "max_worker", fewest)
        if not 1 <= fewest <= most:
            message = f"min_worker={fewest} and max_worker={most}: expected 1 <= min_worker <= max_worker"
            raise refused(400, message)
        # The number of workers is fixed here: it is the minimum.
        if model.state is not State.READY:
            message = f"model {model.name} is {model.state.value}: it is scaled when it is ready"
            raise refused(_CONFLICT, message)
        try:
            await model.scale(fewest)
        except DjlTrtllmError as error:
            raise refused(_FAILED, str(error), "ModelException") from None
        status = f'Model "{model.name}" worker scaled. New Worker configuration min workers:{fewest} max workers:{most}'
        return Reply.json({"status": status})

    async def unregister(self, exchange: Exchange) -> Reply:
        model = self._named(exchange)
        if self._store is None:
            raise refused(
                405,
                "this takes GET and PUT: the server keeps the models that it was started with; models come and go in a "
                "server with --model-store DIR (SERVING_MODEL_STORE)",
                allow="GET, PUT",
            )
        # First this, so that no request finds it any more.
        stored = _real(self._store / model.source).is_relative_to(_real(self._store))
        self._registry.remove(model, lost=model.at_startup and not stored)
        task = self._work.get(model.name)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        await model.end(self._shutdown_timeout)
        return Reply.json({"status": f'Model "{model.name}" unregistered'})

    def _start(self, name: str, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._work[name] = task

        def forget(done: asyncio.Task[None]) -> None:
            if self._work.get(name) is done:
                del self._work[name]
            if not done.cancelled() and (error := done.exception()) is not None:
                logger.error("model %s: loading it failed", name, exc_info=error)

        task.add_done_callback(forget)
        return task


def _listed(model: ServedModel) -> dict[str, Any]:
    return {"modelName": model.name, "modelUrl": model.source, "status": model.state.name}


def _described(model: ServedModel) -> dict[str, Any]:
    batches = [worker.batch for worker in model.workers if worker.batch is not None]
    workers = [
        {"id": number, "status": worker.state.name, "pid": worker.pid} for number, worker in enumerate(model.workers)
    ]
    described: dict[str, Any] = {
        **_listed(model),
        "loadedAtStartup": model.at_startup,
        "requestInQueue": sum(batch.waiting for batch in batches),
        "workerGroups": [{"minWorkers": len(workers), "maxWorkers": len(workers), "workers": workers}],
    }
    if batches:
        limits = batches[0].limits
        described |= {"batchSize": limits.max_batch_size, "queueSize": limits.max_queue_size}
    if model.failure is not None:
        described["failure"] = str(model.failure)
    return {"workflowName": model.name, "models": [described]}


def _real(path: Path) -> Path:
    """Return the path without links; unlike `resolve`, of links to themselves too, which stay."""
    return Path(os.path.realpath(path))


def _count(values: Mapping[str, str], name: str, default: int, most: int = _MOST_WORKERS) -> int:
    value = values.get(name)
    if value is None:
        return default
    if not value.isdecimal() or len(value) > _MOST_DIGITS or int(value) > most:
        raise refused(400, f"{name} is {value[:80]!r}: expected a whole number up to {most}")
    return int(value)


PATHS = ("/models/{model}/adapters", "/adapters")
"""The adapters of a named model, and of the only model."""


_ALIAS = "x-amzn-sagemaker-adapter-alias"
_FIELDS = Table(
    (
        Parameter(("name",), TEXT, "name"),
        Parameter(("src",), TEXT, "src"),
        # The engine loads an adapter at its first request.
        Parameter(("preload",), target=IGNORED),
        Parameter(("pin",), BOOLEAN, "pin"),
    )
)
"""SageMaker's body."""
_NOT_PINNED = ("Warning", '299 djl-trtllm "pin has no effect: the engine keeps the adapters that were used last"')


class AdapterRoutes:
    """The handlers of adapters.

    GET    /models/{model}/adapters            all of them
    POST   /models/{model}/adapters?name=&src= register the adapter in the model's `adapters/SRC`; also as JSON
    GET    /models/{model}/adapters/{adapter}  one
    DELETE /models/{model}/adapters/{adapter}  unregister

    They are below `/adapters`, too, on a server with one model: SageMaker registers there the adapters of its inference
    components.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def list(self, exchange: Exchange) -> Reply:
        with self._serving(exchange) as model:
            return Reply.json({"adapters": [_adapter(adapter) for adapter in model.adapters]})

    async def register(self, exchange: Exchange) -> Reply:
        body = await exchange.small_body()
        with self._serving(exchange) as model:
            given = _given(body, "name and src") if body.strip() else {}
            values = _FIELDS.read(given, problems := Problems(), "field") | exchange.query
            problems.raise_any()
            name = values.get("name", "")
            # It reads the header of the weights, perhaps over a network.
            await asyncio.to_thread(model.adapters.register, name, values.get("src") or name)
        reply = Reply.json({"status": f"Adapter {_alias(exchange, name)} registered"})
        return reply._replace(headers=(_NOT_PINNED,)) if values.get("pin") in (True, "true") else reply

    async def describe(self, exchange: Exchange) -> Reply:
        with self._serving(exchange) as model:
            return Reply.json(_adapter(model.adapters.find(exchange.scope["path_params"]["adapter"])))

    async def unregister(self, exchange: Exchange) -> Reply:
        name = exchange.scope["path_params"]["adapter"]
        with self._serving(exchange) as model:
            model.adapters.unregister(name)
        return Reply.json({"status": f"Adapter {_alias(exchange, name)} unregistered"})

    @contextlib.contextmanager
    def _serving(self, exchange: Exchange) -> Iterator[ServedModel]:
        """The model of the request, which serves adapters; their errors are statuses of this API."""
        model = self._registry.find(exchange.scope["path_params"].get("model"))
        if model is None:
            raise refused(404, "there is no such model here")
        if model.state is not State.READY:
            raise NotReadyError(f"model {model.name} is not ready")
        if not model.serves_adapters:
            raise refused(400, "LoRA is not enabled: set option.enable_lora=true, on TensorRT-LLM or vLLM.")
        try:
            yield model
        except UnknownAdapterError as error:
            raise refused(404, str(error)) from None
        except InvalidRequestError as error:
            raise refused(400, str(error)) from None


def _given(body: bytes, expected: str) -> dict[str, Any]:
    """Return the members of a JSON body; `expected` names them in errors."""
    try:
        given = read_json(body)
    except orjson.JSONDecodeError as error:
        raise refused(400, f"the body is not JSON: {error}") from None
    if type(given) is not dict:
        raise refused(400, f"the body must be a JSON object with {expected}")
    return given


def _alias(exchange: Exchange, name: str) -> str:
    """The name by which SageMaker's users know the adapter."""
    return exchange.properties.get(_ALIAS) or name


def _adapter(adapter: Adapter) -> dict[str, Any]:
    return {"name": adapter.name, "src": adapter.path}
