"""What the live page shows of a model."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import orjson
import pytest

from djl_trtllm.batching.request_record import RequestRecord
from djl_trtllm.batching.statistics import Histogram, Statistics
from djl_trtllm.errors import ModelError
from djl_trtllm.executor.protocol import Delta, Stats
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, Origin
from djl_trtllm.server.monitor.snapshot import snapshot
from djl_trtllm.service import Registry, ServedModel
from djl_trtllm.version import __version__
from tests.support.in_process import PROMPT, Hosts, ask, played_model
from tests.support.virtual_time import in_virtual_time

BEGAN = 100.0


def record(number: int, **facts: Any) -> RequestRecord:
    """A request that arrived `number` seconds after the server began."""
    given = {"arrived": BEGAN + number, "prompt_tokens": 7, "sequences": 1, **facts}
    return RequestRecord(given.pop("origin", Origin(f"id-{number}")), number=number, **given)


def registry_of(*models: ServedModel) -> Registry:
    registry = Registry()
    for model in models:
        registry.add(model)
    return registry


def shown(model: ServedModel) -> dict[str, Any]:
    """The snapshot of the only model, as the page reads it."""
    result: dict[str, Any] = orjson.loads(orjson.dumps(snapshot(registry_of(model), None, BEGAN, BEGAN + 9)))
    return result


def with_statistics(statistics: Statistics) -> ServedModel:
    model = ServedModel("story", "/story")
    model.statistics = statistics
    return model


def rows(*, live: int = 0, ended: int = 0, waiting: int = 0) -> list[int]:
    """The numbers of the rows: requests that ended came first, then those that run, then those that wait."""
    statistics = Statistics()
    for number in range(1, ended + 1):
        statistics.ended.append(record(number, started=BEGAN, ended=BEGAN))
    for number in range(ended + 1, ended + live + waiting + 1):
        statistics.live[number] = record(number, started=BEGAN if number <= ended + live else None)
    return [row[0] for row in shown(with_statistics(statistics))["model"]["rows"]]


@in_virtual_time
async def test_a_model_without_a_request() -> None:
    found = shown(ServedModel("story", "/story"))
    assert found["server"] == {"version": __version__, "uptime": 9.0}
    assert (found["clock"], found["models"]) == (9000, [{"name": "story", "state": "loading"}])
    model = found["model"]
    assert (model["name"], model["state"], model["failure"]) == ("story", "loading", None)
    assert (model["engine"], model["limits"], model["memory"]) == (None, None, None)
    assert (model["running"], model["prefill"], model["waiting"], model["live"], model["rows"]) == (0, 0, 0, 0, [])
    assert model["kv"] == {"usage": None, "blocks": None, "used": None}


@in_virtual_time
async def test_the_model_is_the_one_that_is_named_else_the_first() -> None:
    registry = registry_of(ServedModel("story", "/a"), ServedModel("fable", "/b"))
    assert snapshot(registry, None, 0, 0)["model"]["name"] == "story"
    assert snapshot(registry, "fable", 0, 0)["model"]["name"] == "fable"
    gone = snapshot(registry, "hen", 0, 0)
    assert gone["model"] is None
    assert [each["name"] for each in gone["models"]] == ["story", "fable"]
    assert snapshot(Registry(), None, 0, 0)["model"] is None


@in_virtual_time
async def test_a_failure_is_shown_in_one_short_line() -> None:
    model = ServedModel("story", "/story")
    model.workers[0].fail(ModelError("no memory " + "x" * 500 + "\nTraceback"))
    found = shown(model)["model"]
    assert found["state"] == "failed"
    assert found["failure"].startswith("no memory x")
    assert len(found["failure"]) == 300
    model.workers[0].failure = ModelError("no memory\nTraceback")
    assert shown(model)["model"]["failure"] == "no memory"


@in_virtual_time
async def test_totals_are_those_of_the_metrics() -> None:
    statistics = Statistics(
        requests=11,
        prompt_tokens=14,
        reused_prompt_tokens=15,
        generated_tokens=16,
        finished=Counter({FinishReason.END_TOKEN: 12, FinishReason.CANCELLED: 13}),
        time_to_first_token=Histogram((0.5, 1.0)),
        inter_token_latency=Histogram((0.1,)),
    )
    statistics.time_to_first_token.observe(0.7, 3)
    model = shown(with_statistics(statistics))["model"]
    assert (model["requests"], model["prompt_tokens"], model["reused_prompt_tokens"]) == (11, 14, 15)
    assert (model["generated_tokens"], model["finished"]) == (16, {"end_token": 12, "cancelled": 13})
    assert model["latency"] == {
        "first_token": {"bounds": [0.5, 1.0], "counts": [0, 3, 0]},
        "inter_token": {"bounds": [0.1], "counts": [0, 0]},
    }


@in_virtual_time
async def test_a_row_has_times_and_numbers_and_no_text() -> None:
    statistics = Statistics()
    statistics.ended.append(
        record(
            3,
            started=BEGAN + 4,
            first_token_at=BEGAN + 4.5,
            ended=BEGAN + 6.0004,
            reused_tokens=5,
            generated_tokens=9,
            sequences=2,
            reason=FinishReason.LENGTH,
        )
    )
    statistics.live[4] = record(4, origin=Origin())
    found = shown(with_statistics(statistics))["model"]["rows"]
    assert found == [
        [3, "id-3", 3000, 4000, 4500, 6000, 7, 5, 9, 2, "length"],
        [4, "4", 4000, None, None, None, 7, 0, 0, 1, None],
    ]


@in_virtual_time
async def test_a_clients_id_is_cut() -> None:
    statistics = Statistics(live={1: record(1, origin=Origin("x" * 5000))})
    assert shown(with_statistics(statistics))["model"]["rows"][0][1] == "x" * 80


@pytest.mark.parametrize(
    ("live", "waiting", "ended", "shown"),
    [
        (2, 1, 3, [*range(1, 7)]),
        (10, 0, 300, [*range(183, 311)]),
        (120, 0, 300, [*range(269, 301), *range(301, 397)]),
        (200, 0, 0, [*range(1, 129)]),
        (100, 100, 5, [*range(1, 6), *range(6, 129)]),
    ],
)
@in_virtual_time
async def test_rows_are_bounded(live: int, waiting: int, ended: int, shown: list[int]) -> None:
    assert rows(live=live, waiting=waiting, ended=ended) == shown


@in_virtual_time
async def test_of_too_many_live_requests_those_that_run_have_a_row() -> None:
    statistics = Statistics(live={n: record(n, started=BEGAN if n > 150 else None) for n in range(1, 201)})
    found = shown(with_statistics(statistics))["model"]
    numbers = [row[0] for row in found["rows"]]
    assert numbers == [*range(1, 79), *range(151, 201)]
    assert found["live"] == 200


@in_virtual_time
async def test_a_request_from_the_queue_to_its_end(hosts: Hosts, tokenizer: Tokenizer) -> None:
    model = ServedModel("story", "/story")
    await model.load(lambda: played_model(tokenizer, max_rolling_batch_size=1, job_queue_size=5))
    (service,) = model.workers
    await ask(service, 2)
    await ask(service, 2)
    before = shown(model)["model"]
    assert (before["engine"], before["limits"]["batch"], before["limits"]["queue"]) == ("scripted", 1, 5)
    assert (before["running"], before["prefill"], before["waiting"], before["live"]) == (1, 1, 1, 2)
    hosts.last.step()
    decoding = shown(model)["model"]
    assert (decoding["running"], decoding["prefill"], decoding["waiting"]) == (1, 0, 1)
    hosts.last.step(3)
    after = shown(model)["model"]
    assert (after["running"], after["waiting"], after["live"]) == (0, 0, 0)
    assert [(row[8], row[10]) for row in after["rows"]] == [(2, "length")] * 2
    assert PROMPT.split()[1] not in str(after)
    await model.close()


@in_virtual_time
async def test_limits_are_those_of_all_workers(hosts: Hosts, tokenizer: Tokenizer) -> None:
    model = ServedModel("story", "/story")
    await model.load(lambda: played_model(tokenizer, max_rolling_batch_size=4, job_queue_size=5, max_seq_len=99), 2)
    found = shown(model)["model"]
    assert found["workers"] == 2
    assert found["limits"] == {"batch": 8, "queue": 10, "prompt": 1024, "sequence": 99}
    await model.close()


@in_virtual_time
async def test_the_kv_cache_is_as_in_the_metrics(hosts: Hosts, tokenizer: Tokenizer) -> None:
    model = ServedModel("story", "/story")
    await model.load(lambda: played_model(tokenizer), 2)
    assert shown(model)["model"]["kv"] == {"usage": None, "blocks": None, "used": None}
    for worker, usage in zip(model.workers, (0.5, 0.25), strict=True):
        assert worker.batch is not None
        worker.batch.engine_stats = Stats(kv_usage=usage, kv_blocks=8, kv_blocks_used=3)
    assert shown(model)["model"]["kv"] == {"usage": 0.5, "blocks": 16, "used": 6}
    await model.close()


@in_virtual_time
async def test_a_cancelled_request_stays_as_cancelled(hosts: Hosts, tokenizer: Tokenizer) -> None:
    model = ServedModel("story", "/story")
    await model.load(lambda: played_model(tokenizer))
    (service,) = model.workers
    asked = await ask(service, 9)
    hosts.last.send(Delta(0, [5], cached_tokens=3))
    service.cancel(asked.generations)
    (row,) = shown(model)["model"]["rows"]
    assert (row[7], row[10]) == (3, "cancelled")
    await model.close()


def test_what_is_remembered_is_bounded() -> None:
    assert isinstance(Statistics().ended, deque)
    assert Statistics().ended.maxlen
