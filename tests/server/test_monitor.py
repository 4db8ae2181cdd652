"""What the live page shows of a model."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import orjson
import pytest

import djl_trtllm.server.monitor
from djl_trtllm.batching.statistics import Histogram, RequestRecord, Statistics
from djl_trtllm.config import Options
from djl_trtllm.errors import ModelError, OverloadedError
from djl_trtllm.executor.protocol import Stats
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, RequestOrigin
from djl_trtllm.server.access import Access, ApiKey, Role
from djl_trtllm.server.context import ServerContext
from djl_trtllm.server.exchange import Exchange
from djl_trtllm.server.monitor import MOST, PERIOD, Watchers, snapshot
from djl_trtllm.service.lifecycle import Registry, ServedModel
from djl_trtllm.version import __version__
from tests.server.application import Application, application
from tests.support.asgi import Connection
from tests.support.in_process import PROMPT, Hosts, ask, played_model

BEGAN = 100.0


def record(number: int, **facts: Any) -> RequestRecord:
    """A request that arrived `number` seconds after the server began."""
    given = {"arrived": BEGAN + number, "prompt_tokens": 7, "sequences": 1, **facts}
    return RequestRecord(given.pop("origin", RequestOrigin(f"id-{number}")), number=number, **given)


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


async def test_a_model_without_a_request() -> None:
    found = shown(ServedModel("story", "/story"))
    assert found["server"] == {"version": __version__, "uptime": 9.0}
    assert (found["clock"], found["models"]) == (9000, [{"name": "story", "state": "loading"}])
    model = found["model"]
    assert (model["name"], model["state"], model["failure"]) == ("story", "loading", None)
    assert (model["engine"], model["limits"], model["memory"]) == (None, None, None)
    assert (model["running"], model["prefill"], model["waiting"], model["live"], model["rows"]) == (0, 0, 0, 0, [])
    assert model["kv"] == {"usage": None, "blocks": None, "used": None}


async def test_the_model_is_the_one_that_is_named_else_the_first() -> None:
    registry = registry_of(ServedModel("story", "/a"), ServedModel("fable", "/b"))
    assert snapshot(registry, None, 0, 0)["model"]["name"] == "story"
    assert snapshot(registry, "fable", 0, 0)["model"]["name"] == "fable"
    gone = snapshot(registry, "hen", 0, 0)
    assert gone["model"] is None
    assert [each["name"] for each in gone["models"]] == ["story", "fable"]
    assert snapshot(Registry(), None, 0, 0)["model"] is None


async def test_a_failure_is_shown_in_one_short_line() -> None:
    model = ServedModel("story", "/story")
    model.workers[0].fail(ModelError("no memory " + "x" * 500 + "\nTraceback"))
    found = shown(model)["model"]
    assert found["state"] == "failed"
    assert found["failure"].startswith("no memory x")
    assert len(found["failure"]) == 300
    model.workers[0].failure = ModelError("no memory\nTraceback")
    assert shown(model)["model"]["failure"] == "no memory"


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
            accepted_tokens=6,
            sequences=2,
            reason=FinishReason.LENGTH,
            images=2,
            image_tokens=4,
        )
    )
    statistics.live[4] = record(4, origin=RequestOrigin(client_label="web-app"))
    found = shown(with_statistics(statistics))["model"]["rows"]
    assert found == [
        [3, "id-3", 3000, 4000, 4500, 6000, 7, 5, 9, 2, "length", "", 6, 2, 4],
        [4, "4", 4000, None, None, None, 7, 0, 0, 1, None, "web-app", None, 0, 0],
    ]


async def test_the_busiest_clients_come_first() -> None:
    statistics = Statistics()

    def sent(number: int, client: str, **facts: Any) -> RequestRecord:
        return record(number, origin=RequestOrigin(client_label=client), **facts)

    for number, client in enumerate(("done", "done", "done", "flood", "a", "b", "c", "d"), 1):
        statistics.ended.append(sent(number, client, started=BEGAN, ended=BEGAN, generated_tokens=10))
    for number in range(10, 15):
        statistics.live[number] = sent(number, "flood", started=BEGAN if number < 12 else None)
    statistics.live[20] = sent(20, "light", started=BEGAN, generated_tokens=1)
    found = shown(with_statistics(statistics))["model"]["clients"]
    assert found[:3] == [["flood", 5, 3, 6, 52], ["light", 1, 0, 1, 8], ["done", 0, 0, 3, 51]]
    assert len(found) == 5


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
async def test_rows_are_bounded(live: int, waiting: int, ended: int, shown: list[int]) -> None:
    assert rows(live=live, waiting=waiting, ended=ended) == shown


async def test_of_too_many_live_requests_those_that_run_have_a_row() -> None:
    statistics = Statistics(live={n: record(n, started=BEGAN if n > 150 else None) for n in range(1, 201)})
    found = shown(with_statistics(statistics))["model"]
    numbers = [row[0] for row in found["rows"]]
    assert numbers == [*range(1, 79), *range(151, 201)]
    assert found["live"] == 200


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


async def test_a_snapshot_has_the_figures_of_all_workers(hosts: Hosts, tokenizer: Tokenizer) -> None:
    model = ServedModel("story", "/story")
    lengths: dict[str, Any] = {"max_input_len": 50, "max_seq_len": 70}
    await model.load(lambda: played_model(tokenizer, max_rolling_batch_size=3, job_queue_size=5, **lengths), 2)
    model.workers[1].restarts = 4
    for worker, used in zip(model.workers, (11, 7), strict=True):
        assert worker.batch is not None
        worker.batch.engine_stats = Stats(kv_usage=used / 100, kv_blocks=100, kv_blocks_used=used)
    await ask(model.workers[0], n=2, do_sample=True)
    found = shown(model)["model"]
    assert (found["workers"], found["restarts"], found["memory"]) == (2, 4, 2 * hosts.resident)
    assert found["limits"] == {"batch": 6, "queue": 10, "prompt": 50, "sequence": 70}
    assert found["kv"] == {"usage": 0.11, "blocks": 200, "used": 18}
    assert (found["live"], found["running"], found["prefill"]) == (1, 2, 2)
    await model.close()


# The streams of snapshots.


class Pages:
    """Watchers with numbered snapshots, and pages that watch."""

    def __init__(self) -> None:
        self.made: list[str | None] = []
        self.watchers = Watchers(self._make)

    def _make(self, name: str | None) -> bytes:
        self.made.append(name)
        return b"%d" % len(self.made)

    def open(self, name: str | None = None) -> Connection:
        async def app(scope: object, receive: object, send: object) -> None:
            options = Options(stream_write_timeout=30.0)
            exchange = Exchange(page.scope, page.receive, page.send, ServerContext(options))
            await self.watchers.watch(exchange, name)

        page = Connection("GET", "/monitor/events")
        return page.begin(app)


@asynccontextmanager
async def opened(number: int, *names: str | None):  # type: ignore[no-untyped-def]
    """Pages that have had their first snapshot."""
    pages = Pages()
    connections = [pages.open(*names) for _ in range(number)]
    await asyncio.sleep(0.01)
    yield pages, connections
    for connection in connections:
        connection.leave()
    await asyncio.gather(*(each.end() for each in connections))
    assert pages.watchers.count == 0


def events(page: Connection) -> list[bytes]:
    return [part.removeprefix(b"data: ").removesuffix(b"\n\n") for part in page.parts]


async def test_a_page_gets_four_snapshots_a_second() -> None:
    async with opened(1) as (_, (page,)):
        assert page.status == 200
        assert page.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert page.headers["x-accel-buffering"] == "no"
        assert page.parts == [b"data: 1\n\n"]
        await asyncio.sleep(1)
        assert PERIOD == 0.25
        assert events(page) == [b"1", b"2", b"3", b"4", b"5"]


async def test_all_pages_share_a_snapshot() -> None:
    async with opened(MOST) as (pages, connections):
        await asyncio.sleep(0.5)
        assert [events(each) for each in connections] == [[b"1", b"2", b"3"]] * MOST
        assert len(pages.made) == 3


async def test_a_snapshot_is_of_the_model_that_a_page_shows() -> None:
    pages = Pages()
    shown = [pages.open("story"), pages.open("fable"), pages.open("story")]
    await asyncio.sleep(0.01)
    assert pages.made == ["story", "fable"]
    assert [events(each) for each in shown] == [[b"1"], [b"2"], [b"1"]]
    pages.watchers.close()
    await asyncio.gather(*(each.end() for each in shown))


async def test_one_page_too_many_is_refused_until_another_is_closed() -> None:
    async with opened(MOST) as (pages, connections):
        with pytest.raises(OverloadedError, match="4 pages watch already") as refused:
            await pages.open().end()
        assert (refused.value.queue_depth, refused.value.capacity, refused.value.retry_after) == (4, 4, 5)
        connections[0].leave()
        await connections[0].end()
        later = pages.open()
        await asyncio.sleep(0.01)
        assert later.status == 200
        later.leave()
        await later.end()


async def test_a_slow_page_leaves_snapshots_out() -> None:
    async with opened(2) as (_, (slow, quick)):
        slow.stop_reading()
        await asyncio.sleep(3)
        slow.read_on()
        await asyncio.sleep(0.01)
        # The one that was being sent, and then the newest.
        assert events(slow) == [b"1", b"2"]
        await asyncio.sleep(0.25)
        assert events(slow)[-1] == events(quick)[-1]
        assert len(events(slow)) == 3
        assert len(events(quick)) == 14


async def test_a_page_that_does_not_read_is_dropped() -> None:
    async with opened(2) as (pages, (stuck, quick)):
        stuck.stop_reading()
        await asyncio.sleep(29)
        assert not stuck.done()
        await asyncio.sleep(2)
        assert stuck.done()
        assert stuck.aborted
        assert not quick.aborted
        assert pages.watchers.count == 1


async def test_a_page_that_vanishes_gives_its_place_back() -> None:
    pages = Pages()
    page = pages.open()
    await asyncio.sleep(0.01)
    page.vanish()
    with pytest.raises(OSError, match="gone"):
        await page.end()
    assert pages.watchers.count == 0


async def test_closing_ends_every_stream() -> None:
    pages = Pages()
    connections = [pages.open(), pages.open()]
    await asyncio.sleep(0.3)
    connections[1].stop_reading()
    await asyncio.sleep(0.3)
    pages.watchers.close()
    await asyncio.gather(*(each.end() for each in connections))
    assert connections[0].complete
    assert not connections[0].aborted
    assert connections[1].aborted
    assert pages.watchers.count == 0


# `/monitor` over HTTP: who gets it, and what it consists of.


FOLDER = Path(djl_trtllm.server.monitor.__file__).with_name("page")
MOST_BYTES = 120_000
LOCAL = {"host": "localhost:8080"}


def begin(served: Application, path: str, host: str = "127.0.0.1", method: str = "GET", **headers: str) -> Connection:
    """A request of a browser that is connected to this address of the server."""
    path, _, query = path.partition("?")
    named = {name.replace("_", "-"): value for name, value in {**LOCAL, **headers}.items()}
    connection = Connection(method, path, b"", named, query)
    connection.scope["server"] = (host, 8080)
    return connection.begin(served.app)


async def get(served: Application, path: str, *arguments: Any, **headers: str) -> Connection:
    return await begin(served, path, *arguments, **headers).end()


async def first_event(served: Application, path: str = "/monitor/events", **headers: str) -> Connection:
    """A stream that is closed after its first snapshot."""
    stream = begin(served, path, **headers)
    await asyncio.sleep(0.01)
    stream.leave()
    return await stream.end()


@pytest.mark.parametrize(("option", "page", "numbers"), [(None, 200, 401), (True, 200, 200), (False, 404, 404)])
async def test_the_option_decides_who_sees_the_page_and_its_numbers(
    option: bool | None, page: int, numbers: int
) -> None:
    async with application(monitor=option) as served:
        for path in ("/monitor", "/monitor/monitor.js"):
            assert (await get(served, path)).status == page
        assert (await first_event(served)).status == numbers
        links = (await get(served, "/")).json["links"]
        assert ("monitor" in links) == (page == 200)


async def test_by_default_the_numbers_need_the_key_of_the_link() -> None:
    # A proxy on this machine that forwards nothing looks like a browser on it: no address would do.
    async with application() as served, application() as other:
        key = served.monitor.key
        assert len(key) > 20 and key != other.monitor.key
        for given in ("", key[:-1], other.monitor.key, "\xe9"):
            refused = await first_event(served, authorization=f"Bearer {given}")
            assert (refused.status, "SERVING_MONITOR=true" in refused.body.decode()) == (401, True)
        assert (await first_event(served, authorization=f"Bearer {key}")).status == 200


async def test_the_page_may_load_nothing_from_elsewhere() -> None:
    async with application() as served:
        answer = await get(served, "/monitor")
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["", "nothing.js", "../routes.py", "..%2froutes.py", "monitor.html/"])
async def test_other_files_are_not_there(name: str) -> None:
    async with application() as served:
        assert (await get(served, f"/monitor/{name}")).status == 404


async def test_every_file_has_its_type() -> None:
    types = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
    async with application() as served:
        for path in FOLDER.iterdir():
            answer = await get(served, f"/monitor/{path.name}")
            assert answer.body == path.read_bytes()
            assert answer.headers["content-type"].startswith(types.get(path.suffix, "text/plain"))


async def test_a_stream_is_of_the_model_in_the_address(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer, monitor=True) as served:
        await served.load(tokenizer, "fable")
        assert b'"model":{"name":"story"' in (await first_event(served)).body
        assert b'"model":{"name":"fable"' in (await first_event(served, "/monitor/events?model=fable")).body
        unknown = await get(served, "/monitor/events?model=hen")
        assert unknown.status == 404
        assert "there is no model named 'hen' here" in unknown.body.decode()


async def test_head_does_not_watch() -> None:
    async with application(monitor=True) as served:
        answer = await begin(served, "/monitor/events", method="HEAD").end()
        assert (answer.status, answer.body) == (200, b"")
        assert answer.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize(("role", "status"), [(Role.METRICS, 200), (Role.INFER, 403), (Role.MANAGE, 403), (None, 401)])
async def test_the_numbers_need_a_key_for_metrics_and_the_page_none(role: Role | None, status: int) -> None:
    keys = () if role is None else (ApiKey.of("own", "secret", frozenset({role})),)
    other = ApiKey.of("other", "hidden", frozenset({Role.METRICS}))
    async with application(access=Access((*keys, other))) as served:
        assert (await get(served, "/monitor")).status == 200
        assert (await get(served, "/monitor/monitor.js")).status == 200
        assert (await first_event(served, authorization="Bearer secret")).status == status


# -- the files ---------------------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """What an HTML file refers to, and what it has inside that its policy forbids."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.forbidden: list[str] = []
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href")]
        self.forbidden += [name for name, _ in attributes if name == "style" or name.startswith("on")]
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style") and data.strip():
            self.forbidden.append(data)


