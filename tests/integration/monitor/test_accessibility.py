"""axe-core finds nothing wrong with the pages that people read, in light on a desk and in dark on a phone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.processes import PATIENCE
from tests.support.server import Server, environment, run_cli

pytestmark = pytest.mark.slow

SIZES = {"desk": (1280, 800), "phone": (390, 800)}
LEAVE_ONE_OF_EACH = """() => {
    const seen = new Set();
    for (const operation of document.querySelectorAll("main > details")) {
        const elements = [...operation.querySelectorAll("*")];
        const kinds = elements.map(each => [each.parentElement.tagName, each.tagName, each.className].join(" "));
        if (kinds.every(kind => seen.has(kind))) operation.remove();
        kinds.forEach(kind => seen.add(kind));
    }
}"""
"""Removes the operations of /docs that have no element which those before them lack: one template makes all 108, with
24,000 elements, which axe looks at one by one for minutes."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, server: Server) -> str:
    """The address of a report of `djl-trtllm bench`, with a warning and more than one load."""
    pytest.importorskip("matplotlib", reason="charts need matplotlib")
    folder = tmp_path_factory.mktemp("report")
    # One request is the whole load: the report warns that requests take longer than half of the measured time.
    load = ("--concurrency", "1,2", "--requests", "1", "--output-tokens", "32")
    done = run_cli("bench", server.url, *load, "--html", str(folder / "report.html"), environ=environment(folder))
    assert done.returncode == 0, done.stderr
    assert "class=warning" in (folder / "report.html").read_text()
    return f"file://{folder}/report.html"


# No style of the pages depends on both: sizes decide the layout, and schemes the colours.
@pytest.mark.parametrize("path", ["/docs", "/monitor", "report"])
@pytest.mark.parametrize(("size", "scheme"), [("desk", "light"), ("phone", "dark")])
def test_a_page_has_no_barrier(path: str, size: str, scheme: str, server: Server, browser: Any, report: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core is not installed")
    width, height = SIZES[size]
    viewport = {"width": width, "height": height}
    # axe is a script of the test, which the page's own policy refuses.
    context = browser.new_context(viewport=viewport, color_scheme=scheme, bypass_csp=True)
    try:
        context.set_default_timeout(1000 * PATIENCE)
        page = context.new_page()
        page.goto(report if path == "report" else f"{server.url}{path}")
        page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "it scrolls to the side"
        if path == "/docs":
            page.evaluate(LEAVE_ONE_OF_EACH)
        found = axe.Axe().run(page).response["violations"]
        assert [(each["id"], [node["target"] for node in each["nodes"]][:3]) for each in found] == []
    finally:
        context.close()


def test_the_paths_that_generate_stand_first(server: Server, browser: Any) -> None:
    page = browser.new_page()
    try:
        page.goto(f"{server.url}/docs")
        headings = page.locator("h2").all_inner_texts()
        assert headings[0] == "LMI" and headings[-1] == "Server"
        assert "POST /invocations" in page.locator("summary").first.inner_text()
    finally:
        page.close()
