"""A simulated replica is a server's queue and batch: the same requests take as long in both."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import orjson
import pytest

from benchmarks.fleet.arrivals import Request
from benchmarks.fleet.check import PLACES, STEPS_PER_SECOND, compare
from djl_trtllm.api import RawRequest
from djl_trtllm.api.registry import DEFAULT
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import OutputChunk
from djl_trtllm.service import ModelService
from tests.support import virtual_time
from tests.support.in_process import PROMPT, Hosts, loaded


@pytest.mark.parametrize("seed", [1, 7])
def test_a_simulated_replica_has_the_figures_of_a_server(hosts: Hosts, tokenizer: Tokenizer, seed: int) -> None:
    def measure(planned: Sequence[Request]) -> list[Request]:
        return virtual_time.run(_send(hosts, tokenizer, planned))

    rows = compare(60, seed, measure)
    assert len(rows) == 6
    assert {row.name: row.off for row in rows if row.off > 0.02} == {}


async def _send(hosts: Hosts, tokenizer: Tokenizer, planned: Sequence[Request]) -> list[Request]:
    """What `benchmarks.fleet.check` does with a real server, in virtual time."""
    hosts.alone, hosts.step_seconds = True, 1 / STEPS_PER_SECOND
    service = await loaded(tokenizer, max_rolling_batch_size=PLACES, job_queue_size=len(planned))
    done = list(await asyncio.gather(*(_one(service, request) for request in planned)))
    await service.close()
    return done


async def _one(service: ModelService, request: Request) -> Request:
    clock = asyncio.get_running_loop().time
    times: list[float] = []
    ended = asyncio.Event()

    def took(update: OutputChunk) -> None:
        times.append(clock())
        if update.finished is not None:
            ended.set()

    await asyncio.sleep(request.arrived - clock())
    payload = {"inputs": PROMPT, "parameters": {"max_new_tokens": request.output_tokens}}
    arrived = clock()
    await service.generate(DEFAULT.parse(RawRequest(orjson.dumps(payload), {}), service.model), took)
    await ended.wait()
    return dataclasses.replace(request, arrived=arrived, first_token=times[0], ended=times[-1], outcome="complete")