def test_the_page_refers_to_files_that_are_there_and_has_no_code_inside() -> None:
    page = Elements((FOLDER / "monitor.html").read_text())
    assert page.forbidden == []
    for address in page.addresses:
        assert address in ("#lanes", "metrics") or (FOLDER / address.removeprefix("monitor/")).is_file(), address


def test_scripts_import_files_that_are_there() -> None:
    for path in FOLDER.glob("*.js"):
        for name in re.findall(r'^import .* from "(.*)";$', path.read_text(), re.MULTILINE):
            assert (FOLDER / name).is_file()


def test_all_files_together_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < MOST_BYTES


def test_our_scripts_name_no_other_server() -> None:
    for path in FOLDER.iterdir():
        if not path.name.startswith("uplot"):
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", path.read_text()), path.name


def test_the_chart_library_has_its_licence() -> None:
    assert (FOLDER / "uplot.js").read_text().startswith("/*! https://github.com/leeoniya/uPlot (v1.6.32) */")
    assert "MIT License" in (FOLDER / "uplot-LICENSE.txt").read_text()


def test_a_row_is_read_as_it_is_written() -> None:
    found = re.search(r"^const ROW = \[(.*)\];$", (FOLDER / "monitor.js").read_text(), re.MULTILINE)
    assert found is not None
    names = re.findall(r'"(\w+)"', found[1])
    assert names == [
        *("number", "id", "arrived", "started", "first", "ended"),
        *("prompt", "reused", "output", "sequences", "reason", "client", "accepted", "images", "pictured"),
    ]
