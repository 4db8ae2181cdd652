"""DJL's management API for models, which is also that of a SageMaker multi-model container.

    GET    /models            all of them, 100 on a page: `limit`, `next_page_token`
    POST   /models            register: `url` and `model_name`, in the query or as JSON
    GET    /models/{model}    describe
    PUT    /models/{model}    scale: `min_worker`, `max_worker`
    DELETE /models/{model}    unregister

Models are registered from the model store only, because their directories may contain code. A server without a model
store keeps the models that it was started with.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from djl_trtllm.api import Reply
from djl_trtllm.api.front_end import front_end_error, method_not_allowed
from djl_trtllm.api.json_body import read_json
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.server.exchange import Exchange
from djl_trtllm.service import Registry, ServedModel, State, open_source, prepare
from djl_trtllm.service.names import problem_of_name, problem_of_text

logger = logging.getLogger(__name__)

MODELS = "/models"
_CONFLICT, _NO_MEMORY, _FAILED = 409, 507, 500
_MOST_WORKERS = 64
_MOST_DIGITS = 19
_PAGE = 100
"""Models on one page, and the most that a request may ask for."""


class ModelRoutes:
    """The handlers. `store` is the folder of models that may be registered; without it, none may."""

    def __init__(self, registry: Registry, store: Path | None, shutdown_timeout: float) -> None:
        self._registry = registry
        self._store = store
        self._shutdown_timeout = shutdown_timeout
        self._work: dict[str, asyncio.Task[None]] = {}

    async def collection(self, exchange: Exchange) -> None:
        match exchange.scope["method"]:
            case "GET" | "HEAD":
                await exchange.reply(self._page(exchange.query))
            case "POST":
                await exchange.reply(await self._register(exchange))
            case _:
                await exchange.reply(method_not_allowed("this takes GET and POST", "GET, POST"))

    async def member(self, exchange: Exchange) -> None:
        name = exchange.scope["path_params"]["model"]
        model = self._registry.find(name)
        if model is None:
            await exchange.reply(front_end_error(404, f"there is no model named {name!r} here"))
            return
        match exchange.scope["method"]:
            case "GET" | "HEAD":
                await exchange.reply(Reply.json([_described(model)]))
            case "PUT":
                await exchange.reply(await self._scale(model, exchange.query))
            case "DELETE":
                await exchange.reply(await self._unregister(model))
            case _:
                await exchange.reply(method_not_allowed("this takes GET, PUT and DELETE", "GET, PUT, DELETE"))

    async def close(self) -> None:
        """Cancel the loads that still run."""
        for task in self._work.values():
            task.cancel()
        await asyncio.gather(*self._work.values(), return_exceptions=True)

    def _page(self, values: Mapping[str, str]) -> Reply:
        """The models in the order of their registration; `nextPageToken` is there if there are more."""
        limit = _count(values, "limit", _PAGE, _PAGE)
        if not isinstance(limit, int):
            return limit
        start = _count(values, "next_page_token", 0, sys.maxsize)
        if not isinstance(start, int):
            return start
        models = list(self._registry.models.values())
        end = start + max(1, limit)
        body: dict[str, Any] = {"models": [_listed(model) for model in models[start:end]]}
        if end < len(models):
            body["nextPageToken"] = str(end)
        return Reply.json(body)

    async def _register(self, exchange: Exchange) -> Reply:
        values = exchange.query
        body = await exchange.small_body()
        if body:
            try:
                given = read_json(body)
            except orjson.JSONDecodeError as error:
                return front_end_error(400, f"the body is not JSON: {error}")
            if not isinstance(given, dict):
                return front_end_error(400, "the body must be a JSON object with model_name and url")
            values = {key: str(value) for key, value in given.items() if value is not None} | values
        url = values.get("url", "")
        path = self._path(url)
        if isinstance(path, Reply):
            return path
        name = values.get("model_name") or path.name.removesuffix(".tar.gz")
        if (problem := problem_of_name(name, "a model")) is not None:
            return front_end_error(400, problem)
        if name in self._registry.models:
            return front_end_error(_CONFLICT, f"there is a model named {name!r} already: unregister it first")
        workers = _count(values, "min_worker", _count(values, "initial_workers", 1))
        if not isinstance(workers, int):
            return workers
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
        return front_end_error(_NO_MEMORY if "out of memory" in message.lower() else _FAILED, message, "ModelException")

    async def _load(self, model: ServedModel, path: Path, workers: int) -> None:
        # HF_MODEL_ID names the model that the server was started with.
        environ = {key: value for key, value in os.environ.items() if key != "HF_MODEL_ID"}
        with contextlib.suppress(DjlTrtllmError):  # `model.failure` has the reason, and the log
            await model.load(lambda: prepare(open_source(path, environ)), workers)

    def _path(self, url: str) -> Path | Reply:
        """The path in the model store that `url` names, or the reply that refuses it."""
        if self._store is None:
            return front_end_error(
                400, "this server registers no models: start it with --model-store DIR (SERVING_MODEL_STORE)"
            )
        if not url:
            return front_end_error(400, "Parameter url is required.")
        if (problem := problem_of_text(url, "Parameter url")) is not None:
            return front_end_error(400, problem)
        store = self._store.resolve()
        path = (store / url.removeprefix("file://")).resolve()
        if not path.is_relative_to(store) or path == store:
            return front_end_error(400, f"{url!r} is not in the model store: models are registered from there only")
        if not _exists(path):
            return front_end_error(404, f"there is no {url!r} in the model store")
        return path

    async def _scale(self, model: ServedModel, values: Mapping[str, str]) -> Reply:
        fewest = _count(values, "min_worker", len(model.workers))
        if not isinstance(fewest, int):
            return fewest
        most = _count(values, "max_worker", fewest)
        if not isinstance(most, int):
            return most
        if not 1 <= fewest <= most:
            message = f"min_worker={fewest} and max_worker={most}: expected 1 <= min_worker <= max_worker"
            return front_end_error(400, message)
        # The number of workers is fixed here: it is the minimum.
        if model.state is not State.READY:
            message = f"model {model.name} is {model.state.value}: it is scaled when it is ready"
            return front_end_error(_CONFLICT, message)
        try:
            await model.scale(fewest)
        except DjlTrtllmError as error:
            return front_end_error(_FAILED, str(error), "ModelException")
        status = f'Model "{model.name}" worker scaled. New Worker configuration min workers:{fewest} max workers:{most}'
        return Reply.json({"status": status})

    async def _unregister(self, model: ServedModel) -> Reply:
        if self._store is None:
            return method_not_allowed(
                "this takes GET and PUT: the server keeps the models that it was started with; models come and go in a "
                "server with --model-store DIR (SERVING_MODEL_STORE)",
                "GET, PUT",
            )
        # First this, so that no request finds it any more.
        stored = (self._store / model.source).resolve().is_relative_to(self._store.resolve())
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


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a part of it is too long for a name
        return False


def _count(values: Mapping[str, str], name: str, default: int | Reply, most: int = _MOST_WORKERS) -> int | Reply:
    value = values.get(name)
    if value is None:
        return default
    if not value.isdecimal() or len(value) > _MOST_DIGITS or int(value) > most:
        return front_end_error(400, f"{name} is {value[:80]!r}: expected a whole number up to {most}")
    return int(value)
