"""What the live page shows is what the server does, and everybody can use it."""

from __future__ import annotations

import contextlib
import functools
import re
from contextlib import ExitStack

import httpx
import pytest

from tests.integration.monitor.conftest import (
    FAILS,
    LIMIT,
    Open,
    Seen,
    has_colour,
    leave_early,
    live,
    rows,
    standing_still,
    states,
    tile,
)
from tests.support.models import PROMPT
from tests.support.processes import wait_until
from tests.support.server import Server

pytestmark = pytest.mark.slow


def test_lanes_occupancy_and_numbers_are_those_of_the_metrics(server: Server, open_page: Open) -> None:
    page = open_page(server)
    live(page)
    page.select_option("#span", "120")
    server.generate(5)
    server.generate(FAILS)
    leave_early(server)
    with standing_still(server):
        wait_until(lambda: tile(page, "running").startswith(f"Running {LIMIT} / {LIMIT}"), what="all places taken")
        wait_until(lambda: tile(page, "waiting").startswith("Queued 2 / 20"), what="two that wait")
        wait_until(lambda: has_colour(page, "decode"), what="lanes that decode")
        for name in ("queued", "finished", "cancelled", "failed"):
            wait_until(functools.partial(has_colour, page, name), what=f"lanes with {name}")
        assert server.metric("running") == LIMIT

        def occupied() -> bool:
            occupancy = page.locator("#occupancy .plot").get_attribute("aria-label")
            decode, prefill = map(int, re.findall(r"(\d+) (?:decode|prefill)", occupancy))
            waiting = f"prefill of {LIMIT}, {server.metric('waiting'):.0f} queued"
            return decode + prefill == LIMIT and bool(occupancy.endswith(waiting))

        wait_until(occupied, what="the occupancy that the metrics have")

        def in_all(name: str) -> int:
            return int(re.findall(r"([\d,]+) (?:requests|ended|in)", tile(page, name))[-1].replace(",", ""))

        wait_until(lambda: in_all("waiting") == server.metric("requests_total"), what="as many requests")
        wait_until(lambda: in_all("tokens") == server.metric("generated_tokens_total"), what="as many tokens")
        wait_until(lambda: in_all("requests") == server.metric("finished_total"), what="as many finished requests")
        page.select_option("#period", "start")
        first = f", of {server.metric('time_to_first_token_seconds_count'):.0f}"
        bars = page.locator("#first-token .bars")
        wait_until(lambda: bars.get_attribute("aria-label").endswith(first), what="as many first tokens")
        page.click("#as-table")
        wait_until(lambda: states(page).get("queued") == 2, what="the table with two that wait")
        found = states(page)
        assert (found["cancelled"], found["failed"]) == (server.finished("cancelled"), server.finished("error"))
        assert found["decoding"] + found.get("prefill", 0) == LIMIT
        assert found["finished"] == server.finished("length") + server.finished("eos_token")
    page.locator('[data-tile="running"] .value', has_text="0 / 4").wait_for()
    wait_until(lambda: "decoding" not in states(page), what="a table without live requests")


def test_nothing_of_a_prompt_is_sent_or_shown(server: Server, open_page: Open) -> None:
    server.generate(5)
    page = open_page(server)
    live(page)
    page.click("#as-table")
    with server.http.stream("GET", "/monitor/events") as stream:
        event = next(stream.iter_lines())
    for word in ("riding", "grandmother"):
        assert word in PROMPT
        assert word not in event
        assert word not in page.content()


def test_a_story_streams_and_its_lane_is_there(server: Server, open_page: Open) -> None:
    page = open_page(server)
    live(page)
    page.fill("#prompt", "the wolf and the hood")
    page.fill("#tokens", "12")
    page.press("#prompt", "Enter")
    page.locator("#story-said", has_text="12 tokens").wait_for()
    assert page.locator("#told").inner_text().startswith("the wolf and the hood")
    assert len(page.locator("#told").inner_text()) > len("the wolf and the hood")
    page.click("#as-table")
    # Other tests generate stories on this server, too.
    wait_until(lambda: "12" in [row[4] for row in rows(page) if row[0].startswith("page-")], what="its row")


