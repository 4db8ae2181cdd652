"""Bursts of streams with the client of `djl-trtllm bench`, each on its own connection, and what benchmarks print."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import orjson
import uvloop

from djl_trtllm.bench.client import Client, Reader, Stream, Target, TokenReader, clock
from tests.support.server import Server


class Post(NamedTuple):
    """A request for a stream, and how its body is read."""

    path: str
    body: bytes
    reader: Callable[[Stream], Reader]


def post(path: str, body: dict[str, Any], reader: Callable[[Stream], Reader] = TokenReader) -> Post:
    return Post(path, orjson.dumps(body), reader)


def run_streams(port: int, requests: list[Post], *, timeout: float = 300.0, rate: float | None = None) -> list[Stream]:
    """Send all requests at once, or `rate` per second at random, and read every stream to its end.

    Ends the program if one fails.
    """
    with contextlib.closing(uvloop.new_event_loop()) as loop:
        streams = loop.run_until_complete(_run(port, requests, timeout, rate))
    failed = [stream for stream in streams if stream.error is not None]
    if failed:
        sys.exit(f"{len(failed)} streams failed, the first with: {failed[0].error} {failed[0].detail}")
    return streams


async def _run(port: int, requests: list[Post], timeout: float, rate: float | None) -> list[Stream]:
    client, chance = Client(Target("127.0.0.1", port), timeout), random.Random(len(requests))
    readers, sent = [], []
    try:
        for request in requests:
            if rate is not None:
                await asyncio.sleep(chance.expovariate(rate))
            readers.append(request.reader(Stream(clock())))
            data = client.target.request(request.path, request.body)
            sent.append(asyncio.ensure_future(client.send(data, readers[-1])))
        await asyncio.gather(*sent)
    finally:
        client.close()
    return [reader.stream for reader in readers]


@contextlib.contextmanager
def streaming(server: Server, request: Post, streams: int, seconds: float) -> Iterator[threading.Thread]:
    """This number of streams, which take about `seconds` and are read as they come; entered once all of them run."""
    thread = threading.Thread(
        target=run_streams, args=(server.port, [request] * streams), kwargs={"timeout": 10 * seconds}, daemon=True
    )
    thread.start()
    while server.metric("running") < streams:
        time.sleep(0.1)
    yield thread


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


class Burst(NamedTuple):
    """What clients notice of streams: tokens per second, and seconds to the first token and between two tokens."""

    rate: float
    first: list[float]
    between: list[float]

    @classmethod
    def of(cls, streams: list[Stream]) -> Burst:
        between = [gap for stream in streams for gap in intervals(stream)]
        rate = sum(stream.tokens for stream in streams) / wall_seconds(streams)
        return cls(rate, [time_to_first_token(stream) for stream in streams], between)


def compared(values: Sequence[float], others: Sequence[float], spread: str = "{:.2f}-{:.2f}") -> tuple[str, str]:
    """The median of the ratios of rounds, and the lowest and the highest."""
    ratios = [one / other for one, other in zip(values, others, strict=True)]
    return f"{statistics.median(ratios):.2f}", spread.format(min(ratios), max(ratios))


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie; nan for none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
