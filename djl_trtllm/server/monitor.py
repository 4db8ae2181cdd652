"""`/monitor`, the live page: its files, snapshots of a model, and the stream that sends them to the open pages.

A snapshot has numbers from statistics that are kept anyway, and never any text of a request.
"""

import asyncio
import hmac
import secrets
import time
from collections.abc import Callable, Iterable
from functools import cache
from heapq import nlargest
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson

from djl_trtllm.api.base import Reply
from djl_trtllm.api.front_end import front_end_error
from djl_trtllm.api.registry import DEFAULT
from djl_trtllm.batching.statistics import Histogram, RequestRecord
from djl_trtllm.config import Options
from djl_trtllm.errors import AuthenticationError, OverloadedError
from djl_trtllm.server.access import given_key
from djl_trtllm.server.context import find_model
from djl_trtllm.server.exchange import Exchange
from djl_trtllm.server.metrics import ModelFigures
from djl_trtllm.service.lifecycle import Registry, ServedModel
from djl_trtllm.version import __version__

_ROWS = 128
"""The most requests in a snapshot; live requests come first."""
_CLIENTS = 5
"""The most clients in a snapshot."""
_ENDED_ROWS = 32
"""Rows that are kept for ended requests, however many are live."""
_LONGEST_ID = 80
_LONGEST_FAILURE = 300


def snapshot(registry: Registry, name: str | None, began: float, now: float) -> dict[str, Any]:
    """Return the state of the server and of the model of that name (None: the first one).

    `began` and `now` are on the clock of the records (`time.monotonic`). Times in the snapshot are milliseconds since
    `began`.
    """
    models = registry.models
    model = next(iter(models.values()), None) if name is None else models.get(name)
    return {
        "clock": _milliseconds(now, began),
        "server": {"version": __version__, "uptime": now - began},
        "models": [{"name": each.name, "state": each.state.value} for each in models.values()],
        "model": None if model is None else _model(model, began),
    }


def _model(model: ServedModel, began: float) -> dict[str, Any]:
    figures = ModelFigures.of(model)
    statistics, stats = figures.statistics, figures.stats
    live = list(statistics.live.values())
    prefill = sum(each.sequences for each in live if each.started is not None and each.first_token_at is None)
    failure = model.failure
    return {
        "name": figures.name,
        "state": model.state.value,
        "failure": None if failure is None else str(failure).partition("\n")[0][:_LONGEST_FAILURE],
        "engine": figures.engine,
        "workers": figures.workers,
        "restarts": figures.restarts,
        "limits": _limits(model, figures),
        "memory": figures.memory,
        "live": len(live),
        "running": figures.running,
        "prefill": min(prefill, figures.running),
        "waiting": figures.waiting,
        "requests": statistics.requests,
        "prompt_tokens": statistics.prompt_tokens,
        "reused_prompt_tokens": statistics.reused_prompt_tokens,
        "generated_tokens": statistics.generated_tokens,
        "finished": {reason.name.lower(): count for reason, count in statistics.finished.items()},
        "kv": {"usage": stats.kv_usage, "blocks": stats.kv_blocks, "used": stats.kv_blocks_used},
        "latency": {
            "first_token": _buckets(statistics.time_to_first_token),
            "inter_token": _buckets(statistics.inter_token_latency),
        },
        "clients": _busiest(chain(live, statistics.ended)),
        "rows": [_row(each, began) for each in _shown(live, statistics.ended)],
    }


def _limits(model: ServedModel, figures: ModelFigures) -> dict[str, int | None] | None:
    """Sequences of all workers together, and tokens; None until there is an engine."""
    if figures.max_running is None:
        return None
    limits = model.model.limits
    return {
        "batch": figures.max_running,
        "queue": figures.max_waiting,
        "prompt": limits.max_input_len,
        "sequence": limits.max_seq_len,
    }


def _buckets(histogram: Histogram) -> dict[str, Any]:
    return {"bounds": histogram.bounds, "counts": histogram.counts}


def _busiest(records: Iterable[RequestRecord]) -> list[tuple[Any, ...]]:
    """Return the clients, those with most live requests first, each in the order of CLIENT in monitor.js."""
    clients: dict[str, list[int]] = {}
    for record in records:
        counts = clients.setdefault(record.origin.client_label, [0, 0, 0, 0])
        counts[0] += record.ended is None
        counts[1] += record.ended is None and record.started is None
        counts[2] += 1
        counts[3] += record.prompt_tokens + record.generated_tokens
    return [(name, *counts) for name, counts in nlargest(_CLIENTS, clients.items(), key=itemgetter(1))]


def _shown(live: list[RequestRecord], ended: Iterable[RequestRecord]) -> list[RequestRecord]:
    """The requests with a row, in the order of arrival; of too many, running ones are kept before waiting ones."""
    last = list(islice(reversed(list(ended)), max(_ENDED_ROWS, _ROWS - len(live))))
    ordered = sorted(live, key=lambda each: each.started is None) if len(live) > _ROWS else live
    return sorted([*ordered[: _ROWS - min(len(last), _ENDED_ROWS)], *last], key=lambda each: each.number)


