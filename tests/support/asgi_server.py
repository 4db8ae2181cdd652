"""An ASGI application behind real HTTP, in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager

import uvicorn
from starlette.types import ASGIApp

from tests.support.server import free_port


@contextmanager
def listening(application: Callable[[], AbstractAsyncContextManager[ASGIApp]]) -> Iterator[str]:
    """The address of the application, which lives in the thread's event loop until the block ends."""
    port = free_port()
    ready = threading.Event()
    servers: list[uvicorn.Server] = []

    async def serve() -> None:
        async with application() as app:
            config = uvicorn.Config(app, port=port, lifespan="off", ws="none", log_config=None, access_log=False)
            servers.append(uvicorn.Server(config))
            ready.set()
            await servers[0].serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(60)
        while not servers[0].started:
            assert thread.is_alive()
            ready.wait()
            thread.join(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        if servers:
            servers[0].should_exit = True
        thread.join(60)
        assert not thread.is_alive()
