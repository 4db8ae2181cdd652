"""The live page can be used by everybody: by keyboard, in light and dark, on a small screen."""

from __future__ import annotations

import re

import pytest

from tests.integration.monitor.page import Open, has_colour, live, tile
from tests.support.server import Server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


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
    page.wait_for_timeout(600)
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
