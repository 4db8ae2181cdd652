"""Bursts of streams with the client of `djl-trtllm bench`: all at once, each on a connection of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson
import uvloop

from djl_trtllm.bench.client import Client, Reader, Stream, Target, TokenReader, clock


class Post(NamedTuple):
    """A request for a stream, and how its body is read."""

    path: str
    body: bytes
    reader: Callable[[Stream], Reader]


def post(path: str, body: dict[str, Any], reader: Callable[[Stream], Reader] = TokenReader) -> Post:
    return Post(path, orjson.dumps(body), reader)


def run_streams(port: int, requests: list[Post], *, timeout: float = 300.0) -> list[Stream]:
    """Send all requests at once and read every stream to its end. Ends the program if one fails."""
    with contextlib.closing(uvloop.new_event_loop()) as loop:
        streams = loop.run_until_complete(_run(port, requests, timeout))
    failed = [stream for stream in streams if stream.error is not None]
    if failed:
        sys.exit(f"{len(failed)} streams failed, the first with: {failed[0].error} {failed[0].detail}")
    return streams


async def _run(port: int, requests: list[Post], timeout: float) -> list[Stream]:
    client = Client(Target("127.0.0.1", port), timeout)
    readers = [request.reader(Stream(clock())) for request in requests]
    try:
        await asyncio.gather(
            *(
                client.send(client.target.request(request.path, request.body), reader)
                for request, reader in zip(requests, readers, strict=True)
            )
        )
    finally:
        client.close()
    return [reader.stream for reader in readers]


def wall_seconds(streams: list[Stream]) -> float:
    """From the first request to the last token."""
    return max(stream.times[-1] for stream in streams) - min(stream.sent for stream in streams)


def time_to_first_token(stream: Stream) -> float:
    """Seconds since the request was sent."""
    return stream.times[0] - stream.sent


def intervals(stream: Stream) -> list[float]:
    """Seconds between two tokens: of tokens that arrive together, each has its share of the time before them."""
    arrived = list(zip(stream.times, stream.counts, strict=True))
    return [
        (later - earlier) / count for (earlier, _), (later, count) in itertools.pairwise(arrived) for _ in range(count)
    ]


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie; nan for none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
