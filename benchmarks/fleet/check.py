"""A server with the scripted executor, and the simulation of it, under the same requests."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
import uvloop

from benchmarks.fleet.arrivals import Lengths, Request, arrivals, steady
from benchmarks.fleet.replica import Scripted
from benchmarks.fleet.rules import Fixed
from benchmarks.fleet.simulation import ColdStart, Fleet, Simulation
from benchmarks.load import percentile
from benchmarks.servers import serving
from djl_trtllm.bench.client import Client, Stream, Target, TokenReader, clock
from tests.support.models import PROMPT, scripted_model

STEPS_PER_SECOND = 40.0
PLACES = 16
SHARE = 0.85
"""Of the server's places that the requests would keep busy, so that some of them wait."""


@dataclass(frozen=True)
class Row:
    """A figure of both."""

    name: str
    simulated: float
    measured: float

    @property
    def off(self) -> float:
        """The difference as a share of what was measured."""
        return abs(self.simulated - self.measured) / (self.measured or 1)


Measure = Callable[[Sequence[Request]], Sequence[Request]]
"""Sends requests to a server at their times. Returns what became of them."""


def compare(seconds: float, seed: int, measure: Measure | None = None) -> list[Row]:
    """Send the requests to a server, and to the simulation. Without `measure` it is a real one, as long as it takes."""
    lengths = Lengths(prompt=1, output=40)
    rate = SHARE * PLACES * STEPS_PER_SECOND / lengths.output
    planned = list(arrivals(steady(rate), rate, seconds, lengths, seed))
    fleet = Fleet(Scripted(STEPS_PER_SECOND), PLACES, PLACES, len(planned), ColdStart(0, 0, 0, 0), 0)
    simulated = Simulation(fleet, Fixed(1)).run([_again(each) for each in planned]).requests
    return _rows(simulated, (measure or _measure)(planned))


def _again(request: Request) -> Request:
    return Request(request.arrived, request.prompt_tokens, request.output_tokens)


def _measure(planned: Sequence[Request]) -> list[Request]:
    with tempfile.TemporaryDirectory() as folder:
        options = {"option.max_rolling_batch_size": PLACES, "job_queue_size": len(planned)}
        script = {"steps_per_second": STEPS_PER_SECOND, "max_sequences": PLACES}
        model = scripted_model(Path(folder) / "model", script, **options)
        with (
            serving(model, Path(folder)) as server,
            contextlib.closing(uvloop.new_event_loop()) as loop,
        ):
            return loop.run_until_complete(_send(server.port, planned))


async def _send(port: int, planned: Sequence[Request]) -> list[Request]:
    client = Client(Target("127.0.0.1", port), 300)
    begin = clock() + 0.2

    async def one(request: Request) -> Request:
        parameters = {"max_new_tokens": request.output_tokens}
        body = orjson.dumps({"inputs": PROMPT, "parameters": parameters, "stream": True})
        reader = TokenReader(Stream(clock()))
        await asyncio.sleep(begin + request.arrived - clock())
        sent = clock()
        await client.send(client.target.request("/invocations", body), reader)
        stream = reader.stream
        if stream.error is not None:
            raise RuntimeError(f"a request failed: {stream.error} {stream.detail}")
        return Request(
            sent - begin,
            request.prompt_tokens,
            request.output_tokens,
            first_token=stream.times[0] - begin,
            ended=stream.times[-1] - begin,
            outcome="complete",
        )

    try:
        return list(await asyncio.gather(*map(one, planned)))
    finally:
        client.close()


def _rows(simulated: Sequence[Request], measured: Sequence[Request]) -> list[Row]:
    figures = [_figures(each) for each in (simulated, measured)]
    return [Row(name, *(each[name] for each in figures)) for name in figures[0]]


def _figures(requests: Sequence[Request]) -> dict[str, float]:
    """Of the requests of a run."""
    first = [request.first_token - request.arrived for request in requests if request.first_token is not None]
    whole = [request.ended - request.arrived for request in requests if request.ended is not None]
    last = max(request.ended for request in requests if request.ended is not None)
    return {
        "tokens per second": sum(request.output_tokens for request in requests) / last,
        "seconds of a request, mean": statistics.mean(whole),
        "seconds of a request, p99": percentile(whole, 0.99),
        "time to first token, mean": statistics.mean(first),
        "time to first token, p99": percentile(first, 0.99),
        "requests in the server, mean": sum(whole) / last,
    }
