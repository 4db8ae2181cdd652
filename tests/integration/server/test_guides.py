"""Guides that take a core for seconds, beside clients with small schemas: these do not wait for them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.models import PROMPT
from tests.support.server import Server, serving

BOMBS = 12
CLIENTS = 20
REQUESTS = 3


def small(number: int) -> dict[str, Any]:
    """A schema that no other request has."""
    name = f"property{number}"
    return {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": [name],
    }


def bomb(number: int) -> str:
    return f"((ab|[a-z]c){{0,{290 + number}}}){{0,300}}"


async def ask(http: httpx.AsyncClient, client: str, **guide: Any) -> httpx.Response:
    content = {"inputs": PROMPT, "parameters": {"max_new_tokens": 40, "details": True, **guide}}
    return await http.post("/invocations", json=content, headers={"x-client": client})


async def small_requests(http: httpx.AsyncClient, first: int) -> None:
    """Some requests of each client, which sends the next one when it has its answer."""

    async def one(client: int) -> None:
        for number in range(REQUESTS):
            answer = await ask(http, f"client {client}", guided_json=small(first + client * REQUESTS + number))
            assert answer.status_code == 200, answer.text
            assert len(json.loads(answer.json()["generated_text"])) == 1
            assert answer.json()["details"]["finish_reason"] != "length"

    await asyncio.gather(*map(one, range(CLIENTS)))


@pytest.fixture
def guided(model: Path, tmp_path: Path) -> Any:
    # Fewer places than bombs: those whose guides are tried have none.
    with serving(model, tmp_path, SERVING_CLIENT_HEADER="x-client", OPTION_MAX_ROLLING_BATCH_SIZE="8") as server:
        yield server


@pytest.mark.slow
def test_small_schemas_are_answered_while_bombs_are_tried(guided: Server) -> None:
    async def run() -> int:
        async with httpx.AsyncClient(base_url=guided.url, timeout=300, trust_env=False) as http:
            await small_requests(http, 10_000)  # the process that tries guides starts
            bombs = [
                asyncio.create_task(ask(http, f"bomb {number}", guided_regex=bomb(number))) for number in range(BOMBS)
            ]
            await asyncio.sleep(0.1)
            leaving = asyncio.get_running_loop().call_later(0.5, lambda: [each.cancel() for each in bombs[::3]])
            await small_requests(http, 0)
            leaving.cancel()
            waiting = sum(not each.done() for each in bombs)
            for each in bombs:
                each.cancel()
            await asyncio.gather(*bombs, return_exceptions=True)
            return waiting

    assert asyncio.run(run()), "all small ones are answered before the last bomb"
