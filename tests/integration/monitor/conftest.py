"""A real Chromium, and a server whose engine plays a script.

Debian's `chromium` or `chromium-headless-shell` do; without one the tests of the live page are skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.monitor.page import FAILS, LIMIT, STANDS_STILL, Open, Seen
from tests.support.models import scripted_model
from tests.support.server import Server, serving

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
    with serving(model) as started:
        yield started
