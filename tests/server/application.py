"""The routes over models on played hosts, and a client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from starlette.routing import Router

from djl_trtllm.batching.statistics import Histogram
from djl_trtllm.config import Options
from djl_trtllm.model import Tokenizer
from djl_trtllm.server.access import EVERYBODY, Access
from djl_trtllm.server.context import ServerContext
from djl_trtllm.server.management import ModelRoutes
from djl_trtllm.server.metrics import MetricsPage
from djl_trtllm.server.routes import Routes, SessionRequests
from djl_trtllm.service.clients import Clients, Sessions
from djl_trtllm.service.lifecycle import ServedModel
from tests.support.asgi import Client
from tests.support.in_process import PROMPT, played_model


class Application:
    """Routes over a registry, and their client."""

    def __init__(
        self,
        store: Path | None = None,
        max_request_size: int = 1000,
        sessions: Sessions | None = None,
        access: Access = EVERYBODY,
        clients: Clients | None = None,
        monitor: bool | None = None,
    ) -> None:
        self.lives: list[str] = []
        options = Options(
            max_request_size=max_request_size, stream_write_timeout=30.0, wlm_error_http_code=529, monitor=monitor
        )
        context = ServerContext(options, access=access)
        context.clients = clients or context.clients
        self.registry = context.registry
        self.counts = context.counts
        self.models = ModelRoutes(self.registry, store, 5.0)
        metrics = MetricsPage(self.registry, self.counts, Histogram())
        routes = Routes(context, self.models, metrics, SessionRequests(sessions))
        self.monitor = routes.monitor
        self.app = routes.router(self._life)
        self.client = Client(self.app)

    async def load(self, tokenizer: Tokenizer, name: str = "story", workers: int = 1, **options: Any) -> ServedModel:
        """Add a model and load it."""
        model = ServedModel(name, f"/{name}")
        self.registry.add(model)
        directory = options.pop("directory", Path("/story"))
        await model.load(lambda: played_model(tokenizer, directory, **options), workers)
        return model

    async def close(self) -> None:
        """End everything."""
        await self.models.close()
        for model in self.registry.models.values():
            await model.close()

    @asynccontextmanager
    async def _life(self, router: Router) -> AsyncIterator[None]:
        self.lives.append("begun")
        yield
        self.lives.append("ended")


@asynccontextmanager
async def application(tokenizer: Tokenizer | None = None, **options: Any) -> AsyncIterator[Application]:
    """An application, with a model `story` if there is a tokenizer; closed at the end.

    `store`, `max_request_size`, `sessions`, `access`, `clients` and `monitor` are the server's, the other options the
    model's.
    """
    names = ("store", "max_request_size", "sessions", "access", "clients", "monitor")
    application = Application(**{name: options.pop(name) for name in names if name in options})
    if tokenizer is not None:
        await application.load(tokenizer, **options)
    yield application
    await application.close()


def body(tokens: int = 4, *, stream: bool = False, **parameters: Any) -> bytes:
    """A request for tokens."""
    return orjson.dumps({"inputs": PROMPT, "parameters": {"max_new_tokens": tokens, **parameters}, "stream": stream})