def test_a_story_can_be_stopped_and_an_error_is_shown(server: Server, open_page: Open, seen: Seen) -> None:
    seen.expected = ("status of 424",)
    page = open_page(server)
    live(page)
    cancelled = server.finished("cancelled")
    page.fill("#tokens", "100000")
    page.click("#generate")
    page.locator("#story-said", has_text="tokens/s").wait_for()
    page.click("#generate")
    page.locator("#story-said", has_text="stopped").wait_for()
    wait_until(lambda: server.finished("cancelled") == cancelled + 1, what="a cancelled request")
    page.fill("#prompt", "hood " * 5000)
    page.fill("#tokens", "5")
    page.click("#generate")
    page.locator("#told .wrong").wait_for()
    assert "max_input_len" in page.locator("#told .wrong").inner_text()


def test_watchers_come_and_go_without_leaving_anything(server: Server) -> None:
    server.note_rest()
    for _ in range(3):
        with ExitStack() as stack:
            streams = [stack.enter_context(server.http.stream("GET", "/monitor/events")) for _ in range(4)]
            assert [stream.status_code for stream in streams] == [200] * 4
            assert all(next(stream.iter_lines()).startswith("data: ") for stream in streams)
        with contextlib.suppress(httpx.HTTPError):
            server.http.close()
        server.http = httpx.Client(base_url=server.url, timeout=60, trust_env=False)
    wait_until(lambda: server.http.get("/monitor/events", params={"model": "none"}).status_code == 404)
    server.check_leaks()


# -- The live page can be used by everybody: by keyboard, in light and dark, on a small screen -------------------------


def test_the_keyboard_reaches_everything(server: Server, open_page: Open) -> None:
    server.generate(5)
    page = open_page(server)
    live(page)
    page.focus("#lanes")
    wait_until(lambda: page.evaluate("document.querySelector('#lanes .empty').hidden"), what="a lane")
    page.keyboard.press("End")
    page.locator("#detail").wait_for()
    wait_until(lambda: "State finished" in page.locator("#lanes-said").inner_text(), what="the request in words")
    page.keyboard.press("Escape")
    page.locator("#detail").wait_for(state="hidden")
    reached = set()
    page.evaluate("document.activeElement.blur()")
    for _ in range(25):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.parentElement.id"))
    assert {
        "pause",
        "lanes",
        "span",
        "as-table",
        "occupancy",
        "cache",
        "period",
        "prompt",
        "tokens",
        "generate",
    } <= reached


def test_what_can_be_used_has_a_name(server: Server, open_page: Open) -> None:
    page = open_page(server)
    live(page)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, select, input, textarea, [tabindex], [role=img]")]
        .filter(e => !(e.innerText || e.ariaLabel || e.getAttribute("aria-labelledby") || e.labels?.length))
        .map(e => e.outerHTML)"""
    )
    assert nameless == []


def test_a_paused_page_stands_still(server: Server, open_page: Open) -> None:
    page = open_page(server)
    live(page)
    page.click("#pause")
    before = tile(page, "waiting")
    server.generate(5)
    with server.http.stream("GET", "/monitor/events") as stream:
        events = (line for line in stream.iter_lines() if line)
        for _ in range(3):  # the page gets two of them meanwhile
            next(events)
    assert tile(page, "waiting") == before
    page.click("#pause")
    wait_until(lambda: tile(page, "waiting") != before, what="news")


@pytest.mark.parametrize(
    ("width", "height", "options"),
    [(1280, 800, {}), (1280, 800, {"color_scheme": "dark"}), (320, 640, {"reduced_motion": "reduce"})],
    ids=["light", "dark", "narrow"],
)
def test_the_page_fits(server: Server, open_page: Open, width: int, height: int, options: dict[str, str]) -> None:
    page = open_page(server, width, height, **options)
    live(page)
    server.generate(5)
    wait_until(lambda: has_colour(page, "finished"), what="a lane")
    wide, high = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
    assert wide <= width
    if width >= 1280:
        assert high <= height
    ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    light = sum(map(int, re.findall(r"\d+", ground)[:3])) > 384
    assert light == (options.get("color_scheme") != "dark")
