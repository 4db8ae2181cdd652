from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np

from djl_trtllm.bench.html import page, plots
from tests.bench.test_report import figures, result


class Checker(HTMLParser):
    """Collects tags and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href")]


def test_the_page_is_one_file_without_scripts_and_addresses() -> None:
    loads = [figures(1, 10), figures(2, 20), figures(4, 20, failed=1)]
    text = page(result(*loads, knee=2, swept=True))
    checker = Checker()
    checker.feed(text)
    assert checker.addresses == []
    assert "script" not in checker.tags
    assert not re.findall(r"url\(|@import", text)
    assert checker.tags.count("svg") == 6
    assert "Knee: 2 clients" in text and ">knee<" in text
    assert checker.tags.count("tr") == 4


def test_what_servers_say_cannot_become_markup() -> None:
    load = figures(1, 10, failed=1)
    load.details["HTTP 429"] = "<script>alert(1)</script>"
    made = result(load)
    made.model = "<img src=x>"
    text = page(made)
    assert "<script" not in text and "<img" not in text
    assert "&lt;script&gt;" in text


def test_one_load_has_the_distributions_and_the_timeline() -> None:
    titles = [found for chart in plots(result(figures(1, 10))) for found in re.findall('aria-label="([^"]+)"', chart)]
    assert titles == [
        "Time to first token: share of values up to",
        "Inter-token latency: share of values up to",
        "Whole request: share of values up to",
        "Output tokens per second",
        "Mean time to first token, by when requests were due",
    ]


def test_an_open_loop_is_drawn_by_its_rate() -> None:
    loads = [figures(1, 10), figures(1, 20)]
    for load, rate in zip(loads, (0.5, 2.5), strict=True):
        load.rate = rate
    assert ">2.5<" in plots(result(*loads))[0]


def test_of_many_loads_six_are_drawn_over_time() -> None:
    loads = [figures(clients, 10) for clients in range(1, 12)]
    charts = plots(result(*loads))
    assert re.findall(r">(\d+) clients<", charts[2]) == ["1", "3", "5", "7", "9", "11"]


def test_nothing_measured_is_a_page_too() -> None:
    assert plots(result()) == []
    assert page(result()).startswith("<!doctype html>")
    empty = figures(1, 10)
    empty.ttft.counts = np.zeros_like(empty.ttft.counts)
    assert len(plots(result(empty))) == 5
