"""One server with the bundled model for all clients. `scripts/test-clients` installs them and sets the variable.

It also runs the tests of other clients in `tests/integration/server`, with the newest versions of these.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import Server, check_leaks, serving

if "DJL_TRTLLM_TEST_CLIENTS" not in os.environ:
    collect_ignore_glob = ["test_*.py"]

PROMPT = "Once upon a time there was a little girl"
TOKENS = 16
MESSAGES = [{"role": "user", "content": PROMPT}]
MODEL = "tiny-stories"


@pytest.fixture(scope="package")
def server(tiny_stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of `scripts/serve`, until the tests of another folder begin."""
    with serving(tiny_stories, tmp_path_factory.mktemp("server")) as started:
        yield started


def failures(server: Server) -> float:
    """How many responses had a status of 5xx."""
    return sum(server.metric("http_responses_total", status=str(status)) for status in range(500, 512))


@pytest.fixture(autouse=True)
def _nothing_is_left(server: Server) -> Iterator[None]:
    """After every test nothing waits, runs or is open, and no response had a status of 5xx."""
    before = failures(server)
    yield
    check_leaks()
    assert failures(server) == before


@pytest.fixture(scope="package")
def story(server: Server) -> str:
    """How the model goes on from `PROMPT`: `TOKENS` tokens, the likeliest each. It is the same for every client."""
    answered = server.post(PROMPT, max_new_tokens=TOKENS)
    text: str = answered.json()["generated_text"]
    return text


@pytest.fixture(scope="package")
def reply(server: Server) -> str:
    """How the model answers to `MESSAGES`, the likeliest tokens."""
    answered = server.http.post("/invocations", json={"messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0})
    text: str = answered.json()["choices"][0]["message"]["content"]
    return text
