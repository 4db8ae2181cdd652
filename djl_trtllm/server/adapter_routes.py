"""DJL's management API for LoRA adapters: list, describe, register, unregister.

    GET    /models/{model}/adapters            all of them
    POST   /models/{model}/adapters?name=&src= register the adapter in the model's `adapters/SRC`; also as JSON
    GET    /models/{model}/adapters/{adapter}  one
    DELETE /models/{model}/adapters/{adapter}  unregister

and the same below `/adapters` on a server with one model, where SageMaker registers those of its inference components.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import orjson

from djl_trtllm.api import Reply
from djl_trtllm.api.front_end import front_end_error, method_not_allowed
from djl_trtllm.api.json_body import read_json
from djl_trtllm.api.parameters import BOOLEAN, IGNORED, TEXT, Parameter, Problems, Table
from djl_trtllm.errors import InvalidRequestError, NotReadyError, UnknownAdapterError
from djl_trtllm.request import Adapter
from djl_trtllm.server.exchange import Exchange
from djl_trtllm.service import Registry, ServedModel, State

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
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def collection(self, exchange: Exchange) -> None:
        body = await exchange.small_body() if exchange.scope["method"] == "POST" else b""
        await exchange.reply(await self._reply(exchange, partial(self._collection, body)))

    async def member(self, exchange: Exchange) -> None:
        await exchange.reply(await self._reply(exchange, self._member))

    async def _reply(self, exchange: Exchange, work: Any) -> Reply:
        model = self._registry.find(exchange.scope["path_params"].get("model"))
        if model is None:
            return front_end_error(404, "there is no such model here")
        if model.state is not State.READY:
            raise NotReadyError(f"model {model.name} is not ready")
        if not model.serves_adapters:
            return front_end_error(400, "LoRA is not enabled: set option.enable_lora=true, on TensorRT-LLM.")
        try:
            reply: Reply = await work(exchange, model)
        except UnknownAdapterError as error:
            return front_end_error(404, str(error))
        except InvalidRequestError as error:
            return front_end_error(400, str(error))
        return reply

    async def _collection(self, body: bytes, exchange: Exchange, model: ServedModel) -> Reply:
        if exchange.scope["method"] in ("GET", "HEAD"):
            return Reply.json({"adapters": [_described(adapter) for adapter in model.adapters]})
        if exchange.scope["method"] != "POST":
            return method_not_allowed("this takes GET and POST", "GET, POST")
        values = _FIELDS.read(_given(body), problems := Problems(), "field") | exchange.query
        problems.raise_any()
        name = values.get("name", "")
        # It reads the header of the weights, perhaps over a network.
        await asyncio.to_thread(model.adapters.register, name, values.get("src") or name)
        reply = Reply.json({"status": f"Adapter {_alias(exchange, name)} registered"})
        return reply._replace(headers=(_NOT_PINNED,)) if values.get("pin") in (True, "true") else reply

    async def _member(self, exchange: Exchange, model: ServedModel) -> Reply:
        name = exchange.scope["path_params"]["adapter"]
        if exchange.scope["method"] in ("GET", "HEAD"):
            return Reply.json(_described(model.adapters.find(name)))
        if exchange.scope["method"] != "DELETE":
            return method_not_allowed("this takes GET and DELETE", "GET, DELETE")
        model.adapters.unregister(name)
        return Reply.json({"status": f"Adapter {_alias(exchange, name)} unregistered"})


def _given(body: bytes) -> dict[str, Any]:
    """The members of a JSON body; none if it is empty."""
    if not body.strip():
        return {}
    try:
        given = read_json(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from None
    if type(given) is not dict:
        raise InvalidRequestError("the body must be a JSON object with name and src")
    return given


def _alias(exchange: Exchange, name: str) -> str:
    """The name by which SageMaker's users know the adapter."""
    return exchange.properties.get(_ALIAS) or name


def _described(adapter: Adapter) -> dict[str, Any]:
    return {"name": adapter.name, "src": adapter.path}
