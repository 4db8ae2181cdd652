"""Make the pictures of docs/monitor.md: the live page over the bundled model under a load that comes and goes.

    python -m tools.monitor_pictures [--seconds 110] [--rate 6]

Needs playwright and a Chromium (Debian's `chromium`).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import sync_playwright

from tests.support.models import TINY_STORIES
from tests.support.server import Server, serving

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
BEGINNINGS = (
    "Once upon a time, there was a little girl named",
    "One day, a boy and his dog went to the park. They saw",
    "Lily had a big red ball. She liked to",
    "The old man lived in a house by the sea. Every morning he",
    "There was a cat who wanted to fly. The cat asked the bird",
)
PICTURES: dict[str, dict[str, Any]] = {
    "monitor-light": {"viewport": {"width": 1280, "height": 800}},
    "monitor-dark": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "dark"},
    "monitor-320": {"viewport": {"width": 320, "height": 800}, "reduced_motion": "reduce"},
}
_PERIOD_SECONDS = 24
CLIENTS = ("batch", "batch", "batch", "app", "app", "notebook")
"""Who sends a request: some send more."""


def ask(server: Server, draw: random.Random) -> None:
    """A request for a story; some clients leave before it ends."""
    tokens = min(180, int(draw.lognormvariate(3.9, 0.7)) + 4)
    prompt = " ".join(draw.choices(BEGINNINGS, k=draw.choice((1, 1, 3, 8))))
    body = {"inputs": prompt, "parameters": {"max_new_tokens": tokens, "do_sample": True}, "stream": True}
    read = tokens // 2 if draw.random() < 0.06 else tokens + 1
    with (
        contextlib.suppress(httpx.HTTPError),
        httpx.stream(
            "POST",
            f"{server.url}/invocations",
            json=body,
            headers={"x-client": draw.choice(CLIENTS)},
            timeout=120,
            trust_env=False,
        ) as stream,
    ):
        for number, _ in enumerate(stream.iter_lines()):
            if number >= read:
                return


def load(server: Server, mean: float, over: threading.Event) -> None:
    """Requests at a rate that rises and falls."""
    draw = random.Random(11)  # noqa: S311  # the same requests in every run
    while not over.is_set():
        rate = mean * (1 + 0.9 * math.sin(2 * math.pi * time.monotonic() / _PERIOD_SECONDS))
        time.sleep(draw.expovariate(max(mean / 12, rate)))
        threading.Thread(target=ask, args=(server, random.Random(draw.random())), daemon=True).start()  # noqa: S311  # as above


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=110, help="of load before the pictures")
    parser.add_argument("--rate", type=float, default=6, help="requests a second, in the mean")
    arguments = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    over = threading.Event()
    options = {"OPTION_MAX_ROLLING_BATCH_SIZE": "16", "OPTION_ENABLE_KV_CACHE_REUSE": "true", "SERVING_MONITOR": "true"}
    options["SERVING_CLIENT_HEADER"] = "x-client"
    with (
        serving(TINY_STORIES, **options) as server,
        sync_playwright() as driver,
    ):
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        pages = {}
        for name, options in PICTURES.items():
            pages[name] = browser.new_context(**options).new_page()
            pages[name].goto(f"{server.url}/monitor")
        threading.Thread(target=load, args=(server, arguments.rate, over), daemon=True).start()
        time.sleep(arguments.seconds)
        for name, page in pages.items():
            page.click("#generate")
            page.wait_for_timeout(4000)
            if name != "monitor-320":
                box = page.locator("#lanes").bounding_box()
                assert box is not None
                page.mouse.move(box["x"] + 60, box["y"] + box["height"] * 0.3)
                page.wait_for_timeout(300)
            page.screenshot(path=FOLDER / f"{name}.png", full_page=name == "monitor-320")
        over.set()
        browser.close()
        assert server.process.poll() is None, "\n".join(server.log[-40:])


if __name__ == "__main__":
    main()
