"""What the server says of its own paths, and the page that shows the description."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import orjson
import pytest
from starlette.routing import Router

from djl_trtllm.api.dialects.embeddings import EMBEDDINGS
from djl_trtllm.api.dialects.rerank import RERANK
from djl_trtllm.api.dialects.tei import TEI
from djl_trtllm.api.openapi import describe
from djl_trtllm.api.registry import DIALECTS
from djl_trtllm.config import Options, Task
from djl_trtllm.model import Tokenizer
from djl_trtllm.server.routes import OPERATIONS, Description, type_of
from djl_trtllm.version import __version__
from tests.api.scripts import check_golden
from tests.api.tables import dumped
from tests.server.application import application
from tests.support.in_process import Hosts
from tests.support.plugin import TRIAL
from tests.support.tables import by_table

TASKS = {EMBEDDINGS: Task.EMBED, RERANK: Task.SCORE, TEI: Task.EMBED}
"""The tasks of dialects whose models do not generate."""
EXAMPLES = [
    (path, operation.example, TASKS.get(dialect, Task.GENERATE))
    for dialect in DIALECTS
    for path in (*dialect.paths, *dialect.actions)
    if (operation := describe(dialect, path)).example is not None
]


class Page(HTMLParser):
    """The texts of a page, its addresses, and whether every element ends."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.addresses: list[str] = []
        self.names: set[str] = set()
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


async def test_the_description_has_every_path_of_the_server() -> None:
    async with application() as served:
        answer = await served.client.get("/openapi.json")
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
        assert isinstance(served.app, Router)
        mounted = {getattr(route, "path", "") for route in served.app.routes}
        assert answer.json["paths"].keys() == mounted
        assert (await served.client.get("/openapi.json")).body == answer.body


async def test_every_own_operation_is_answered(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        for name, described in sorted(OPERATIONS.items()):
            method, path = name.split()
            answer = await served.client.get(path.replace("{model}", "story"), method=method)
            assert answer.status == 200 or answer.status in described.errors, (name, answer.body)


@pytest.mark.parametrize(("path", "example", "task"), EXAMPLES, ids=[path for path, *_ in EXAMPLES])
async def test_every_example_is_answered(
    hosts: Hosts, tokenizer: Tokenizer, path: str, example: Any, task: Task
) -> None:
    hosts.alone = True
    async with application(tokenizer, task=task) as served:
        path = path.replace("{model}", "story").replace("{version}", "1")
        answer = await served.client.post(path, orjson.dumps(example))
        assert answer.status == 200, answer.body


async def test_the_version_and_the_links_of_the_root() -> None:
    async with application() as served:
        assert (await served.client.get("/version")).json == {"version": __version__}
        for link in (await served.client.get("/")).json["links"].values():
            assert (await served.client.get(link)).status == 200


async def test_the_page_shows_every_operation_and_loads_nothing() -> None:
    async with application() as served:
        answer = await served.client.get("/docs")
        assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        page = Page(answer.body.decode())
        described = (await served.client.get("/openapi.json")).json
        assert described["paths"].keys() <= set(page.texts)
        assert {"GET", "POST", "PUT", "DELETE"} <= set(page.texts)
        assert page.addresses == ["openapi.json"]
        assert not page.names & {"script", "link", "img", "iframe"}
        assert {"max_new_tokens", "repetition_penalty", "max_completion_tokens"} <= set(page.texts)
        assert (await served.client.get("/docs")).body == answer.body


def test_a_dialect_needs_no_change_here_to_be_shown() -> None:
    reply = Description([TRIAL], Options()).page
    assert "/trial/{model}/stream" in Page(reply.body.decode()).texts


@by_table("schema", "words")
def test_a_type_in_words(schema: dict[str, Any], words: str) -> None:
    assert type_of(schema) == words


def test_the_servers_own_paths_are_as_stored() -> None:
    lines = [f"{name} {dumped(operation._asdict())}\n" for name, operation in OPERATIONS.items()]
    check_golden("description-Server", "".join(lines).encode())
