"""A real Chromium, and a server whose engine plays a script, and what the live page shows.

Debian's `chromium` or `chromium-headless-shell` do; without one the tests of the live page are skipped.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import body, raw_post, read_until
from tests.support.models import scripted_model
from tests.support.processes import PATIENCE, wait_until
from tests.support.server import Server, serving

STANDS_STILL = 77
"""Tokens of the request at which the engine of the tests stops."""
FAILS = 66
SHOWN = {"SERVING_MONITOR": "true"}
"""The environment of a server without a terminal, which would show the link to its page."""
LIMIT = 4

Open = Callable[..., Any]


@dataclass
class Seen:
    """What a page loaded, and what went wrong in it.

    Chromium reports refused and broken requests by itself, which is no mistake of the page: `expected` are parts of
    such messages.
    """

    addresses: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()

    @property
    def mistakes(self) -> list[str]:
        return [each for each in self.problems if not any(part in each for part in self.expected)]


def live(page: Any) -> None:
    page.locator("#link", has_text="live").wait_for()


def tile(page: Any, name: str) -> str:
    return str(page.locator(f'[data-tile="{name}"]').inner_text()).replace("\n", " ")


def rows(page: Any) -> list[list[str]]:
    """The table of requests."""
    cells = page.locator("#table tbody tr").evaluate_all("lines => lines.map(l => [...l.cells].map(c => c.innerText))")
    return [[str(cell) for cell in line] for line in cells]


def states(page: Any) -> dict[str, int]:
    found = [row[1] for row in rows(page)]
    return {state: found.count(state) for state in found}


def leave_early(server: Server) -> None:
    """A client that is gone before its answer is complete."""
    cancelled = server.finished("cancelled")
    with server.connect() as connection:
        connection.sendall(raw_post(body(100_000, stream=True)))
        read_until(connection, b'"token"')
    wait_until(lambda: server.finished("cancelled") > cancelled, what="a cancelled request")


@contextlib.contextmanager
def standing_still(server: Server) -> Iterator[None]:
    """The engine stands still with all its places taken and two requests in the queue."""
    # The first one stops the engine, so that none of them can end before the last has come.
    lengths = [STANDS_STILL] + [50] * (LIMIT + 1)
    threads = [threading.Thread(target=server.generate, args=(length,)) for length in lengths]
    for begun, thread in enumerate(threads, 1):
        thread.start()
        wait_until(partial(_runs, server, min(begun, LIMIT)), what="a request that runs")
        server.wait_until_stopped()
    wait_until(lambda: server.metric("waiting") == 2, what="two requests that wait")
    try:
        yield
    finally:
        server.resume()
        for thread in threads:
            thread.join()


def has_colour(page: Any, name: str) -> bool:
    """Whether the lanes have pixels of that colour of the style sheet."""
    script = """name => {
        const wanted = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
        const probe = new OffscreenCanvas(1, 1).getContext("2d");
        probe.fillStyle = wanted;
        probe.fillRect(0, 0, 1, 1);
        const [r, g, b] = probe.getImageData(0, 0, 1, 1).data;
        const canvas = document.querySelector("#lanes canvas");
        const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
        copy.drawImage(canvas, 0, 0);
        const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
        const is = i => data[i] === r && data[i + 1] === g && data[i + 2] === b;
        return data.some((_, i) => i % 4 === 0 && is(i));
    }"""
    return bool(page.evaluate(script, name))


def _runs(server: Server, number: int) -> bool:
    return server.metric("running") >= number


# -- A real Chromium, and a server whose engine plays a script ---------------------------------------------------------

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-headless-shell", "google-chrome"))), None)


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        # Root has no sandbox, and containers have little shared memory.
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def open_page(browser: Any, seen: Seen) -> Iterator[Open]:
    """`open_page(server)`: the live page of a server.

    At the end nothing has gone wrong in it, nor come from elsewhere.
    """
    servers: list[str] = []
    with ExitStack() as stack:

        def open_one(server: Server, width: int = 1280, height: int = 800, **options: Any) -> Any:
            context = browser.new_context(viewport={"width": width, "height": height}, **options)
            context.set_default_timeout(1000 * PATIENCE)
            stack.callback(context.close)
            page = context.new_page()
            page.on("request", lambda request: seen.addresses.append(request.url))
            page.on("console", lambda message: seen.problems.append(f"{message.type}: {message.text}"))
            page.on("pageerror", lambda error: seen.problems.append(str(error)))
            servers.append(server.url)
            page.goto(f"{server.url}/monitor")
            return page

        yield open_one
    assert seen.mistakes == []
    assert {address for address in seen.addresses if not address.startswith(tuple(servers))} == set()


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    faults = [
        {"action": "error", "at_token": 3, "max_new_tokens": FAILS},
        {"action": "stop", "at_token": 5, "max_new_tokens": STANDS_STILL},
    ]
    return scripted_model(
        tmp_path_factory.mktemp("page") / "model",
        {"steps_per_second": 100, "faults": faults},
        **{"option.max_rolling_batch_size": LIMIT, "job_queue_size": 20, "option.model_name": "story"},
    )


@pytest.fixture(scope="package")
def server(model: Path) -> Iterator[Server]:
    with serving(model, **SHOWN) as started:
        yield started
