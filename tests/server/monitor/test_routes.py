"""`/monitor` over HTTP: who gets it, and what it consists of."""

from __future__ import annotations

import asyncio
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import djl_trtllm.server.monitor
from djl_trtllm.model import Tokenizer
from djl_trtllm.server.access import Access, ApiKey, Role
from djl_trtllm.server.monitor.routes import is_local
from tests.server.application import Application, application
from tests.support.asgi import Connection
from tests.support.in_process import Hosts
from tests.support.virtual_time import in_virtual_time

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


@pytest.mark.parametrize(
    ("server", "headers", "local"),
    [
        (("127.0.0.1", 8080), {"host": "127.0.0.1:8080"}, True),
        (("127.0.0.1", 8080), {"host": "localhost"}, True),
        (("127.8.9.1", 8080), {"host": "LOCALHOST:80"}, True),
        (("::1", 8080), {"host": "[::1]:8080"}, True),
        (("::ffff:127.0.0.1", 8080), {"host": "localhost"}, True),
        (("10.0.0.1", 8080), {"host": "10.0.0.1:8080"}, False),
        (("10.0.0.1", 8080), {"host": "localhost"}, False),
        (("::ffff:10.0.0.1", 8080), {"host": "localhost"}, False),
        (("127.0.0.1", 8080), {"host": "evil.example:8080"}, False),
        (("127.0.0.1", 8080), {"host": "localhost.evil.example"}, False),
        (("127.0.0.1", 8080), {"host": "127.0.0.1.evil.example"}, False),
        (("127.0.0.1", 8080), {"host": "localhost", "x-forwarded-for": "1.2.3.4"}, False),
        (("127.0.0.1", 8080), {"host": "localhost", "forwarded": "for=1.2.3.4"}, False),
        (("127.0.0.1", 8080), {"host": "localhost", "via": "1.1 proxy"}, False),
        (("127.0.0.1", 8080), {"host": "[::1"}, False),
        (("127.0.0.1", 8080), {"host": ""}, False),
        (("127.0.0.1", 8080), {}, False),
        (("/run/socket", None), {"host": "localhost"}, False),
        (None, {"host": "localhost"}, False),
    ],
)
def test_local_is_who_connects_to_a_loopback_address_and_names_one(
    server: object, headers: dict[str, str], local: bool
) -> None:
    assert is_local({"server": server}, headers) is local


@pytest.mark.parametrize(
    ("option", "host", "status"),
    [
        (None, "127.0.0.1", 200),
        (None, "10.0.0.1", 404),
        (True, "10.0.0.1", 200),
        (False, "127.0.0.1", 404),
    ],
)
@in_virtual_time
async def test_the_option_decides_who_sees_the_page(option: bool | None, host: str, status: int) -> None:
    async with application(monitor=option) as served:
        for path in ("/monitor", "/monitor/monitor.js"):
            assert (await get(served, path, host)).status == status
        stream = begin(served, "/monitor/events", host)
        await asyncio.sleep(0.01)
        stream.leave()
        assert (await stream.end()).status == status
        links = (await get(served, "/", host)).json["links"]
        assert ("monitor" in links) == (status == 200)


@in_virtual_time
async def test_a_refusal_says_who_sees_the_page_and_which_option_changes_it() -> None:
    async with application() as served:
        answer = await get(served, "/monitor", "10.0.0.1")
        assert "SERVING_MONITOR=true" in answer.body.decode()
    async with application(monitor=False) as served:
        answer = await get(served, "/monitor")
        assert "SERVING_MONITOR" not in answer.body.decode()


@in_virtual_time
async def test_the_page_may_load_nothing_from_elsewhere() -> None:
    async with application() as served:
        answer = await get(served, "/monitor")
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["", "nothing.js", "../routes.py", "..%2froutes.py", "monitor.html/"])
@in_virtual_time
async def test_other_files_are_not_there(name: str) -> None:
    async with application() as served:
        assert (await get(served, f"/monitor/{name}")).status == 404


@in_virtual_time
async def test_every_file_has_its_type() -> None:
    types = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
    async with application() as served:
        for path in FOLDER.iterdir():
            answer = await get(served, f"/monitor/{path.name}")
            assert answer.body == path.read_bytes()
            assert answer.headers["content-type"].startswith(types.get(path.suffix, "text/plain"))


@in_virtual_time
async def test_a_stream_is_of_the_model_in_the_address(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        await served.load(tokenizer, "fable")
        assert b'"model":{"name":"story"' in (await first_event(served)).body
        assert b'"model":{"name":"fable"' in (await first_event(served, "/monitor/events?model=fable")).body
        unknown = await get(served, "/monitor/events?model=hen")
        assert unknown.status == 404
        assert "there is no model named 'hen' here" in unknown.body.decode()


@in_virtual_time
async def test_head_does_not_watch() -> None:
    async with application() as served:
        answer = await begin(served, "/monitor/events", method="HEAD").end()
        assert (answer.status, answer.body) == (200, b"")
        assert answer.headers["content-type"].startswith("text/event-stream")


@in_virtual_time
async def test_the_fifth_page_is_refused() -> None:
    async with application() as served:
        streams = [begin(served, "/monitor/events") for _ in range(4)]
        await asyncio.sleep(0.01)
        answer = await get(served, "/monitor/events")
        assert answer.status == 503
        assert answer.headers["retry-after"] == "5"
        assert "4 pages watch already" in answer.body.decode()
        served.monitor.close()
        await asyncio.gather(*(each.end() for each in streams))


@pytest.mark.parametrize(("role", "status"), [(Role.METRICS, 200), (Role.INFER, 403), (Role.MANAGE, 403), (None, 401)])
@in_virtual_time
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
        *("prompt", "reused", "output", "sequences", "reason"),
    ]
