"""`/monitor`: the page, its files, and the stream of its snapshots."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import orjson
from starlette.types import Scope

from djl_trtllm.api import Reply
from djl_trtllm.api.front_end import front_end_error
from djl_trtllm.api.registry import DEFAULT
from djl_trtllm.config import Options
from djl_trtllm.server.exchange import Exchange
from djl_trtllm.server.find_model import find_model
from djl_trtllm.server.monitor.snapshot import snapshot
from djl_trtllm.server.monitor.watchers import Watchers
from djl_trtllm.service import Registry

PAGE = "/monitor"
_FOLDER = Path(__file__).with_name("page")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_SECURITY = (
    (
        "Content-Security-Policy",
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    ),
    ("Referrer-Policy", "no-referrer"),
)
_LOCAL_ONLY = (
    "the live page is for browsers on this machine, at a loopback address (http://localhost:PORT/monitor); "
    "SERVING_MONITOR=true shows it to others too"
)
_FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")


class Monitor:
    """The handlers, over the models of a registry."""

    def __init__(self, registry: Registry, options: Options) -> None:
        self._registry = registry
        self._shown = options.monitor
        self._began = time.monotonic()
        self._watchers = Watchers(self._snapshot)

    def shows(self, exchange: Exchange) -> bool:
        """Whether this client may have the page (`monitor`)."""
        return is_local(exchange.scope, exchange.properties) if self._shown is None else self._shown

    async def page(self, exchange: Exchange) -> None:
        await self._file(exchange, "monitor.html")

    async def file(self, exchange: Exchange) -> None:
        await self._file(exchange, exchange.scope["path_params"]["file"])

    async def events(self, exchange: Exchange) -> None:
        if not self.shows(exchange):
            await exchange.reply(self._nothing(exchange))
            return
        name = exchange.query.get("model")
        if name is not None:
            find_model(self._registry, DEFAULT, name)
        if exchange.scope["method"] == "HEAD":
            await exchange.reply(Reply(200, "text/event-stream; charset=utf-8", b""))
            return
        await self._watchers.watch(exchange, name)

    def close(self) -> None:
        """End the streams of snapshots: the server ends."""
        self._watchers.close()

    async def _file(self, exchange: Exchange, name: str) -> None:
        files = _files()
        if not self.shows(exchange) or name not in files:
            await exchange.reply(self._nothing(exchange))
            return
        await exchange.reply(files[name])

    def _nothing(self, exchange: Exchange) -> Reply:
        message = f"there is nothing at {exchange.scope['path']}"
        if self._shown is None and not self.shows(exchange):
            message += f": {_LOCAL_ONLY}"
        return front_end_error(404, message)

    def _snapshot(self, name: str | None) -> bytes:
        return orjson.dumps(snapshot(self._registry, name, self._began, time.monotonic()))


@cache
def _files() -> dict[str, Reply]:
    """The page and its files, by name."""
    return {
        path.name: Reply(200, _TYPES[path.suffix], path.read_bytes(), _SECURITY)
        for path in _FOLDER.iterdir()
        if path.suffix in _TYPES
    }


def is_local(scope: Scope, headers: Mapping[str, str]) -> bool:
    """Whether a browser on this machine asks: it connects to a loopback address, names one, and no proxy is between.

    The name matters because a website elsewhere can let its own name lead to 127.0.0.1 (DNS rebinding).
    """
    server = scope.get("server")
    if server is None or any(name in headers for name in _FORWARDED):
        return False
    try:
        named = urlsplit(f"//{headers.get('host', '')}").hostname or ""
    except ValueError:
        return False
    return _is_loopback(server[0]) and (named == "localhost" or _is_loopback(named))


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
