"""The live page with keys, several models, many watchers, and servers that end."""

from __future__ import annotations

import contextlib
import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integration.monitor.conftest import SHOWN, Open, Seen, live, rows, tile
from tests.support.client import JSON, body
from tests.support.models import scripted_model
from tests.support.processes import wait_until
from tests.support.server import Server, serving

pytestmark = pytest.mark.slow


def test_one_page_too_many_says_so_and_gets_its_turn(server: Server, open_page: Open, seen: Seen) -> None:
    seen.expected = ("status of 503",)
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(server.http.stream("GET", "/monitor/events"))
        page = open_page(server)
        page.locator("#notice", has_text="4 pages watch already").wait_for()
    live(page)
    assert page.locator("#notice").is_hidden()


HIDDEN = """hidden => {
    Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
}"""


def test_a_page_that_nobody_looks_at_leaves_its_place_and_comes_back(
    server: Server, open_page: Open, seen: Seen
) -> None:
    # Those four may be there for a moment longer than the page is away.
    seen.expected = ("status of 503",)
    page = open_page(server)
    live(page)
    page.clock.install()
    page.evaluate(HIDDEN, True)
    page.clock.fast_forward(9_000)
    assert page.locator("#link", has_text="while hidden").count() == 0
    page.clock.fast_forward(2_000)
    page.locator("#link", has_text="disconnected while hidden").wait_for()

    def four_have_places() -> bool:
        with ExitStack() as stack:
            streams = [stack.enter_context(server.http.stream("GET", "/monitor/events")) for _ in range(4)]
            return [stream.status_code for stream in streams] == [200] * 4

    wait_until(four_have_places, what="a place that is free")
    page.evaluate(HIDDEN, False)
    live(page)


def shows(page: Any, model: str) -> bool:
    return str(page.title()).startswith(model)


def test_a_key_is_asked_for_and_kept_in_memory_only(tmp_path: Path, open_page: Open, seen: Seen) -> None:
    model = scripted_model(tmp_path / "model")
    seen.expected = ("status of 401", "status of 403", "net::ERR_")
    keys = [
        {"name": "web", "key": "to-generate", "roles": ["infer"]},
        {"name": "all", "key": "s3cr3t", "roles": ["infer", "metrics"]},
    ]
    file = tmp_path / "keys.yaml"
    file.write_text(json.dumps(keys))
    with contextlib.closing(_server(model, file)) as server:
        page = open_page(server)
        page.locator("#access", has_text="needs an API key").wait_for()
        for key, message in (("wrong", "is not one of this server's"), ("to-generate", "has no role 'metrics'")):
            page.fill("#key", key)
            page.press("#key", "Enter")
            page.locator("#access", has_text=message).wait_for()
        page.fill("#key", "s3cr3t")
        page.press("#key", "Enter")
        live(page)
        assert page.locator("#access").is_hidden()
        page.fill("#tokens", "3")
        page.click("#generate")
        page.locator("#story-said", has_text="3 tokens").wait_for()
        stored = page.evaluate("[document.cookie, JSON.stringify({...localStorage, ...sessionStorage}), location.href]")
        assert "s3cr3t" not in str(stored) + page.content() + str(seen.addresses)


def _server(model: Path, keys: Path) -> Server:
    server = Server(model, {"SERVING_API_KEYS_FILE": str(keys)})
    server.wait_for_ping()
    return server


def test_a_server_with_an_open_page_ends_at_once_and_the_page_comes_back_with_the_next_one(
    model: Path, open_page: Open, seen: Seen
) -> None:
    seen.expected = ("net::ERR_",)
    with serving(model, **SHOWN) as first:
        page = open_page(first)
        live(page)
        first.generate(4)
        page.locator('[data-tile="waiting"]', has_not_text="0 requests in all").wait_for()
        first.terminate()
        assert first.wait() == 0
        assert not first.says("Cancel")
        page.locator("#link", has_text="disconnected").wait_for()
    with contextlib.closing(Server(model, SHOWN, port=first.port)) as second:
        second.wait_for_ping()
        live(page)
        page.locator('[data-tile="waiting"]', has_text="0 requests in all").wait_for()


def has_gap(page: Any) -> bool:
    """Whether the chart has a gap in its last seconds: each step to the left is two."""
    page.evaluate("document.activeElement.blur()")
    page.focus("#occupancy .plot")
    for _ in range(10):
        page.keyboard.press("ArrowLeft")
        if page.locator("#occupancy .legend").inner_text() == "not watched":
            return True
    return False


def test_a_page_that_hears_nothing_connects_again_and_stands_still_until_then(
    model: Path, open_page: Open, seen: Seen
) -> None:
    seen.expected = ("net::ERR_",)
    link = "document.getElementById('link').textContent"
    with serving(model, **SHOWN) as server:
        page = open_page(server)
        live(page)
        server.process.suspend()
        try:
            page.locator("#link", has_text="disconnected").wait_for()
            page.click("#pause")
            page.click("#pause")
            assert page.evaluate(link) != "live"
            page.click("#pause")
            assert page.evaluate(link) != "paused"
        finally:
            server.process.resume()
        page.locator("#link", has_text="paused").wait_for()
        page.click("#pause")
        live(page)
        wait_until(partial(has_gap, page), what="a gap in the chart")


def test_a_model_that_is_unregistered_leaves_the_page_to_the_others(tmp_path: Path, open_page: Open) -> None:
    store = tmp_path / "store"
    for name in ("fable", "story"):
        scripted_model(store / name, **{"option.model_name": name})
    with serving(None, SERVING_MODEL_STORE=str(store), SERVING_LOAD_MODELS="ALL", **SHOWN) as server:
        page = open_page(server)
        live(page)
        page.select_option("#model", "story")
        wait_until(partial(shows, page, "story"), what="the other model")
        assert server.http.post("/predictions/story", content=body(4), headers=JSON).status_code == 200
        for gone, state in (("story", "ready"), ("fable", "no model")):
            assert server.http.delete(f"/models/{gone}").status_code == 200
            page.locator("#state", has_text=state).wait_for()
            wait_until(lambda: page.locator("#model option").count() <= 1, what="one model or none")
        assert not any(character.isdigit() for character in tile(page, "running"))
        page.click("#as-table")
        assert rows(page) == []
        assert server.http.post("/models", params={"url": str(store / "story")}).status_code == 200
        wait_until(partial(shows, page, "story"), what="the new model")
        page.locator('[data-tile="waiting"]', has_text="0 requests in all").wait_for()


def test_what_a_client_names_is_text_and_not_part_of_the_page(server: Server, open_page: Open) -> None:
    identifier = "<img/src=x/onerror=document.title='forged'>"
    answer = server.http.post("/invocations", content=body(4), headers={**JSON, "x-request-id": identifier})
    assert answer.status_code == 200
    page = open_page(server)
    live(page)
    page.focus("#lanes")
    wait_until(lambda: page.evaluate("document.querySelector('#lanes .empty').hidden"), what="a lane")
    page.keyboard.press("End")
    page.locator("#detail b", has_text=identifier).wait_for()
    page.click("#as-table")
    wait_until(lambda: identifier in [row[0] for row in rows(page)], what="its row")
    assert page.locator("img").count() == 0
    assert not shows(page, "forged")
