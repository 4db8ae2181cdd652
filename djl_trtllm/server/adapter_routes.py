"""DJL's management API for LoRA adapters: list, describe, register, unregister.

    GET    /models/{model}/adapters            all of them
    POST   /models/{model}/adapters?name=&src= register the adapter in the model's `adapters/SRC`
    GET    /models/{model}/adapters/{adapter}  one
    DELETE /models/{model}/adapters/{adapter}  unregister

and the same below `/adapters` on a server with one model.
"""

from __future__ import annotations

from typing import Any

from djl_trtllm.api import Reply
from djl_trtllm.api.front_end import front_end_error, method_not_allowed
from djl_trtllm.errors import InvalidRequestError, NotReadyError, UnknownAdapterError
from djl_trtllm.request import Adapter
from djl_trtllm.server.exchange import Exchange
from djl_trtllm.service import Registry, ServedModel, State

PATHS = ("/models/{model}/adapters", "/adapters")
"""The adapters of a named model, and of the only model."""


class AdapterRoutes:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def collection(self, exchange: Exchange) -> None:
        await exchange.reply(self._reply(exchange, self._collection))

    async def member(self, exchange: Exchange) -> None:
        await exchange.reply(self._reply(exchange, self._member))

    def _reply(self, exchange: Exchange, work: Any) -> Reply:
        model = self._registry.find(exchange.scope["path_params"].get("model"))
        if model is None:
            return front_end_error(404, "there is no such model here")
        if model.state is not State.READY:
            raise NotReadyError(f"model {model.name} is not ready")
        if not model.serves_adapters:
            return front_end_error(400, "LoRA is not enabled: set option.enable_lora=true, on TensorRT-LLM.")
        try:
            reply: Reply = work(exchange, model)
        except UnknownAdapterError as error:
            return front_end_error(404, str(error))
        except InvalidRequestError as error:
            return front_end_error(400, str(error))
        return reply

    def _collection(self, exchange: Exchange, model: ServedModel) -> Reply:
        if exchange.scope["method"] in ("GET", "HEAD"):
            return Reply.json({"adapters": [_described(adapter) for adapter in model.adapters]})
        if exchange.scope["method"] != "POST":
            return method_not_allowed("this takes GET and POST", "GET, POST")
        name = exchange.query.get("name", "")
        model.adapters.register(name, exchange.query.get("src") or name)
        return Reply.json({"status": f"Adapter {name} registered"})

    def _member(self, exchange: Exchange, model: ServedModel) -> Reply:
        name = exchange.scope["path_params"]["adapter"]
        if exchange.scope["method"] in ("GET", "HEAD"):
            return Reply.json(_described(model.adapters.find(name)))
        if exchange.scope["method"] != "DELETE":
            return method_not_allowed("this takes GET and DELETE", "GET, DELETE")
        model.adapters.unregister(name)
        return Reply.json({"status": f"Adapter {name} unregistered"})


def _described(adapter: Adapter) -> dict[str, Any]:
    return {"name": adapter.name, "src": adapter.path}