def _row(record: RequestRecord, began: float) -> tuple[Any, ...]:
    """Return a request's row, in the order of ROW in monitor.js."""
    return (
        record.number,
        (record.origin.request_id or str(record.number))[:_LONGEST_ID],
        _milliseconds(record.arrived, began),
        _milliseconds(record.started, began),
        _milliseconds(record.first_token_at, began),
        _milliseconds(record.ended, began),
        record.prompt_tokens,
        record.reused_tokens,
        record.generated_tokens,
        record.sequences,
        None if record.reason is None else record.reason.name.lower(),
        record.origin.client_label,
        record.accepted_tokens,
        record.images,
        record.image_tokens,
    )


def _milliseconds(at: float | None, began: float) -> int | None:
    return None if at is None else round((at - began) * 1000)


PERIOD = 0.25
"""Seconds between two snapshots."""
MOST = 4
"""Pages that may watch at once."""
_RETRY_SECONDS = 5
_SLACK = 0.001
"""Timers may fire this much early."""
_HEADERS = (("X-Accel-Buffering", "no"),)
"""Headers of snapshots, so that proxies pass each one on at once."""


class Watchers:
    """The open pages of `/monitor`.

    A snapshot is made for the first page that asks in a period of 0.25 seconds, and all pages of a model share it.
    Without pages none is made, and a slow page skips snapshots.
    """

    def __init__(self, make: Callable[[str | None], bytes]) -> None:
        """`make` returns the snapshot of a model as JSON."""
        self.count = 0
        self._make = make
        self._made: dict[str | None, bytes] = {}
        self._period = -1
        self._closed = asyncio.Event()

    def close(self) -> None:
        """End the streams of all pages."""
        self._closed.set()

    async def watch(self, exchange: Exchange, name: str | None) -> None:
        """Send snapshots of a model until the page is closed. Raises OverloadedError."""
        if self.count >= MOST:
            raise OverloadedError(
                f"{self.count} pages watch already, and no more than {MOST} may; close one of them",
                queue_depth=self.count,
                capacity=MOST,
                retry_after=_RETRY_SECONDS,
            )
        self.count += 1
        now = asyncio.get_running_loop().time
        timeout = exchange.context.options.stream_write_timeout
        tasks = [asyncio.ensure_future(exchange.disconnected()), asyncio.ensure_future(self._closed.wait())]
        try:
            await exchange.begin(200, "text/event-stream; charset=utf-8", None, _HEADERS)
            while not any(task.done() for task in tasks):
                message = {"type": "http.response.body", "body": self._event(name), "more_body": True}
                sending = asyncio.ensure_future(exchange.send(message))
                # A page that does not read keeps this waiting, as long as a client of a stream may.
                await asyncio.wait({sending, *tasks}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if not sending.done():
                    sending.cancel()
                    exchange.abort()
                    return
                sending.result()
                pause = PERIOD - now() % PERIOD + _SLACK
                await asyncio.wait(tasks, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            if self._closed.is_set():
                await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self.count -= 1
            for task in tasks:
                task.cancel()

    def _event(self, name: str | None) -> bytes:
        """The snapshot of this period."""
        period = int(asyncio.get_running_loop().time() / PERIOD)
        if period != self._period:
            self._period = period
            self._made.clear()
        if name not in self._made:
            self._made[name] = b"data: " + self._make(name) + b"\n\n"
        return self._made[name]


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
_NEEDS_LINK = (
    "the live page needs the key in the link that the server shows on the terminal where it was started; "
    "SERVING_MONITOR=true shows it without a key"
)


class Monitor:
    """The handlers of the page, its files and its snapshots.

    Requests for snapshots need `key` in place of an API key; it is empty if the operator shows snapshots to all, or if
    there are API keys. A client's address does not decide: all clients of a proxy on this machine have a loopback
    address.
    """

    def __init__(self, registry: Registry, options: Options, *, api_keys: bool) -> None:
        self.shown = options.monitor is not False
        self.key = "" if options.monitor or api_keys else secrets.token_urlsafe(16)
        self._registry = registry
        self._began = time.monotonic()
        self._watchers = Watchers(self._snapshot)

    async def page(self, exchange: Exchange) -> Reply:
        return self._file(exchange, "monitor.html")

    async def file(self, exchange: Exchange) -> Reply:
        return self._file(exchange, exchange.scope["path_params"]["file"])

    async def events(self, exchange: Exchange) -> Reply | None:
        if not self.shown:
            return _nothing(exchange)
        if self.key and not hmac.compare_digest(given_key(exchange.headers).encode(), self.key.encode()):
            raise AuthenticationError(_NEEDS_LINK)
        name = exchange.query.get("model")
        if name is not None:
            find_model(self._registry, DEFAULT, name)
        if exchange.scope["method"] == "HEAD":
            return Reply(200, "text/event-stream; charset=utf-8", b"")
        await self._watchers.watch(exchange, name)
        return None

    def close(self) -> None:
        """End the streams of snapshots: the server ends."""
        self._watchers.close()

    def _file(self, exchange: Exchange, name: str) -> Reply:
        files = _files()
        return files[name] if self.shown and name in files else _nothing(exchange)

    def _snapshot(self, name: str | None) -> bytes:
        return orjson.dumps(snapshot(self._registry, name, self._began, time.monotonic()))


def _nothing(exchange: Exchange) -> Reply:
    return front_end_error(404, f"there is nothing at {exchange.scope['path']}")


@cache
def _files() -> dict[str, Reply]:
    """The page and its files, by name."""
    return {
        path.name: Reply(200, _TYPES[path.suffix], path.read_bytes(), _SECURITY)
        for path in _FOLDER.iterdir()
        if path.suffix in _TYPES
    }
